"""One seed for every generator a training run draws from."""

from __future__ import annotations

import os
import random
import sys

import torch

SEED_VARIABLE = "TORCHHAL_SEED"
_MAX_SEED = 2**32 - 1  # NumPy takes no more


def seed_everything(seed: int | None = None, *, workers: bool = False) -> int:
    """Seed Python's, NumPy's and torch's generators, on every device torch knows of.

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
