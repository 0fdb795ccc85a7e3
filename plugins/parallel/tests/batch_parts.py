"""How ``dp`` and one device train the same models on the same batches, for tests of strategies that divide a batch."""

import dataclasses
import functools
import typing

import models
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Trainer

CPU = torch.device("cpu")
PLACES = [("cpu", 2), ("cpu", 3), ("sim", 2)]
BATCHES = 24
LAST = 7  # samples of the last batch, which 2 and 3 don't divide


everywhere = pytest.mark.parametrize("place", PLACES, indirect=True, ids=lambda place: f"{place[0]}-{place[1]}")
two_devices = pytest.mark.parametrize("place", [("cpu", 2), ("sim", 2)], indirect=True, ids=lambda place: place[0])


def dataset(model, batches=BATCHES):
    inputs, targets = models.data(models.Transformer if model is models.Transformer else models.ConvNet, batches)
    kept = (batches - 1) * models.BATCH + LAST
    return TensorDataset(inputs[:kept], targets[:kept])


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(trainer.callback_metrics["loss_step"]))


def make(place, strategy=None, **options):
    accelerator, devices = place
    settings = {
        "accelerator": accelerator, "devices": devices, "strategy": strategy or ("dp" if devices > 1 else "auto"),
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**settings, **options})


def train(place, module, data, batch_size=models.BATCH, **options):
    """(losses of the batches, state) after a fit."""
    losses = Losses()
    trainer = make(place, callbacks=[losses, *options.pop("callbacks", [])], **options)
    trainer.fit(module, DataLoader(data, batch_size))
    return losses.values, module.state_dict()


def plain(module, data, parts=1, dtype=torch.float32):
    """The loop anybody would write; with ``parts``, over the parts of each batch, the first one's buffers kept."""
    module.to(dtype)
    [optimizer], [config] = module.configure_optimizers()
    losses = []
    for index, (x, y) in enumerate(DataLoader(data, models.BATCH)):
        x = x.to(dtype) if x.is_floating_point() else x
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        after = before
        total = 0.0
        for part, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])
            loss = F.cross_entropy(module(xs).flatten(0, -2), ys.flatten()) * (len(xs) / len(x))
            (loss / models.ACCUMULATE).backward()
            total += loss.item()
            if part == 0:
                after = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(after[name])
        losses.append(total)
        if index % models.ACCUMULATE == models.ACCUMULATE - 1:
            nn.utils.clip_grad_norm_(module.parameters(), models.CLIP)
            optimizer.step()
            config["scheduler"].step()
            optimizer.zero_grad()
    return losses, module.state_dict()


@functools.lru_cache
def reference(model, parts, dtype):
    return plain(model(), dataset(model), parts, dtype)


def greatest(state, other):
    assert state.keys() == other.keys()
    return max((state[name].double() - other[name].double()).abs().max().item() for name in state)


class Answer(typing.NamedTuple):
    logits: torch.Tensor
    names: list


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    kind: str = "image"
