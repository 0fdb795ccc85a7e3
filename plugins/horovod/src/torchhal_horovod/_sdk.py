"""Check and import Horovod, and run calls of it that may block where signals still arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from torchhal.errors import ConfigurationError, DistributedError
from torchhal.vendor_package import VendorPackage

HOROVOD: Final = VendorPackage(
    "horovod",
    versions=">=0.28,<0.29",  # whose sources this package was written to, and the last that were released
    submodules=("torch",),
    plugin="torchhal-horovod",
    install="build it for this torch, with gloo, as the README of torchhal-horovod says",
    needed_by="strategy 'horovod'",
)


def load() -> ModuleType:
    """Return ``horovod.torch``.

    Raises:
        ConfigurationError: Horovod is missing, of another version, built for another torch, or without gloo.
    """
    HOROVOD.load()
    import horovod.torch

    module: ModuleType = horovod.torch
    if not module.gloo_built():
        raise ConfigurationError(
            "strategy 'horovod' needs a Horovod that was built with gloo (HOROVOD_WITH_GLOO=1): without it, "
            f"processes have to be started by mpirun: {HOROVOD.install}"
        )
    return module


def device_types(hvd: Any) -> frozenset[str]:
    """Return the types of the devices whose tensors Horovod adds up: GPUs' only where it was built with NCCL or RCCL.

    Without, gloo takes a GPU's address for one of the host, or Horovod has no function for such a tensor.
    """
    return frozenset({"cpu", "cuda"} if hvd.nccl_built() else {"cpu"})


def call(function: Callable[[], Any], what: str, timeout: float) -> None:
    """Call a function of Horovod that may block in C++, where this thread handles no signals.

    Raises:
        DistributedError: it has not returned after ``timeout`` seconds.
        Exception: what the function raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"torchhal-horovod-{what}", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)
    if raised:
        raise raised[0]
    if thread.is_alive():
        raise DistributedError(f"{what} of Horovod timed out: it has not ended after {timeout:g} s")
