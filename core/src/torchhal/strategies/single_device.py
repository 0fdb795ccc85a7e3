"""One process, one device: every collective is the identity."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.accelerators.transfer import map_tensors
from torchhal.strategies.base import Strategy
from torchhal.strategies.collectives import check_op


class SingleDeviceStrategy(Strategy):
    """Training on one device, and the base class of strategies for one."""

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        check_op(op)
        return map_tensors(value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        if src != 0:
            raise ValueError(f"'src' must be a rank, 0 for a world of one process (got {src!r})")
        return value

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        tensor = tensor.to(self.root_device)
        return tensor.unsqueeze(0) if sync_grads else tensor.detach().clone().unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self, name: str = "") -> None:
        pass
