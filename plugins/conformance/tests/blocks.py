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
    return [str(number) for number in range(30)]


def nothing_at_all() -> TensorDataset:
    return TensorDataset(torch.zeros(0, 4), torch.zeros(0))


def one_sentence() -> Any:
    return list(sentences())[:1]


def repeated() -> Any:
    return one_sentence() * 30


class _Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        words, label = super().__getitem__(index)
        return words + torch.rand(4), label


def augmented() -> TensorDataset:
    return _Augmented(*sentences().tensors)


def endless() -> Any:
    return iter(sentences())


class _Changed(Words):
    """Words whose loss goes through a function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(super().training_step(batch, batch_idx))


def lossless() -> nn.Module:
    return _Changed(lambda loss: None)


def not_finite() -> nn.Module:
    return _Changed(lambda loss: loss * float("nan"))


def detached() -> nn.Module:
    return _Changed(lambda loss: loss.detach())


def dropping() -> nn.Module:
    return _Changed(lambda loss: loss * torch.rand(()))


def frozen() -> nn.Module:
    return Words().requires_grad_(False)


def unseeded() -> nn.Module:
    model = Words()
    model.bias = nn.Parameter(torch.tensor([float(next(_numbers))]))
    return model


_numbers = iter(range(1000))


def stepless() -> nn.Module:
    return nn.Linear(1, 1)
