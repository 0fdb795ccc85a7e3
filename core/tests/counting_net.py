"""Define a model that notes which of its steps are called, batches for it, and a fit of it."""

import hardware
import torch
from torch import nn

from torchhal import Module, Trainer


class Net(Module):
    """A model that notes which step is called.

    ("train", epoch, batch_idx, the batch's number), ("val", dataloader_idx, ...), ...
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls = []

    def training_step(self, batch, batch_idx):
        self.calls.append(("train", self.current_epoch, batch_idx, int(batch.flatten()[0])))
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("sanity" if self.trainer.sanity_checking else "val", dataloader_idx, batch_idx))
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.calls.append(("test", 0, batch_idx))

    def predict_step(self, batch, batch_idx):
        return int(batch.flatten()[0])

    def on_validation_start(self):
        self.calls.append("sanity start" if self.trainer.sanity_checking else "val start")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def count(self, kind):
        return sum(call == kind if isinstance(call, str) else call[0] == kind for call in self.calls)

    def validated_after(self):
        """Return the number of training batches before each validation."""
        train, found = 0, []
        for call in self.calls:
            train += call[0] == "train"
            if call == "val start":
                found.append(train)
        return found


def batches(count):
    return [torch.full((2, 1), float(index)) for index in range(count)]


class Unsized:
    """A loader that doesn't know its length and can be read again."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(batches(self.count))


def make(*callbacks, **options):
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(train=4, val=None, *callbacks, model=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **options)
    trainer.fit(
        model,
        batches(train) if isinstance(train, int) else train,
        batches(val) if isinstance(val, int) else val,
    )
    return trainer, model
