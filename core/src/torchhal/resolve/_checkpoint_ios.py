"""Which checkpoint IO reads what is on the disk."""

from __future__ import annotations

from collections.abc import Iterator

from torchhal import registry
from torchhal.checkpoint.base import CheckpointIO
from torchhal.registry._entry import RegistryEntry


def usable_ios() -> Iterator[tuple[RegistryEntry, CheckpointIO]]:
    """What can be used here; not what only writes differently than another."""
    for entry in registry.entries("checkpoint_io"):
        if entry.availability():
            try:
                io = entry.create()
            except Exception:  # needs arguments, or is broken, in whatever way: nobody has asked for this one
                continue
            if "async" not in io.features:
                yield entry, io
