"""Provide a model, its data and a clock for the benchmarks that compare the steps of an engine with a raw loop."""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torchhal import Callback

WARM_UP = 10
"""Steps of a run that aren't measured."""
QUIET = {
    "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(256, 1)

    def forward(self, x):
        return self.head(self.layers(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def dataset(steps: int) -> TensorDataset:
    """Return the samples of ``steps`` measured steps of two ranks with batches of 16."""
    samples = 32 * (steps + WARM_UP)
    return TensorDataset(torch.randn(samples, 256), torch.randn(samples, 1))


class Clock:
    """Adds the seconds from the start of each batch to that of the next to ``times``, those of the warm-up left out."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def batch(self, index: int) -> None:
        """Note that the batch begins."""
        now = time.perf_counter()
        if index > WARM_UP:
            self.times.append(now - self.last)
        self.last = now


class Times(Callback):
    """The clock of a Trainer's run."""

    def __init__(self, times: list[float]) -> None:
        self.clock = Clock(times)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.clock.batch(batch_idx)


def fastest(times: list[float]) -> float:
    """Return the milliseconds of the fastest tenth of steps."""
    return statistics.quantiles(times, n=10)[0] * 1e3
