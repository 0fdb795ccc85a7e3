"""The kit's limits of time, which are longer on a machine that is slow or busy."""

from __future__ import annotations

import os
from typing import Final

SLOWNESS: Final = "TORCHHAL_CONFORMANCE_SLOWNESS"
"""Variable with the factor by which every limit is longer."""


def scaled(seconds: float) -> float:
    """Return the limit of ``seconds`` on this machine.

    Raises:
        ValueError: the variable holds no number of at least 1.
    """
    given = os.environ.get(SLOWNESS, "1")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise ValueError(f"{SLOWNESS} must be a number of at least 1, a factor for limits of time (got {given!r})")
    return seconds * factor
