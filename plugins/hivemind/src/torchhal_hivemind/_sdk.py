"""Check and import hivemind, and undo what its import changes in a process."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Final

import torch

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage

HIVEMIND: Final = VendorPackage(
    "hivemind",
    versions=">=1.1.12,<1.2",  # those this package was tested with, as the extra ``vendor`` in pyproject.toml
    submodules=("utils.mpfuture",),
    plugin="torchhal-hivemind",
    install="pip install 'torchhal-hivemind[vendor]'",
    needed_by="strategy 'hivemind'",
)


def check_usable() -> None:
    """Raise ConfigurationError unless a hivemind that fits can work here; nothing of it is imported."""
    HIVEMIND.check()
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("strategy 'hivemind' needs a system that can fork: hivemind's processes start so")


def load(*, verbose: bool) -> str:
    """Import hivemind; return the sharing strategy of torch.multiprocessing from before, which that import replaces.

    hivemind logs each attempt at a round of averaging; unless ``verbose``, or HIVEMIND_LOGLEVEL is set, only
    its warnings are left.
    """
    before: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    HIVEMIND.load()
    if not os.environ.get("HIVEMIND_LOGLEVEL"):
        logging.getLogger("hivemind").setLevel(logging.INFO if verbose else logging.WARNING)
    share_by("file_system")  # as that import did the first time
    return before


def share_by(strategy: str) -> None:
    """Set how torch.multiprocessing shares the memory of tensors in this process."""
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


def free_locks(timeout: float = 2.0) -> None:
    """Replace the locks that all of hivemind's processes share, where one was killed while it held one.

    This process and those that it starts would block on it without a timeout. A node that reports an error is killed
    after it, often before it has released the lock. Futures of hivemind's from before never complete then, as the
    process that would have set them has ended.
    """
    from hivemind.utils.mpfuture import MPFuture, SharedBytes

    for lock in (SharedBytes._lock, MPFuture._initialization_lock, MPFuture._update_lock):
        if not lock.acquire(timeout=timeout):  # held for microseconds, else
            MPFuture.reset_backend()
            return
        lock.release()
