"""Check and import Bagua, and let a process join its process group."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from importlib import util
from typing import Final

from torchhal.distributed import collectives
from torchhal.distributed.stores import PrefixedStore, Store, own_connection
from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage, restored_environ

_STUB: Final = "bagua-stub"

BAGUA: Final = VendorPackage(
    "bagua",
    versions="==0.9.2",  # whose sources this package was written to; later ones initialise in another way
    distributions=(
        "bagua", "bagua-cuda102", "bagua-cuda111", "bagua-cuda113", "bagua-cuda115", "bagua-cuda116", "bagua-cuda117",
        _STUB,
    ),
    submodules=("torch_api.communication",),
    plugin="torchhal-bagua",
    install="build it for your CUDA and torch, as the README of torchhal-bagua says",
    needed_by="strategy 'bagua'",
)  # fmt: skip

_me = uuid.uuid4().hex  # this process, as it is known to those that it has joined
_joined: list[str] | None = None


def accelerators() -> frozenset[str]:
    """Return the names of the accelerators that the installed Bagua works on; nothing of it is imported."""
    if util.find_spec("bagua_stub") is not None:
        import bagua_stub

        if bagua_stub.wanted():
            return bagua_stub.ACCELERATORS
    return frozenset({"gpu"})


def check_usable() -> None:
    """Raise ConfigurationError unless a Bagua that fits is installed; nothing of it is imported."""
    BAGUA.check()
    found = BAGUA.installed()
    if found is not None and found[0] == _STUB:
        import bagua_stub

        try:
            bagua_stub.check()
        except ImportError as error:
            raise ConfigurationError(f"strategy 'bagua' needs Bagua itself: {error}") from error


class Environment:
    """The environment variables that Bagua reads at any time: set between :meth:`take` and :meth:`leave`.

    What runs later in this process must not take the ranks' for a launcher's.
    """

    def __init__(self) -> None:
        self._restore = ExitStack()

    def take(self, variables: dict[str, str]) -> None:
        """Set these variables, until :meth:`leave`."""
        self._restore.enter_context(restored_environ(*variables))
        os.environ.update(variables)

    def leave(self) -> None:
        """Set all variables back to what they were."""
        self._restore.close()


def join(store: Store) -> None:
    """Initialise Bagua among the ranks of torch's process group, or find that it is among them already.

    Bagua can't leave its process group: what it has set up serves later runs of the same processes too.

    Raises:
        ConfigurationError: it can't be imported, or other processes have set it up.
    """
    global _joined
    BAGUA.load()
    from bagua.torch_api import communication

    everybody = collectives.all_gather_object(_me, name="set-up of Bagua")
    if not communication.is_initialized():
        communication.init_process_group(PrefixedStore("bagua", own_connection(store)))
    elif _joined is not None and _joined != everybody:
        raise ConfigurationError(
            f"Bagua can be initialised once in a process, and this one did so among {len(_joined)} process(es), which "
            f"are not the {len(everybody)} of this run: train with strategy 'bagua' on other devices in a new process"
        )
    _joined = everybody
