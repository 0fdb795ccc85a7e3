"""Seed the random-number generators of a run, and read and set their states.

The generators are Python's, NumPy's where it is imported, torch's on the host and torch's on one device.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchhal.accelerators import Accelerator

__all__ = [
    "collect",
    "collect_host",
    "drawn_between",
    "restore",
    "restore_host",
    "seed_everything",
]

SEED_VARIABLE = "TORCHHAL_SEED"
_MAX_SEED = 2**32 - 1  # NumPy takes no more


def seed_everything(seed: int | None = None, *, workers: bool = False) -> int:
    """Seed Python's, NumPy's and torch's generators, on every device registered with torch.

    Args:
        seed: 0 to 4294967295. None takes the environment variable TORCHHAL_SEED, or 0.
        workers: kept for those who pass it; data workers are seeded from torch's generator in any case.

    Returns:
        The seed. Processes that torchhal starts inherit it through TORCHHAL_SEED.
    """
    if seed is None:
        text = os.environ.get(SEED_VARIABLE, "0")
        try:
            seed = int(text)
        except ValueError:
            raise ValueError(f"{SEED_VARIABLE} must be an int from 0 to {_MAX_SEED} (got {text!r})") from None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"'seed' must be an int from 0 to {_MAX_SEED} (got {seed!r})")
    os.environ[SEED_VARIABLE] = str(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    else:
        _seed_numpy_if_installed(seed)
    torch.manual_seed(seed)
    return seed


def _seed_numpy_if_installed(seed: int) -> None:
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def collect(accelerator: Accelerator, device: torch.device) -> dict[str, Any]:
    """Return Python's, NumPy's (if imported), torch's and the device's states; loadable with ``weights_only``."""
    state = collect_host()
    if device.type != "cpu":
        state["device"], state["device_type"] = accelerator.get_rng_state(device), device.type
    return state


def collect_host() -> dict[str, Any]:
    """Return the states of the generators on the host, from which samplers draw."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the generators that have drawn between two states of :func:`collect` or :func:`collect_host`.

    Of one that was imported in between it isn't known.

    .. versionadded:: 0.2
    """

    def is_same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    return [name for name, state in before.items() if not is_same(state, after[name])]


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


@contextmanager
def host_generators_restored() -> Iterator[None]:
    """Restore the generators on the host on exit, those of devices excepted; core's own, so not in ``__all__``."""
    before = collect_host()
    try:
        yield
    finally:
        restore_host(before)
