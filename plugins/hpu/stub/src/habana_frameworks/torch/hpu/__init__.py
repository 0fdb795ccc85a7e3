"""``torch.hpu``. One device per process, index 0; which of the machine's it is, HLS_MODULE_ID says."""

from __future__ import annotations

import os
from typing import Any

import torch
from habana_frameworks.torch.utils.internal import is_lazy
from habana_frameworks_stub import __version__
from habana_frameworks_stub.device import DEVICE
from torch.utils.checkpoint import DefaultDeviceType

from ._utils import HABANA_VISIBLE_MODULES_VAR, HLS_MODULE_ID_VAR, _get_device_index, _module_id, _visible_modules
from .events import Event
from .memory import (
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from .random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "Event", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count", "device_of",
    "get_autocast_hpu_dtype", "get_device_capability", "get_device_name", "get_device_properties", "get_rng_state",
    "get_rng_state_all", "init", "initial_seed", "is_autocast_hpu_enabled", "is_available", "is_bf16_supported",
    "is_initialized", "is_lazy", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "reset_accumulated_memory_stats",
    "reset_peak_memory_stats", "seed", "seed_all", "set_autocast_hpu_dtype", "set_autocast_hpu_enabled", "set_device",
    "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
]  # fmt: skip

__simulator__ = True

_initialized = False
_is_in_bad_fork = DEVICE._is_in_bad_fork
_exchange_device = DEVICE._exchange_device
_maybe_exchange_device = DEVICE._maybe_exchange_device


def init() -> None:
    """From here on torch.utils.checkpoint keeps the device's random state."""
    global _initialized
    if not _initialized:
        if not is_available():
            raise RuntimeError("Device acquire failed: the simulated machine has no HPU")
        _initialized = True
        DefaultDeviceType.set_device_type("hpu")


_lazy_init = init


def is_initialized() -> bool:
    return _initialized


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return int(DEVICE.device_count())


def current_device() -> int:
    init()
    return int(DEVICE.current_device())


def synchronize() -> None:
    init()
    DEVICE.synchronize()


def set_device(device: Any) -> None:
    """Choose the module of this process, if it has none; one that it has stays, whatever is asked for."""
    index, modules, module = _get_device_index(device, optional=True), _visible_modules(), _module_id()
    if module >= 0:
        assert module in modules, f"HLS_MODULE_ID={module} is not among the visible modules {modules}"
    elif HABANA_VISIBLE_MODULES_VAR not in os.environ and device_count() < 8:
        assert index == 0, f"As {HABANA_VISIBLE_MODULES_VAR} is not provided, the only supported device idx is 0."
    else:
        assert index < len(modules), f"there is no device {index} among the visible modules {modules}"
        os.environ[HLS_MODULE_ID_VAR] = str(modules[index])


class device:
    """A context with the one device current; another than the process's own is refused."""

    def __init__(self, device: Any) -> None:
        index = _get_device_index(device, optional=True)
        if index not in (0, _module_id()):
            raise AssertionError(f"Requested device_id={index} is different from env_device_id={_module_id()}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class device_of(device):
    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(0)


def get_device_name(device: Any = None) -> str:
    """GAUDI2, or what HABANA_FRAMEWORKS_STUB_DEVICE says."""
    init()
    return os.environ.get("HABANA_FRAMEWORKS_STUB_DEVICE", "GAUDI2")


def get_device_capability(device: Any = None) -> str:
    return f"simulated by habana-frameworks-stub {__version__}"


def get_device_properties(device: Any = None) -> str:
    return f"{get_device_name(device)} {get_device_capability(device)}"


def is_bf16_supported() -> bool:
    return is_available()


def set_autocast_hpu_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("hpu", enabled)


def is_autocast_hpu_enabled() -> bool:
    return torch.is_autocast_enabled("hpu")


def set_autocast_hpu_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("hpu", dtype)


def get_autocast_hpu_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("hpu")
