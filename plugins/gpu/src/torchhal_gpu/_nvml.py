"""Query NVIDIA's management library, where the package ``nvidia-ml-py`` is installed.

It asks the driver and needs no context on the device, so it also tells why there is none to be had, and what other
processes hold. Source: NVML API reference, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return the library, initialised; an ImportError or its own NVMLError if that fails."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def problem() -> str:
    """Return why the driver can't be queried; an empty string where it can, or where that is unknown."""
    try:
        _library()
    except ImportError:
        return ""
    except Exception as error:  # NVMLError, whose class comes with the package
        return f"NVML says {str(error)!r}"
    return ""


def memory(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes in use by all processes, and in all, on a ``cuda`` device; None where NVML doesn't know it."""
    try:
        pynvml = _library()
        # by its UUID: NVML counts all devices, whatever CUDA_VISIBLE_DEVICES leaves visible
        uuid = torch.cuda.get_device_properties(device).uuid
        info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except Exception:  # no package, no driver, a part of a device (MIG), or ROCm
        return None
    return int(info.used), int(info.total)
