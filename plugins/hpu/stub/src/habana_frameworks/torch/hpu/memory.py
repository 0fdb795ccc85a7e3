"""Statistics of the device's memory, under the vendor's keys."""

from __future__ import annotations

from typing import Any

import habana_frameworks.torch.hpu as hpu
from habana_frameworks_stub.device import DEVICE

from ._utils import _get_device_index

__all__ = [
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
]


def _index(device: Any) -> int:
    hpu.init()
    index = _get_device_index(device, optional=True)
    if not 0 <= index < hpu.device_count():
        raise AssertionError("Invalid device id")
    return index


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Return bytes and counts.

    The simulator has no pool, so what the system gave is what tensors have; the largest allocation is not known to it
    and stays 0.
    """
    current, peak, _, _, allocations, frees, _ = DEVICE._ops.memory_stats(_index(device))
    return {
        "Limit": int(DEVICE._ops.memory_limit(0)),
        "InUse": current,
        "MaxInUse": peak,
        "NumAllocs": allocations,
        "NumFrees": frees,
        "ActiveAllocs": allocations - frees,
        "MaxAllocSize": 0,
        "TotalSystemAllocs": allocations,
        "TotalSystemFrees": frees,
        "TotalActiveAllocs": allocations - frees,
    }


def memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device)["InUse"])


def max_memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device)["MaxInUse"])


def memory_reserved(device: Any = None) -> int:
    return int(memory_stats(device)["Limit"])


def max_memory_reserved(device: Any = None) -> int:
    return int(memory_stats(device)["Limit"])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def reset_peak_memory_stats(device: Any = None) -> None:
    DEVICE.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    DEVICE.reset_accumulated_memory_stats(_index(device))
