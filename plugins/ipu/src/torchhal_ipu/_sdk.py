"""poptorch: imported once, or exactly why it can't be."""

from __future__ import annotations

import threading
from importlib import metadata
from typing import Final

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED: Final = SpecifierSet(">=3.3", prereleases=True)
"""The releases whose API this package is written to."""

DISTRIBUTIONS: Final = ("poptorch", "poptorch-stub")

_lock = threading.RLock()
_problem = ""


def load() -> None:
    """Import poptorch. Idempotent, also in failing.

    Raises:
        ImportError: it is not installed, too old, made for another torch, or the Poplar SDK is not enabled.
    """
    global _problem
    with _lock:
        if _problem:  # a library that was half imported would say something else the second time
            raise ImportError(_problem)
        try:
            _check_version()
            _import()
        except ImportError as error:
            _problem = str(error)
            raise


def _check_version() -> None:
    for name in DISTRIBUTIONS:
        try:
            found = Version(metadata.version(name))
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
        if found not in SUPPORTED:
            raise ImportError(
                f"torchhal-ipu needs poptorch {SUPPORTED} (found {name} {found}): install the one of a newer Poplar SDK"
            )
        return


def _import() -> None:
    try:
        import poptorch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "poptorch":
            raise
        raise ImportError(
            "poptorch is not installed: it comes with Graphcore's Poplar SDK, as the README of torchhal-ipu says"
        ) from error
    except AssertionError as error:  # its own check of the torch it finds
        raise ImportError(
            f"poptorch refuses torch {torch.__version__}: {error}. Build it for this torch, as the README of "
            "torchhal-ipu says"
        ) from error
