"""Which TorchFT is installed, and what it does to a process beyond its task."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from torchhal.errors import ConfigurationError

SUPPORTED: Final = SpecifierSet(">=0.2.0,<0.3", prereleases=True)
"""The releases this package was tested with; the extra ``vendor`` in pyproject.toml says the same."""

_LOG: Final = "RUST_LOG"
"""What the part of TorchFT that is written in Rust reads once, when it is imported."""


def check_usable() -> None:
    """Raise ConfigurationError unless a TorchFT of :data:`SUPPORTED` is installed. Imports nothing of it."""
    install = "pip install 'torchhal-torchft[vendor]'"
    try:
        found = version("torchft")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"strategy 'torchft' needs the package torchft, which is not installed: {install}"
        ) from None
    if Version(found) not in SUPPORTED:
        raise ConfigurationError(
            f"this torchhal-torchft works with torchft {SUPPORTED} (found torchft {found}): {install}"
        )


def load(*, verbose: bool) -> None:
    """Import TorchFT. It logs lines for each step, of which none is left unless ``verbose``, or RUST_LOG is set.

    What a user has to know of them, the strategy says itself.
    """
    unset = _LOG not in os.environ
    if unset:
        os.environ[_LOG] = "info" if verbose else "error"
    try:
        import torchft.manager
        import torchft.process_group
    except Exception as error:
        raise ConfigurationError(f"torchft can't be imported ({type(error).__name__}: {error})") from error
    finally:
        if unset:
            del os.environ[_LOG]
    assert torchft
    logger = logging.getLogger("torchft")
    if logger.level == logging.NOTSET:
        # A peer that dies is an error with a traceback to TorchFT, and what this strategy is for.
        logger.setLevel(logging.INFO if verbose else logging.CRITICAL)
