"""Which Bagua is installed, where it works, and how a process joins it."""

from __future__ import annotations

import os
import uuid
from importlib import metadata, util
from typing import Any, Final

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from torchhal.distributed import collectives
from torchhal.distributed.stores import PrefixedStore, Store, own_connection
from torchhal.errors import ConfigurationError

SUPPORTED: Final = SpecifierSet("==0.9.2", prereleases=True)
"""The release whose sources this package was written to; later ones initialise in another way."""

_NAMES: Final = (
    "bagua", "bagua-cuda102", "bagua-cuda111", "bagua-cuda113", "bagua-cuda115", "bagua-cuda116", "bagua-cuda117",
)  # fmt: skip
_STUB: Final = "bagua-stub"
_INSTALL: Final = "build it for your CUDA and torch, as the README of torchhal-bagua says"

_me = uuid.uuid4().hex  # this process, as it is known to those that it has joined
_joined: list[str] | None = None


def accelerators() -> frozenset[str]:
    """Names of the accelerators that the installed Bagua works on. Imports nothing of it."""
    if util.find_spec("bagua_stub") is not None:
        import bagua_stub

        if bagua_stub.wanted():
            return bagua_stub.ACCELERATORS
    return frozenset({"gpu"})


def check_usable() -> None:
    """Raise ConfigurationError unless a Bagua of :data:`SUPPORTED` is installed. Imports nothing of it."""
    found = _installed()
    if found is None:
        raise ConfigurationError(f"strategy 'bagua' needs the package bagua, which is not installed: {_INSTALL}")
    name, version = found
    if Version(version) not in SUPPORTED:
        raise ConfigurationError(
            f"this torchhal-bagua works with bagua {SUPPORTED} (found {name} {version}): {_INSTALL}"
        )
    if name == _STUB:
        import bagua_stub

        try:
            bagua_stub.check()
        except ImportError as error:
            raise ConfigurationError(f"strategy 'bagua' needs Bagua itself: {error}") from error


def _installed() -> tuple[str, str] | None:
    for name in (*_NAMES, _STUB):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


class Environment:
    """The environment variables that Bagua reads, whenever it needs them: there between :meth:`take` and :meth:`leave`.

    What runs later in this process must not take the ranks' for a launcher's.
    """

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def take(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def leave(self) -> None:
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def join(store: Store, device: torch.device) -> None:
    """Initialise Bagua among the ranks of torch's process group, or find that it is among them already.

    Bagua can't leave its process group: what it has set up serves later runs of the same processes too.

    Raises:
        ConfigurationError: it can't be imported, this device isn't NVIDIA's, or other processes have set it up.
    """
    global _joined
    if device.type == "cuda" and torch.version.hip is not None:
        raise ConfigurationError("Bagua works on NVIDIA's GPUs only, and this torch is built for AMD's")
    communication = _communication()
    everybody = collectives.all_gather_object(_me, name="set-up of Bagua")
    if not communication.is_initialized():
        communication.init_process_group(PrefixedStore("bagua", own_connection(store)))
    elif _joined is not None and _joined != everybody:
        raise ConfigurationError(
            f"Bagua can be initialised once in a process, and this one did so among {len(_joined)} process(es), which "
            f"are not the {len(everybody)} of this run: train with strategy 'bagua' on other devices in a new process"
        )
    _joined = everybody


def _communication() -> Any:
    try:
        from bagua.torch_api import communication
    except Exception as error:
        raise ConfigurationError(
            f"bagua can't be imported with torch {torch.__version__} ({type(error).__name__}: {error}): {_INSTALL}"
        ) from error
    return communication
