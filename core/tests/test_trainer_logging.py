"""Test where self.log may be called and when its values can be read."""

import pytest
import torch
from full_net import Net, batches, fit

from torchhal import Callback
from torchhal.errors import (
    ConfigurationError,
)

pytestmark = pytest.mark.usefixtures("accelerator")


def test_values_logged_before_step():
    """Values logged before a step are weighed with its batch."""

    class Logs(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.log("first", float(batch[0]), on_epoch=True, on_step=False)

    trainer, _ = fit(Logs(), [torch.full((1, 1), 1.0), torch.full((3, 1), 5.0)])
    assert trainer.callback_metrics["first"].item() == pytest.approx(4.0)  # (1 + 3 * 5) / 4


def test_log_dict_takes_names_and_values():
    class Lists(Net):
        def training_step(self, batch, batch_idx):
            self.log_dict([1.0])

    with pytest.raises(TypeError, match=r"'metrics' of self.log_dict must map names to values \(got \[1.0\]\)"):
        fit(Lists())


LOGGABLE = [
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
    "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
    "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
]  # fmt: skip


@pytest.mark.parametrize("hook", LOGGABLE)
def test_log_in_hooks(hook):
    class Logs(Net):
        pass

    def body(self, *args):
        self.log("x", 3.0)
        if hook in ("training_step", "validation_step"):
            return getattr(Net, hook)(self, *args)

    setattr(Logs, hook, body)
    trainer, _ = fit(Logs(), None, batches(1))
    assert trainer.callback_metrics["x"].item() == 3.0


def test_log_without_a_trainer_says_so():
    model = Net()
    with pytest.warns(UserWarning, match="'loss' of Net goes nowhere: self.log needs a Trainer") as said:
        model.log("loss", 1.0)
    assert said[0].filename == __file__, "the line of the caller"
    with pytest.warns(UserWarning, match="'a', 'b' of Net goes nowhere") as said:
        model.log_dict({"a": 1.0, "b": 2.0})
    assert said[0].filename == __file__ and len(said) == 1


@pytest.mark.parametrize(
    "hook",
    ["setup", "configure_optimizers", "on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "teardown"],
)
def test_log_outside_loop_refused(hook):
    """self.log is refused where no loop runs that it could log for."""

    class Logs(Net):
        pass

    def body(self, *args):
        self.log("x", 3.0)

    setattr(Logs, hook, body)
    with pytest.raises(ConfigurationError, match="x"):
        fit(Logs(), None, batches(1))


def test_metrics_are_live_in_hooks():
    found = {}

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("late", 8.0)

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            found[batch_idx] = trainer.callback_metrics["both_step"].item()

        def on_validation_end(self, trainer, module):
            found["val"] = "val_loss" in trainer.callback_metrics

        def on_train_epoch_end(self, trainer, module):
            found["epoch"] = trainer.callback_metrics["both_epoch"].item()

    trainer, _ = fit(Logs(), None, batches(1), Look())
    assert found == {0: 0.0, 1: 1.0, "val": True, "epoch": 0.5}
    assert trainer.callback_metrics["both"].item() == 0.5 and trainer.callback_metrics["late"].item() == 8.0
