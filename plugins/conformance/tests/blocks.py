"""Define a strategy that trains models of blocks only, with such a model and its data, for test_command."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torchhal.errors import ModelError
from torchhal.strategies import DDPStrategy


class BlocksOnly(DDPStrategy):
    def connect(self, module: Any) -> None:
        if not hasattr(module, "blocks"):
            raise ModelError(f"{type(module).__name__} has no 'blocks'")
        super().connect(module)


class Unaveraged(BlocksOnly):
    def optimizer_step(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.world_size)
        return super().optimizer_step(optimizer, *arguments, **options)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch[0]).mean(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(x, batch[1])


def words() -> Words:
    return Words()


class FailingWords(Words):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) != 2:  # the two samples that show whether it works at all
            raise KeyError("label")
        return super().training_step(batch, batch_idx)


def failing() -> FailingWords:
    return FailingWords()


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(11, (30, 4), generator=generator), torch.randint(8, (30,), generator=generator))


def sentences_of_text() -> list[str]:
    return ["a", "b"]


def stepless() -> nn.Module:
    return nn.Linear(1, 1)
