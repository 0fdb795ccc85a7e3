"""Describe the hardware of a run of checks in one line of text."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from torchhal.accelerators import Accelerator


def describe_hardware(accelerator: Accelerator) -> str:
    """Return the name of the accelerator's devices and how many there are, such as ``"NVIDIA H100 80GB HBM3 x 8"``.

    The count of the CPU is that of its logical processors. The name is that of the first device, as the module of its
    device type gives it, or the accelerator's own where that module has no ``get_device_name``.
    """
    if accelerator.device_type == "cpu":
        return f"{_cpu_name()} x {os.cpu_count() or 1}"
    return f"{_device_name(accelerator)} x {accelerator.device_count()}"


def _device_name(accelerator: Accelerator) -> str:
    module: Any = getattr(torch, accelerator.device_type, None)
    try:
        name = module.get_device_name(0)
    except Exception:  # a vendor's module may lack it or need a device that is busy: the report is made anyway
        return accelerator.name
    return " ".join(str(name).split()) or accelerator.name


def _cpu_name() -> str:
    """Return the model of the CPU, or its architecture where the system doesn't tell the model."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
