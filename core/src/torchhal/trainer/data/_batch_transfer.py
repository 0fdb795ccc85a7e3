"""Move batches to the device, through the transfer hooks of the data module or the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhal._overrides import implements, overrides
from torchhal.accelerators import Accelerator
from torchhal.strategies import Strategy


def batch_transfer(strategy: Strategy, datamodule: Any, module: Any) -> Callable[[Any, int], Any] | None:
    """Return ``transfer(batch, dataloader_idx)``, which moves a batch to the device; None where it is used as it is.

    The user's transfer hooks are part of it, those of the data module before the model's.
    """

    def hook(name: str) -> Callable[..., Any] | None:
        for owner in (datamodule, module):
            if implements(owner, name):
                function: Callable[..., Any] = getattr(owner, name)
                return function
        return None

    before, move, after = (
        hook(name) for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    identity = (
        strategy.root_device.type == "cpu"
        and not overrides(strategy, Strategy, "batch_to_device")
        and not overrides(strategy.accelerator, Accelerator, "batch_to_device")
    )
    if before is None and move is None and after is None:
        if identity:
            return None
        to_device = strategy.batch_to_device
        return lambda batch, dataloader_idx: to_device(batch)
    device = strategy.root_device

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        if move is not None:
            batch = move(batch, device, dataloader_idx)
        elif not identity:
            batch = strategy.batch_to_device(batch)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer
