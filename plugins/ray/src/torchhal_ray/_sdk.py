"""Importing ray, and connecting to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from torchhal.errors import LaunchError

DEDUP = "RAY_DEDUP_LOGS"


def import_ray() -> Any:
    """The module. If this is its first import, lines that several ranks print alike are shown for each of them.

    Ray reads RAY_DEDUP_LOGS when it is imported; the user's own value is left alone.

    Raises:
        LaunchError: it isn't installed.
    """
    mine = "ray" not in sys.modules and DEDUP not in os.environ
    if mine:
        os.environ[DEDUP] = "0"
    try:
        import ray
    except ImportError as error:
        raise LaunchError(
            f"RayEnvironment needs Ray, which is not here ({error}): pip install 'torchhal-ray[vendor]'"
        ) from error
    finally:
        if mine:
            del os.environ[DEDUP]
    return ray


def connect(options: Mapping[str, Any]) -> Any:
    """The module, connected: to what the program is connected to already, else by ``ray.init(**options)``."""
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
