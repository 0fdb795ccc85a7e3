"""Seed the device in ``torch.random``, which for HPU the vendor's bridge adds."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import random

if TYPE_CHECKING:
    from torchhal_simulator._device_module import DeviceModule


def seed_with_torch(module: DeviceModule) -> None:
    """Seed the device in ``torch.manual_seed`` and ``torch.seed``, and keep its state in ``fork_rng``."""
    seed_others, fork = random._seed_custom_device, random.fork_rng

    # Both functions call this one last. To replace it serves those who imported them before, too.
    def seed_devices(seed: int) -> None:
        seed_others(seed)
        if not module._is_in_bad_fork():
            module.manual_seed_all(seed)

    # The machine has several devices, of which a process has one. torch would ask for the state of each.
    @wraps(fork)
    def fork_rng(
        devices: Iterable[Any] | None = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[None]:
        kind = kwargs.get("device_type") or getattr(torch.accelerator.current_accelerator(), "type", None)
        if devices is None and kind == "hpu" and module.is_available():
            devices = [module.current_device()]
        return fork(devices, enabled, *args, **kwargs)

    random._seed_custom_device = seed_devices
    random.fork_rng = fork_rng  # type: ignore[assignment]
