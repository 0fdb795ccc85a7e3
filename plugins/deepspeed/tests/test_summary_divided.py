"""The summary of a model of which each rank has built a part, at ZeRO's stage 3."""

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.trainer.callbacks import ModelSummary


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(3, 4)

    def configure_model(self):
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def summary():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="deepspeed_stage_3", callbacks=ModelSummary(), max_steps=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(torch.ones(8, 4), 2))
    return out.getvalue()


@pytest.mark.slow
def test_whole_shapes_of_parameters_in_parts(world2):
    printed, _ = world2.run(summary, timeout=60)
    assert "20 trainable parameters, 0 frozen, 80 bytes" in printed
    assert "shapes of the layers: unknown, as each rank has built a part of the parameters" in printed
    assert "weights 80 bytes, gradients 40 bytes, optimizer state 80 bytes" in printed
