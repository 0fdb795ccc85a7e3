"""The one generator of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from habana_frameworks_stub.device import DEVICE

from ._utils import _device_0

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def get_rng_state(device: Any = "hpu") -> torch.Tensor:
    _device_0(device, "get_rng_state")
    state: torch.Tensor = DEVICE.get_rng_state(0)
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = "hpu") -> None:
    _device_0(device, "set_rng_state")
    DEVICE.set_rng_state(new_state, 0)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(0)]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    if len(new_states) != 1:
        raise RuntimeError("hpu set_rng_state_all supports only states len of 1")
    set_rng_state(new_states[0], 0)


def manual_seed(seed: int) -> None:
    DEVICE.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    DEVICE.manual_seed(seed)


def seed() -> int:
    return int(DEVICE.seed())


def seed_all() -> None:
    DEVICE.seed()


def initial_seed() -> int:
    return int(DEVICE.initial_seed())
