"""Steps that draw their batch themselves, from an argument ``dataloader_iter``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torchhal.errors import ModelError


def draws_batches(step: Callable[..., Any]) -> bool:
    """Whether a step takes ``dataloader_iter`` in a batch's place."""
    return "dataloader_iter" in inspect.signature(step).parameters


def fed(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``step`` as one that takes (batch, batch_idx, dataloader_idx).

    Args:
        step: that takes ``dataloader_iter``.
        name: of the step, for messages.
    """

    def call(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return step(_OneBatch(batch, batch_idx, dataloader_idx, name))

    return call


class _OneBatch(Iterator[Any]):
    """What a step draws from: (batch, batch_idx, dataloader_idx), once.

    The Trainer draws the batches, as it shares them out, counts them and notes its place in them.
    """

    def __init__(self, batch: Any, batch_idx: int, dataloader_idx: int, name: str) -> None:
        self._left: list[tuple[Any, int, int]] = [(batch, batch_idx, dataloader_idx)]
        self._name = name

    def __next__(self) -> tuple[Any, int, int]:
        if not self._left:
            raise ModelError(
                f"{self._name} draws a second batch from dataloader_iter in one step, and torchhal's Trainer hands out "
                "one per step: draw one, or let the loader put several into a batch"
            )
        return self._left.pop()
