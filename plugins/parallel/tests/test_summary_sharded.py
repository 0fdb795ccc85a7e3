"""The summary of a model that ranks divide: the whole layers, with their shapes, and what one rank holds of them."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.trainer.callbacks import ModelSummary


class Net(nn.Module):
    """A model with a tied weight, built before the run or, with ``late``, in it."""

    tensor_parallel_plan = {"blocks.0": "colwise", "blocks.2": "rowwise"}

    def __init__(self, late):
        super().__init__()
        self.example_input_array = torch.zeros(3, 4)
        if not late:
            self.configure_model()

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
            self.head = nn.Linear(4, 4)

    def forward(self, batch):
        return self.head(self.blocks(batch))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def summary(strategy, late):
    """Return what a fit prints on this rank, and the bytes of weights that it holds."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=ModelSummary(), max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(Net(late), DataLoader(torch.ones(8, 4), 2))
    return out.getvalue()


@pytest.mark.parametrize("late", [False, True], ids=["before", "in configure_model"])
@pytest.mark.parametrize(
    ("strategy", "weights"),
    [
        ("zero3", "336 bytes"),
        ("zero1", "672 bytes"),
        ("pipeline", "352 bytes"),
        pytest.param("tensor_parallel", "384 bytes", marks=pytest.mark.slow),
    ],
)
def test_whole_layers_and_the_part_of_a_rank(world2, strategy, weights, late):
    printed, nothing = world2.run(summary, strategy, late)
    lines = [line.split() for line in printed.splitlines()]
    assert nothing == ""
    assert ["blocks", "Sequential", "148", "592", "bytes", "trainable", "[3,", "4]", "[3,", "4]"] in lines
    assert ["head", "Linear", "20", "80", "bytes", "trainable", "[3,", "4]", "[3,", "4]"] in lines
    assert "168 trainable parameters, 0 frozen, 672 bytes" in printed
    assert f"memory of each of 2 ranks (estimate for {strategy}, without activations)" in printed
    assert f"  weights {weights}, gradients" in printed and "optimizer state" in printed
