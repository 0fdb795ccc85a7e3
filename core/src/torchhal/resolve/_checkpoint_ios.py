"""Find the checkpoint IOs that may read what is on the disk."""

from __future__ import annotations

from collections.abc import Iterator

from torchhal import registry
from torchhal.checkpoint.base import CheckpointIO
from torchhal.registry._entry import RegistryEntry


def usable_ios() -> Iterator[tuple[RegistryEntry, CheckpointIO]]:
    """Yield the checkpoint IOs that can be used here; not those that only write differently than another."""
    for entry in registry.entries("checkpoint_io"):
        if entry.availability():
            try:
                io = entry.create()
            except Exception:  # needs arguments, or is broken: this one was not requested
                continue
            if "async" not in io.features:
                yield entry, io
