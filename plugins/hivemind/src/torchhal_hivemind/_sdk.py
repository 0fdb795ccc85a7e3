"""Which hivemind is installed, and what importing it changes in a process."""

from __future__ import annotations

import logging
import multiprocessing
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from torchhal.errors import ConfigurationError

SUPPORTED: Final = SpecifierSet(">=1.1.12,<1.2", prereleases=True)
"""The releases this package was tested with; the extra ``vendor`` in pyproject.toml says the same."""


def check_usable() -> None:
    """Raise ConfigurationError unless a hivemind of :data:`SUPPORTED` can work here. Imports nothing of it."""
    install = "pip install 'torchhal-hivemind[vendor]'"
    try:
        found = version("hivemind")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"strategy 'hivemind' needs the package hivemind, which is not installed: {install}"
        ) from None
    if Version(found) not in SUPPORTED:
        raise ConfigurationError(
            f"this torchhal-hivemind works with hivemind {SUPPORTED} (found hivemind {found}): {install}"
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("strategy 'hivemind' needs a system that can fork: hivemind's processes start so")


def load(*, verbose: bool) -> str:
    """Import hivemind; the sharing strategy of torch.multiprocessing from before, which that import replaces.

    hivemind logs each round of averaging that is looked for; unless ``verbose``, or HIVEMIND_LOGLEVEL is set, only
    its warnings are left.
    """
    before: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    try:
        import hivemind
        from hivemind.utils import mpfuture
    except Exception as error:
        raise ConfigurationError(f"hivemind can't be imported ({type(error).__name__}: {error})") from error
    assert hivemind and mpfuture
    if not os.environ.get("HIVEMIND_LOGLEVEL"):
        logging.getLogger("hivemind").setLevel(logging.INFO if verbose else logging.WARNING)
    share_by("file_system")  # as that import did the first time
    return before


def share_by(strategy: str) -> None:
    """Set how torch.multiprocessing shares the memory of tensors in this process."""
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


def free_locks(timeout: float = 2.0) -> None:
    """Replace the locks that all of hivemind's processes share, where one was killed while it held one.

    This process and those that it starts would wait for it for ever. A node that reports its error is killed for it,
    often before it has let go of the lock. Futures of hivemind's from before are broken then; who would have answered
    them is gone.
    """
    from hivemind.utils.mpfuture import MPFuture, SharedBytes

    for lock in (SharedBytes._lock, MPFuture._initialization_lock, MPFuture._update_lock):
        if not lock.acquire(timeout=timeout):  # held for microseconds, else
            MPFuture.reset_backend()
            return
        lock.release()
