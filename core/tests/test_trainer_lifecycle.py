"""Test one Trainer over several calls: repeated fits, failures in each hook, and global flags restored."""

import pytest
import torch
from full_net import Net, batches, fit
from quiet_trainer import make

from torchhal import Callback

pytestmark = pytest.mark.usefixtures("accelerator")


def test_fit_test_fit():
    model = Net()
    trainer = make(max_epochs=1)
    for epochs in (1, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, batches(), batches(1))
        assert (trainer.global_step, trainer.current_epoch) == (2 * epochs, epochs)
        assert trainer.test(model, batches(1), verbose=False)[0].keys() == {"test_loss"}
        assert model.training and trainer.optimizers


class Fails(Net):
    """Raises in one place, once."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def fail(self, place):
        if place == self.place:
            self.place = None
            raise ZeroDivisionError(place)


PLACES = [
    "prepare_data", "setup", "configure_model", "configure_callbacks", "configure_optimizers", "train_dataloader",
    "val_dataloader", "on_fit_start", "on_validation_start", "validation_step", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_zero_grad", "backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "teardown",
]  # fmt: skip
for _name in PLACES:

    def _body(self, *args, _name=_name, **kwargs):
        self.fail(_name)
        if _name.endswith("dataloader"):
            return batches(3)
        inherited = getattr(Net, _name, None)
        return inherited(self, *args, **kwargs) if inherited is not None else None

    setattr(Fails, _name, _body)


@pytest.mark.parametrize("place", PLACES)
def test_fit_after_failure(place):
    """After a failure anywhere everything is torn down and the next fit works."""
    calls = []

    class Watch(Callback):
        def on_exception(self, trainer, module, exception):
            calls.append(("exception", str(exception)))

        def teardown(self, trainer, module, stage):
            calls.append(("teardown", stage))

    model = Fails(place)
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    trainer = make(Watch(), num_sanity_val_steps=1, deterministic=True, detect_anomaly=True)
    with pytest.raises(ZeroDivisionError, match=f"^{place}$"):
        trainer.fit(model)
    assert sorted(calls) == [("exception", place), ("teardown", "fit")]
    assert trainer.state.status == "interrupted" and trainer.state.stage is None
    assert not trainer.strategy.is_set_up
    assert model.training and model.layer.training
    assert (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()) == flags
    if place in ("on_train_end", "on_fit_end", "teardown"):
        trainer.fit_loop.max_epochs = 2
    before = trainer.fit_loop.global_step
    trainer.fit(model)
    assert trainer.state.status == "finished" and trainer.global_step == before + 3
    assert (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()) == flags


def test_an_error_while_tearing_down_hides_nothing(caplog):
    class Bad(Callback):
        def on_exception(self, trainer, module, exception):
            raise ValueError("on_exception")

        def teardown(self, trainer, module, stage):
            raise ValueError("teardown")

    class Late(Callback):
        torn = False

        def teardown(self, trainer, module, stage):
            self.torn = True

    late = Late()
    with pytest.raises(ZeroDivisionError, match="training_step"):
        fit(Fails("training_step"), None, None, Bad(), late)
    assert late.torn and "Bad.teardown failed too" in caplog.text and "Bad.on_exception failed" in caplog.text
    late = Late()
    trainer = make(Bad(), late)
    with pytest.raises(ValueError, match=r"^teardown$"):
        trainer.fit(Net(), batches())
    assert late.torn and trainer.state.status == "interrupted"


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_failed_evaluation_restores_mode(fn):
    """A failing evaluation leaves the model's mode as it was."""

    class Bad(Net):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

        test_step = predict_step = validation_step

    model = Bad()
    model.layer.eval()
    with pytest.raises(ZeroDivisionError):
        getattr(make(), fn)(model, batches(1))
    assert model.training and not model.layer.training and torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_global_flags_restored(fails, before):
    """Global flags are as the Trainer sets them during a fit, and as they were after it."""
    found = []

    class Look(Net):
        def training_step(self, batch, batch_idx):
            found.append(
                (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    torch.is_anomaly_enabled(),
                )
            )
            if fails:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    torch.use_deterministic_algorithms(before[0])
    torch.autograd.set_detect_anomaly(before[1], check_nan=False)
    try:
        trainer = make(deterministic="warn", detect_anomaly=True)
        try:
            trainer.fit(Look(), batches(1))
        except ZeroDivisionError:
            assert fails
        assert found == [(True, True, True)]
        after = (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled())
        assert after == before and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


def test_a_failed_resume_leaves_nothing_behind(tmp_path):
    trainer, _ = fit(Net(), batches(4), max_steps=2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = make(max_steps=4)
    model = Fails("on_fit_start")
    with pytest.raises(ZeroDivisionError):
        again.fit(model, batches(4), ckpt_path=tmp_path / "a.ckpt")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again.fit(Net(), batches(4))  # without it, so nothing of it is restored
    assert torch.equal(torch.get_rng_state(), state) is False or again.global_step == 4
    assert again._run.progress.generators is None


def test_optimizers_saved_with_own_model(tmp_path):
    """The optimizers of another model are not saved with this one."""
    trainer, _ = fit(Net())
    other = Net()
    trainer.validate(other, batches(1), verbose=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["optimizer_states"] == [] and torch.equal(saved["state_dict"]["layer.weight"], other.layer.weight)
