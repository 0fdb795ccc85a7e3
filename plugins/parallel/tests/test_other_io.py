"""A checkpoint that another IO has written is named as such; nothing starts from the beginning beside it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.errors import CheckpointError
from torchhal.trainer.callbacks import ModelCheckpoint


class Line(nn.Linear):
    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, io, ckpt_path=None):
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        plugins=[io],
    ).fit(Line(2, 1), DataLoader(torch.randn(8, 2), 4), ckpt_path=ckpt_path)


@pytest.mark.parametrize(("writer", "reader"), [("dcp", "torch"), ("torch", "dcp"), ("dcp_async", "async")])
@pytest.mark.parametrize("path", ["last", "last.ckpt"])
def test_a_checkpoint_of_another_io(tmp_path, writer, reader, path):
    fit(tmp_path, writer)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=rf"last.ckpt' was written by checkpoint IO '{writer.split('_')[0]}'"):
        fit(tmp_path, reader, path if path == "last" else str(tmp_path / path))
    assert sorted(tmp_path.iterdir()) == before
