"""Which device, which module of the machine."""

from __future__ import annotations

import os
from typing import Any

import torch
from habana_frameworks_stub.device import DEVICE

HABANA_VISIBLE_MODULES_VAR = "HABANA_VISIBLE_MODULES"
HLS_MODULE_ID_VAR = "HLS_MODULE_ID"


def _get_device_index(device: Any, optional: bool = False) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "hpu":
            raise ValueError(f"Expected a hpu device, but got: {device}")
        if device.index is not None:
            return int(device.index)
    if not optional:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    return int(DEVICE.current_device())


def _device_0(device: Any, what: str) -> None:
    if _get_device_index(device, optional=True) != 0:
        raise RuntimeError(f"hpu {what} supports only device 0")


def _module_id() -> int:
    return int(os.environ.get(HLS_MODULE_ID_VAR) or -1)


def _visible_modules() -> list[int]:
    text = os.environ.get(HABANA_VISIBLE_MODULES_VAR) or "0,1,2,3,4,5,6,7"
    return [int(module) for module in text.split(",")]
