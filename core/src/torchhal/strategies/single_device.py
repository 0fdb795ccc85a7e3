"""Provide the strategy of one process and one device: every collective is the identity."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.distributed import collectives
from torchhal.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """Training on one device, and the base class of strategies for one."""

    def check_sync_batchnorm(self, world_size: int) -> None:
        """Accept it: one process has the whole batch. A subclass whose processes have only parts of it raises."""

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        return collectives.reduce(value, op, device=self.root_device, alone=True)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        collectives.check_src(src, 1)
        return value

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        collectives.check_gatherable(tensor)
        tensor = tensor.to(self.root_device)
        return tensor.unsqueeze(0) if sync_grads else tensor.detach().clone().unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self, name: str = "") -> None:
        pass
