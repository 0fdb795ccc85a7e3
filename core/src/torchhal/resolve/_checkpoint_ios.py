"""Find the checkpoint IOs that may read what is on the disk."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator

from torchhal import registry
from torchhal.checkpoint._location import is_url
from torchhal.checkpoint.base import DEFAULT_EXTENSION, CheckpointIO, overrides_recognizes
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.registry._entry import RegistryEntry
from torchhal.registry._hints import CHECKPOINT_FILES


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


def find_io(path: str) -> tuple[str, CheckpointIO]:
    """Return alias and instance of the component, built in or of a plugin, that recognises what is at ``path``.

    Raises:
        CheckpointError: nothing is there, or no installed part recognises it; the message gives a remedy.
    """
    ios = list(usable_ios())
    for entry, io in ios:
        if io.recognizes(path):
            return entry.component.alias, io
    for entry, io in ios:  # those that recognise nothing, as before 0.2: theirs is what they can read
        if not overrides_recognizes(io) and io.exists(path):
            with contextlib.suppress(Exception):
                io.open_checkpoint(path)
                return entry.component.alias, io
    shown = repr(path)
    if is_url(path):
        raise CheckpointError(f"no checkpoint is at {shown}, or its storage can't be reached")
    if not os.path.exists(path):
        raise CheckpointError(f"nothing is at {shown}")
    if not os.path.isdir(path):
        named = [io for _, io in ios if io.extension not in ("", DEFAULT_EXTENSION) and path.endswith(io.extension)]
        (named or [ios[0][1]])[0].open_checkpoint(path)  # raises a file's specific error
        raise CheckpointError(f"{shown} is no checkpoint")
    names = os.listdir(path)
    for pattern, distribution in CHECKPOINT_FILES.items():
        if fnmatch.filter(names, pattern):
            readers = [io for entry, io in ios if entry.distribution == distribution]
            if not readers:
                raise CheckpointError(f"{shown} looks like a checkpoint of {distribution}: pip install {distribution}")
            for io in readers:
                if "sharded" in io.features:
                    with contextlib.suppress(OSError):
                        io.open_checkpoint(path)  # raises for what is missing or damaged
            raise CheckpointCorruptError(
                f"{shown} looks like a checkpoint of {distribution}, which does not recognise it: it is incomplete, "
                "or another program has written it"
            )
    inside = list(dict.fromkeys(child for _, io in ios for child in io.list_checkpoints(path)))
    if inside:
        raise CheckpointError(
            f"{shown} is a folder with {len(inside)} checkpoint(s) in it: name one, such as {inside[-1]!r}"
        )
    raise CheckpointError(f"{shown} is a folder without a checkpoint in it")
