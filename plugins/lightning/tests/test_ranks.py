"""A LightningModule on two processes: gradients and metrics are those of all ranks, callbacks agree."""

from importlib import import_module

import torch
from lightning_models import dataset, fit, made, models
from torch.utils.data import DataLoader

import torchhal


def train(tree, folder, strategy):
    """Train on two ranks; return the weights, the metrics, and the checkpoint's name."""
    pl = import_module(tree)
    module = made(models(pl)["Plain"])
    saver = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss")
    callbacks = [saver, pl.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)]
    torch.manual_seed(1)
    trainer = torchhal.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=9, logger=False, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(dataset(), 4), DataLoader(dataset(24, 6), 4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {key: value.clone() for key, value in module.state_dict().items()}, metrics, saver.best_model_path


def test_two_ranks_agree(pl, world2, tmp_path):
    (weights, metrics, path), (others, other_metrics, other_path) = world2.run(train, pl.__name__, str(tmp_path), "ddp")
    assert all(torch.equal(others[key], value) for key, value in weights.items())
    assert {name: metrics[name] for name in ("val_loss", "train_loss_epoch")} == {
        name: other_metrics[name] for name in ("val_loss", "train_loss_epoch")
    }
    assert path == other_path and path.startswith(str(tmp_path))
    loaded = models(pl)["Plain"].load_from_checkpoint(path)
    assert set(loaded.state_dict()) == set(weights)


def test_started_processes_bring_the_model_back(pl, tmp_path):
    """``ddp_fork``: the module goes to other processes, and its weights come back."""
    module = made(models(pl)["Plain"])
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = fit(torchhal.Trainer, module, devices=2, strategy="ddp_fork", default_root_dir=tmp_path)
    assert any(not torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert trainer.callback_metrics["val_loss"] > 0 and "log" not in vars(module)
