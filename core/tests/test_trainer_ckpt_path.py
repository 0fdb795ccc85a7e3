"""Test ckpt_path='best' and 'last', and checkpoints saved from each hook."""

import os

import pytest
import torch
from full_net import Net, Scored, batches, fit
from quiet_trainer import make

from torchhal import Callback
from torchhal.errors import (
    ConfigurationError,
)
from torchhal.trainer.callbacks import ModelCheckpoint

pytestmark = pytest.mark.usefixtures("accelerator")


def stamp(path, age):
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))


def test_best_and_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last=True)
    trainer, model = fit(Scored(), None, batches(1), callback, max_epochs=4)
    final = model.layer.weight.item()
    results = []
    for path, epoch in (("best", 1), ("last", 3), (None, 3)):
        results.append(trainer.test(model, batches(1), ckpt_path=path, verbose=False)[0]["test_loss"])
        stored = torch.load(tmp_path / f"epoch={epoch}.ckpt" if epoch == 1 else tmp_path / "last.ckpt")
        assert model.layer.weight.item() == stored["state_dict"]["layer.weight"].item()
    assert results[0] != results[1] == results[2] and final == model.layer.weight.item()


def test_best_without_a_fit():
    for trainer in (make(), make(ModelCheckpoint("x"))):
        with pytest.raises(
            ConfigurationError,
            match="ckpt_path='best' needs a fit with this Trainer whose ModelCheckpoint found a best one",
        ):
            trainer.test(Net(), batches(1), ckpt_path="best")


def test_last_without_files(tmp_path):
    with pytest.warns(UserWarning, match="there is no checkpoint yet, so training starts from the beginning"):
        trainer = make(ModelCheckpoint(tmp_path))
        trainer.fit(Net(), batches(), ckpt_path="last")
    assert trainer.global_step == 2
    for fn in ("validate", "test", "predict"):
        empty = tmp_path / "empty"
        with pytest.raises(ConfigurationError, match=rf"'last' needs a checkpoint, and there is none in .*empty.*{fn}"):
            getattr(make(ModelCheckpoint(empty)), fn)(Net(), batches(1), ckpt_path="last")
    with pytest.raises(ConfigurationError, match="needs a ModelCheckpoint callback"):
        make().fit(Net(), batches(), ckpt_path="last")


@pytest.mark.parametrize("own", [True, False], ids=["own dirpath", "versioned folder"])
def test_last_is_the_newest_complete_one(tmp_path, own):
    def trainer(**options):
        where = {"dirpath": tmp_path} if own else {}
        checkpoint = ModelCheckpoint(filename="{step}", every_n_train_steps=2, save_top_k=-1, **where)
        return make(
            checkpoint, default_root_dir=tmp_path, **{"logger": not own, "enable_checkpointing": True, **options}
        )

    first = trainer(max_steps=6)
    first.fit(Net(), batches(9))
    folder = first.checkpoint_callback.dirpath
    newest = os.path.join(folder, "step=6.ckpt")
    with open(newest, "rb") as file:
        whole = file.read()
    with open(os.path.join(folder, "step=8.ckpt"), "wb") as file:  # cut off, and the newest by its time
        file.write(whole[: len(whole) // 2])
    with open(os.path.join(folder, ".step=9.ckpt.tmp"), "wb") as file:
        file.write(whole[:10])
    stamp(newest, 1000)  # a copied folder has other times
    second = trainer(max_steps=7)
    second.fit(Net(), batches(9), ckpt_path="last")
    assert second.ckpt_path == newest and second.global_step == 7
    third = trainer(max_steps=9)
    third.fit(Net(), batches(9), ckpt_path="last")
    assert third.global_step == 9


@pytest.mark.parametrize(
    "hook",
    ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
     "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
     "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
     "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"],
)  # fmt: skip
def test_save_checkpoint_in_every_hook(tmp_path, hook):
    """A checkpoint may be saved in every hook."""
    path = tmp_path / "a.ckpt"

    class Save(Callback):
        pass

    setattr(Save, hook, lambda self, trainer, *args: trainer.save_checkpoint(path))
    trainer, _ = fit(Net(), batches(3), batches(1), Save(), max_epochs=2)
    assert trainer.global_step == 6
    again = make(max_epochs=3)
    again.fit(Net(), batches(3), batches(1), ckpt_path=path)
    assert (again.global_step, again.current_epoch) == (9, 3)
    assert Net.load_from_checkpoint(path).layer.weight.shape == (1, 1)
