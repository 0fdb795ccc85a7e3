"""Events of the device."""

from __future__ import annotations

import torch
from habana_frameworks_stub.device import DEVICE

__all__ = ["Event"]


def Event(enable_timing: bool = False) -> torch.Event:
    """Make an event; a function here, as torch.Event can't be subclassed."""
    return DEVICE.Event(enable_timing)  # type: ignore[no-any-return]
