"""The simulated HPU with what Gaudi lacks; importing this loads it."""

from __future__ import annotations

import os
from typing import Any

import torch

import torchhal_simulator
from habana_frameworks_stub import autocast
from torchhal_simulator._build import TORCH_MINORS


def flag(name: str) -> bool:
    """Return a switch of the bridge: on for 1, true, yes and the like."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y")


def _load() -> Any:
    device = torchhal_simulator.load("hpu")
    autocast.apply()
    torchhal_simulator.restrict("hpu", float64=False, int64=flag("PT_ENABLE_INT64_SUPPORT"), averages=False)
    return device


assert ".".join(torch.__version__.split(".")[:2]) in TORCH_MINORS, (
    f"Error: Compile-time major/minor PyTorch version {TORCH_MINORS[-1]} differs from run-time {torch.__version__}."
)
DEVICE = _load()
"""The simulator's device module; the vendor's functions go through it."""
