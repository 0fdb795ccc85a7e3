"""Modules, data modules and callbacks as they are written for Lightning, and one run of them by either Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def dataset(samples=48, seed=5):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def models(pl):
    """Return the cases of a tree, ``lightning.pytorch`` or ``pytorch_lightning``, by name."""

    class Base(pl.LightningModule):
        """Writes down what a run does, so that two can be compared."""

        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))
            self.notes = []

        def note(self, *values):
            self.notes.append(tuple(v.item() if isinstance(v, torch.Tensor) else v for v in values))

        def loss(self, batch):
            return F.cross_entropy(self.body(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.note("train", batch_idx, self.steps(), self.current_epoch, loss)
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def steps(self):
            return self.global_step

        def validation_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.note("val", batch_idx, loss)
            self.log("val_loss", loss)

        def test_step(self, batch, batch_idx):
            self.log_dict({"test_loss": self.loss(batch), "test_batch": float(batch_idx)})

        def on_train_epoch_end(self):
            self.note("epoch", sorted((k, v.item()) for k, v in self.trainer.callback_metrics.items()))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Plain(Base):
        pass

    class Scheduled(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.note("lr", self.trainer.optimizers[0].param_groups[0]["lr"], outputs["loss"])

    class Plateau(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

        def on_train_epoch_start(self):
            self.note("lr", self.lr_schedulers().optimizer.param_groups[0]["lr"])

    class Manual(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            scheduler = self.lr_schedulers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                self.note("train", batch_idx, self.global_step, loss)
            scheduler.step()
            self.log("train_loss", loss)

        def configure_optimizers(self):
            first = torch.optim.Adam(self.body[0].parameters(), lr=1e-2)
            second = torch.optim.SGD(self.body[3].parameters(), lr=0.1)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2, gamma=0.5)]

    class ManualOne(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                self.note("train", batch_idx, self.global_step, loss)
                return loss

            optimizer.step(closure=closure)
            self.note(isinstance(optimizer, torch.optim.Optimizer), optimizer.param_groups[0]["lr"])

    class OwnStep(Base):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + self.trainer.global_step)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self.note("stepped", epoch, batch_idx)

    class OwnHooks(Base):
        """Overrides hooks, and calls what it overrides."""

        def backward(self, loss, *args, **kwargs):
            super().backward(loss, *args, **kwargs)
            self.note("backward")

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

        def lr_scheduler_step(self, scheduler, metric):
            assert metric is None
            scheduler.step()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

        def on_before_optimizer_step(self, optimizer):
            self.note("norm", sum(p.grad.abs().sum() for p in self.parameters()))

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 2, batch[1]]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 1, batch[1]]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "epoch"}]

    class Skips(Base):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "extra": batch[0]}

        def steps(self):
            return None  # Lightning counts a step for a batch without a loss, too

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    class Everything(Base):
        """Notes the order of its hooks."""

    for hook in (
        "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_validation_start",
        "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_train_batch_start",
        "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end", "on_before_backward",
        "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "setup", "teardown", "prepare_data",
        "on_save_checkpoint", "configure_model",
    ):  # fmt: skip

        def called(self, *args, _hook=hook, **options):
            self.note(_hook, self.trainer.sanity_checking, self.trainer.state.stage)

        setattr(Everything, hook, called)

    class ClosureInside(Base):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    class LogsEverywhere(Base):
        def on_train_start(self):
            self.log("begun", 1.0)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("batches", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

        def on_validation_epoch_end(self):
            self.log("validated", torch.tensor(2.0), prog_bar=True)

        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            self.log("ended", float(self.current_epoch))  # read where the epoch is over: ranks average it first

    class WithMetric(Base):
        def __init__(self):
            import torchmetrics

            super().__init__()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.accuracy(self.body(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            self.mean.update(float(batch_idx))

        def on_validation_epoch_end(self):
            self.log("mean", self.mean.compute())
            self.mean.reset()

    class OwnLog(Base):
        """Logs through a method of its own, and Lightning's."""

        def log(self, name, value, **options):
            super().log(f"my_{name}", value, **options)

    return {
        cls.__name__: cls
        for cls in (
            OwnLog, Plain, Scheduled, Plateau, Manual, ManualOne, OwnStep, OwnHooks, Skips, Everything, ClosureInside,
            LogsEverywhere, WithMetric,
        )
    }  # fmt: skip


QUIET = {
    "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False,
    "max_epochs": 3, "logger": False, "enable_checkpointing": False,
}  # fmt: skip


def fit(trainer_of, model, *, shuffle=True, **options):
    """Train ``model`` from fixed seeds; return the Trainer."""
    torch.manual_seed(1)
    trainer = trainer_of(**{**QUIET, **options})
    trainer.fit(model, DataLoader(dataset(), 8, shuffle=shuffle), DataLoader(dataset(24, 6), 8))
    return trainer


def made(cls, *args):
    torch.manual_seed(0)
    return cls(*args)


def same(mine, theirs, but=()):
    """Fail unless two modules noted the same."""
    mine, theirs = ([note for note in module.notes if note[0] not in but] for module in (mine, theirs))
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one[0] != "epoch":
            assert one == other, f"note {number}"
            continue
        assert [key for key, _ in one[1]] == [key for key, _ in other[1]]
        for (key, value), (_, reference) in zip(one[1], other[1], strict=True):
            assert value == pytest.approx(reference, rel=1e-6), key  # a sum in another precision
    assert len(mine) == len(theirs)
