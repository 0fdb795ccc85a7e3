"""Checkpoints that Lightning's own Trainer has written, continued by torchhal's; and torchhal's, read by Lightning."""

import copy
from importlib import import_module

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import CheckpointCorruptError, CheckpointMismatchError
from torchhal_lightning import Trainer


def written(pl, cls, folder, **options):
    """Train two epochs by Lightning's Trainer, and return the paths of its checkpoints by their names."""
    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **options)
    fit(pl.Trainer, made(cls), max_epochs=2, enable_checkpointing=True, callbacks=saver)
    return {path.stem: path for path in folder.iterdir()}


def continued(trainer_of, cls, path, **options):
    """Continue up to four epochs; return the module."""
    module = made(cls)
    trainer = trainer_of(
        accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(dataset(), 8, shuffle=True), DataLoader(dataset(24, 6), 8), ckpt_path=path)
    module.note("end", trainer.global_step, trainer.current_epoch)
    return module


@pytest.mark.parametrize("name", ["Plain", "Plateau", "Manual", "OwnStep", "Everything"])
def test_the_next_epochs_are_those_of_lightning(pl, tmp_path, name):
    cls = models(pl)[name]
    path = written(pl, cls, tmp_path, save_on_train_epoch_end=True)[
        "epoch=1-step=12" if name != "Manual" else "epoch=1-step=24"
    ]
    theirs, mine, facade = (continued(each, cls, path) for each in (pl.Trainer, torchhal.Trainer, Trainer))
    same(mine, theirs)
    same(facade, theirs)


def test_inside_of_an_epoch_it_goes_on_at_the_next_batch(pl, tmp_path):
    """Lightning begins the epoch's data anew, and torchhal leaves out so many batches, so that none comes twice."""
    cls = models(pl)["Plain"]
    path = written(pl, cls, tmp_path, every_n_train_steps=4)["epoch=1-step=8"]
    with pytest.warns(UserWarning, match=r"of Lightning .* is continued .* the epoch in the order of now"):
        mine = continued(torchhal.Trainer, cls, path)
    theirs = continued(pl.Trainer, cls, path)
    counted = [[note[:4] for note in each.notes if note[0] == "train"] for each in (mine, theirs)]
    assert counted[0] == counted[1] and counted[0][0] == ("train", 2, 8, 1)


def test_callbacks_and_the_scaler_continue(pl, tmp_path):
    cls = models(pl)["Plain"]
    stopper = pl.callbacks.EarlyStopping("val_loss", patience=50)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    scaler = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=32.0))
    fit(pl.Trainer, made(cls), max_epochs=2, enable_checkpointing=True, callbacks=[saver, stopper], plugins=[scaler])
    again = pl.callbacks.EarlyStopping("val_loss", patience=50)
    scaler = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    seen = []

    class Watch(torchhal.Callback):
        def on_train_start(self, trainer, module):
            seen.append((trainer.strategy.precision.scaler.get_scale(), again.best_score, again.wait_count))

    path = tmp_path / "epoch=1.ckpt"
    continued(torchhal.Trainer, cls, path, callbacks=[again, Watch()], plugins=[scaler])
    saved = torch.load(path, weights_only=True)["callbacks"][stopper.state_key]
    assert seen == [(32.0, saved["best_score"], saved["wait_count"])]


def test_two_ranks_continue_one_process(pl, world2, tmp_path):
    path = written(pl, models(pl)["Plain"], tmp_path, save_on_train_epoch_end=True)["epoch=1-step=12"]
    results = world2.run(continue_on_two, pl.__name__, str(path))
    assert results[0] == results[1] and results[0][0] == ("train", 0, 12, 2)


def continue_on_two(tree, path):
    cls = models(import_module(tree))["Plain"]
    module = continued(torchhal.Trainer, cls, path, devices=2, strategy="ddp")
    first = next(note for note in module.notes if note[0] == "train")
    return first[:4], [value.double().sum().item() for value in module.state_dict().values()]


def test_an_evaluation_takes_its_weights(pl, tmp_path):
    cls = models(pl)["Plain"]
    path = written(pl, cls, tmp_path, save_on_train_epoch_end=True)["epoch=1-step=12"]
    loader = DataLoader(dataset(24, 6), 8)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    theirs, mine = (
        each(**options).test(made(cls), loader, ckpt_path=path, verbose=False)
        for each in (pl.Trainer, torchhal.Trainer)
    )
    assert mine[0].keys() == theirs[0].keys() and mine[0]["test_loss"] == pytest.approx(theirs[0]["test_loss"])


def test_lightning_loads_what_torchhal_has_saved(pl, tmp_path):
    cls = models(pl)["Plain"]
    module = made(cls, 5)
    fit(torchhal.Trainer, module, max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    loaded = cls.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams.width == 5
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_weights_alone_are_no_run(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(pl.Trainer, made(models(pl)["Plain"]), max_epochs=1, enable_checkpointing=True, callbacks=saver)
    with pytest.raises(CheckpointMismatchError, match="holds weights only"):
        continued(torchhal.Trainer, models(pl)["Plain"], saver.best_model_path)


def test_a_damaged_one_says_what_it_lacks(pl, tmp_path):
    cls = models(pl)["Plain"]
    path = written(pl, cls, tmp_path, save_on_train_epoch_end=True)["epoch=1-step=12"]
    good = torch.load(path, weights_only=True)
    for place, value, why in (
        (("loops", "fit_loop"), None, "its counters lack"),
        (("loops", "fit_loop", "epoch_progress"), {}, "its counters lack 'current'"),
        (("loops", "fit_loop", "epoch_progress", "current", "completed"), -3, "epoch"),
        (("pytorch-lightning_version",), "x", "Lightning can't read its version"),
        (("optimizer_states",), 7, "optimizer_states"),
        (("callbacks",), [], "callbacks"),
    ):
        changed = copy.deepcopy(good)
        owner = changed
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]] = value
        torch.save(changed, path)
        with pytest.raises(CheckpointCorruptError, match=f"(?s){path.name}.*{why}"):
            continued(torchhal.Trainer, cls, path)
