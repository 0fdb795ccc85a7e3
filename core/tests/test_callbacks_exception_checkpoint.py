"""OnExceptionCheckpoint: a file to continue from after an exception, on one rank and on several."""

import os

import pytest
import torch
from minimal_net import script
from quiet_trainer import make
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, ModelCheckpoint, Module
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.strategies import DDPStrategy
from torchhal.trainer.callbacks import LambdaCallback, OnExceptionCheckpoint


class Net(Module):
    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if (self.trainer.current_epoch, batch_idx) == self.fails_at:
            raise KeyError("the cause")
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(ROWS, 2, shuffle=True)


def fit(*callbacks, model=None, ckpt_path=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **{"max_epochs": 3, **options})
    torch.manual_seed(5)
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize("place", [(0, 1), (1, 3), (2, 7)])
def test_saves_what_a_run_continues_from(tmp_path, place):
    """Exactly, if the step that failed had drawn no random number."""
    callback = OnExceptionCheckpoint(tmp_path / "new")
    with pytest.raises(KeyError, match="the cause"):
        fit(callback, model=Net(fails_at=place))
    assert callback.ckpt_path == str(tmp_path / "new" / "on_exception.ckpt") and os.path.exists(callback.ckpt_path)
    again, whole = fit(ckpt_path=callback.ckpt_path), fit()
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))


def test_replaces_an_older_file(tmp_path):
    for place in ((0, 1), (0, 2)):
        with pytest.raises(KeyError):
            fit(OnExceptionCheckpoint(tmp_path, "mine"), model=Net(fails_at=place))
        assert torch.load(tmp_path / "mine.ckpt", weights_only=True)["global_step"] == place[1]
    assert os.listdir(tmp_path) == ["mine.ckpt"]


def test_saves_nothing_without_an_exception(tmp_path):
    fit(OnExceptionCheckpoint(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("hook", "options"), [("on_fit_start", {}), ("setup", {}), ("on_train_batch_end", {"fast_dev_run": True})]
)
def test_saves_nothing_of_a_fit_that_has_not_begun(tmp_path, hook, options):
    def fail(*args):
        raise KeyError

    with pytest.raises(KeyError):
        fit(OnExceptionCheckpoint(tmp_path), LambdaCallback(**{hook: fail}), **options)
    assert os.listdir(tmp_path) == []


def test_saves_on_keyboard_interrupt(tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(OnExceptionCheckpoint(tmp_path), LambdaCallback(on_train_batch_end=interrupt))
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]


def test_leaves_an_orderly_stop_to_model_checkpoint(tmp_path):
    class Signalled(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            import signal

            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(OnExceptionCheckpoint(tmp_path / "mine"), Signalled(), ModelCheckpoint(tmp_path / "checkpoints"))
    assert os.listdir(tmp_path / "checkpoints") and not (tmp_path / "mine").exists()
    with pytest.raises(SystemExit):
        fit(OnExceptionCheckpoint(tmp_path / "mine"), Signalled())
    assert os.listdir(tmp_path / "mine") == ["on_exception.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), ConfigurationError, "'dirpath' must be a path"),
        ((".", ""), ValueError, "'filename' must be a name without extension"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        OnExceptionCheckpoint(*arguments)


def test_refuses_a_folder_before_the_fit(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"is no folder: give OnExceptionCheckpoint\(dirpath=...\) another"):
        fit(OnExceptionCheckpoint(tmp_path / "file" / "folder"))


# -- several ranks ---------------------------------------------------------------------------------------------------


BODY = """
from torchhal.trainer.callbacks import OnExceptionCheckpoint

def fail(trainer):
    if trainer.global_step == 6 and trainer.global_rank in {ranks}:
        raise KeyError("the cause")

callback = OnExceptionCheckpoint(folder)
run = trainer(At("on_train_batch_start", fail), callback, devices=2, strategy="ddp", max_epochs=3,
              enable_checkpointing=False)
try:
    run.fit(Net(), BATCHES, ckpt_path={ckpt_path!r})
finally:
    print("steps", run.global_step, flush=True)
"""


@pytest.mark.parametrize(
    "ranks", [(1,), pytest.param((0,), marks=pytest.mark.slow), pytest.param((0, 1), marks=pytest.mark.slow)]
)
def test_saves_without_the_other_ranks(tmp_path, ranks):
    """Whichever rank fails, in bounded time; the file continues on both, at the same batch."""
    failed = script(tmp_path, BODY.format(ranks=ranks, ckpt_path=None))
    assert failed.returncode and "the cause" in failed.stderr and "on_exception failed" not in failed.stderr
    (path,) = (tmp_path / "out").iterdir()
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 6 and len(saved["ranks"]) == 2
    again = script(tmp_path, BODY.format(ranks=(), ckpt_path=str(path)))
    assert again.returncode == 0 and "steps 12" in again.stdout, again.stderr
    assert "is continued" not in again.stderr


class Divides(DDPStrategy):
    def optimizer_state(self, optimizer):
        return super().optimizer_state(optimizer)


def refuse():
    try:
        fit(OnExceptionCheckpoint("."), devices=2, strategy=Divides())
    except ConfigurationError as error:
        return str(error)


def test_refuses_a_divided_state(world2):
    for message in world2.run(refuse):
        assert message.startswith("OnExceptionCheckpoint can't save when a rank has failed: strategy 'Divides' divides")
