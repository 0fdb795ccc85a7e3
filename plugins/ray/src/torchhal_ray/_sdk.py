"""Import Ray, and connect to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from torchhal.errors import LaunchError
from torchhal.vendor_package import VendorPackage, restored_environ

RAY: Final = VendorPackage(
    "ray",
    plugin="torchhal-ray",
    install="pip install 'torchhal-ray[vendor]'",
    needed_by="RayEnvironment",
    error=LaunchError,
)

_DEDUP: Final = "RAY_DEDUP_LOGS"
"""The variable that Ray reads when it is imported: whether equal lines of several ranks are printed once."""


def import_ray() -> Any:
    """Return the module ``ray``. Its first import here makes it print equal lines of several ranks for each of them.

    A value of RAY_DEDUP_LOGS that the user has set is left alone.

    Raises:
        LaunchError: it isn't installed, or can't be imported.
    """
    with restored_environ(_DEDUP):
        if "ray" not in sys.modules:
            os.environ.setdefault(_DEDUP, "0")
        return RAY.load()


def connect(options: Mapping[str, Any]) -> Any:
    """Return the module ``ray``, connected: as the program is already, else by ``ray.init(**options)``."""
    ray = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(**options)
        except Exception as error:  # no one class: ConnectionError, ValueError, RuntimeError, what a probe raises
            raise LaunchError(
                f"no Ray cluster can be used: ray.init({', '.join(f'{k}={v!r}' for k, v in options.items())}) says "
                f"{type(error).__name__}: {error}. Is 'ray start' running there, with the same versions of Ray and "
                "Python?"
            ) from error
    return ray
