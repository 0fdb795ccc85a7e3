"""The state of every generator a training run draws from, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from torchhal.accelerators import Accelerator


def collect(accelerator: Accelerator, device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's (where imported), torch's and the device's generators; loadable with ``weights_only``."""
    state = collect_host()
    if device.type != "cpu":
        state["device"], state["device_type"] = accelerator.get_rng_state(device), device.type
    return state


def collect_host() -> dict[str, Any]:
    """The generators that live on the host, which samplers draw from."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore(state: dict[str, Any], accelerator: Accelerator, device: torch.device) -> None:
    """Put back what :func:`collect` gave; another type of device, with generators of its own, keeps its state."""
    restore_host(state)
    if "device" in state and state.get("device_type", device.type) == device.type:
        accelerator.set_rng_state(state["device"], device)


def restore_host(state: dict[str, Any]) -> None:
    """Put back what :func:`collect_host` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
