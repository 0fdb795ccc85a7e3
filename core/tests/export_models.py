"""Models that the tests of export train, and in a shell name by ``--model export_models:NAME``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer


class Trained(torchhal.Module):
    """The steps of a model that maps images to a few numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(Trained):
    """Batch norm, whose evaluation mode differs, dropout, and a size taken from the input."""

    def __init__(self, width: int = 2, note: str = "a|b") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout()
        self.head = nn.Linear(width, 4)
        self.example_input_array = torch.ones(1, 3, 6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.conv(x)).relu()).flatten(2).mean(2)
        return self.head(hidden.view(x.shape[0], -1))


class Tied(Trained):
    """A weight of two names, one with gaps in its memory, a buffer in another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.strided = nn.Parameter(torch.arange(12.0).view(4, 3).t())
        self.register_buffer("rows", torch.arange(8.0).view(2, 4))
        self.register_buffer("row", self.get_buffer("rows")[1])

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.embed(tokens))
        return {"logits": logits if scale is None else logits * scale, "none": None, "more": (self.strided.sum(),)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0].long().abs()[:, 0, 0] % 6)["logits"].square().mean()


class FixedBatch(Trained):
    """A forward that is made for two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.view(2, 4))


class Dice(Images):
    """A forward that draws random numbers in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(4)


class Other(Trained):
    """Of other weights than all of these."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


def trained(module: nn.Module, path: Any, *, epochs: int = 1, **options: Any) -> str:
    """Fit ``module`` for a few steps and save a checkpoint at ``path``."""
    torch.manual_seed(1)
    options = {"accelerator": "cpu", "enable_checkpointing": False, **options}
    trainer = Trainer(
        max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False, **options
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 3, 6, 6)), 4))
    trainer.save_checkpoint(path)
    return str(path)
