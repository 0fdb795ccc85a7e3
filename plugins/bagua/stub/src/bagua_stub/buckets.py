"""Tensors that are communicated together, and the backend that waits until all of a bucket's are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class Entry:
    """A parameter and what of it is communicated: itself, its gradient, its momentum."""

    name: str
    parameter: nn.Parameter
    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


class Bucket:
    def __init__(self, entries: Sequence[Entry], *, flatten: bool, alignment: int = 1) -> None:
        self.entries = list(entries)
        self.operations: list[Callable[[torch.Tensor], None]] = []
        self.ready: set[str] = set()
        self.async_op: Any = None
        self.decentralized_op: Any = None
        tensors = [entry.get() for entry in self.entries]
        size = sum(tensor.numel() for tensor in tensors)
        self.flat = torch.zeros(size + -size % alignment, dtype=tensors[0].dtype)
        self._read()
        if flatten:
            for entry, part in zip(self.entries, self._parts(), strict=True):
                entry.set(part)

    def _parts(self) -> list[torch.Tensor]:
        parts, offset = [], 0
        for entry in self.entries:
            tensor = entry.get()
            parts.append(self.flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
        return parts

    def _read(self) -> None:
        for entry, part in zip(self.entries, self._parts(), strict=True):
            if entry.get().data_ptr() != part.data_ptr():
                part.copy_(entry.get().detach())

    @torch.no_grad()
    def run(self, operation: Callable[[torch.Tensor], None]) -> None:
        """``operation`` on the bucket as one flat tensor, wherever its tensors lie."""
        self._read()
        operation(self.flat)
        for entry, part in zip(self.entries, self._parts(), strict=True):
            if entry.get().data_ptr() != part.data_ptr():
                entry.get().detach().copy_(part)

    def communicate(self) -> None:
        for operation in self.operations:
            self.run(operation)


class Backend:
    """Buckets are communicated in their order, each when all its tensors are ready; one that isn't holds up others."""

    def __init__(self) -> None:
        self.order: deque[Bucket] = deque()
        self.home: dict[str, Bucket] = {}

    def register(self, buckets: Sequence[Bucket]) -> None:
        self.order = deque(buckets)
        self.home = {entry.name: bucket for bucket in buckets for entry in bucket.entries}

    def mark_ready(self, name: str) -> None:
        self.home[name].ready.add(name)
        while len(self.order[0].ready) == len(self.order[0].entries):
            bucket = self.order.popleft()
            bucket.ready.clear()
            self.order.append(bucket)
            bucket.communicate()


def split(entries: Sequence[Entry], size: int) -> list[list[Entry]]:
    """Return lists of entries of about ``size`` bytes, in their order."""
    lists: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        lists[-1].append(entry)
        filled += entry.parameter.nbytes
        if filled >= size:
            lists.append([])
            filled = 0
    return [each for each in lists if each]


def gradient(name: str, parameter: nn.Parameter) -> Entry:
    """Return a parameter's gradient, zero where there is none yet."""
    if parameter.grad is None:
        parameter.grad = parameter.detach().new_zeros(parameter.shape)

    def read() -> Any:
        return parameter.grad

    def write(tensor: Any) -> None:
        parameter.grad = tensor

    return Entry(name, parameter, read, write)


def weight(name: str, parameter: nn.Parameter) -> Entry:
    """Return a parameter itself."""

    def write(tensor: Any) -> None:
        parameter.data = tensor

    return Entry(name, parameter, lambda: parameter, write)
