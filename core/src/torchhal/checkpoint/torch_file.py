"""Checkpoints as torch.save writes them: one file, made atomic and sealed with a checksum."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from typing import IO, Any, ClassVar, cast

import torch

# What torch.save and torch.load are. Vendors' libraries replace these two with functions that copy each tensor
# separately, so that tied ones are untied, or that read with other defaults.
from torch import serialization

from torchhal.checkpoint import _save_time as save_time
from torchhal.checkpoint._checksum import (
    HEAD,
    TAIL,
    ChecksumWriter,
    read_ending,
    verify,
    verify_description,
)
from torchhal.checkpoint._local_file import LocalPlace
from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._map_location import check_map_location
from torchhal.checkpoint._storage_compaction import pickle_module
from torchhal.checkpoint._validation import inspect_contents
from torchhal.checkpoint.base import CheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError

_NAME_WITHIN = 1024
"""Bytes at the start of a file in which the name of a zip's first record is looked for."""

_FIRST_RECORD = re.compile(rb"[^/]+/(?:data\.pkl|\.format_version|byteorder|version)")
"""Names that torch.save gives to the first record: the archive's, which is the file's or "archive", and its own."""


class TorchCheckpointIO(CheckpointIO):
    """One zip file per checkpoint, which plain ``torch.load(path, weights_only=True)`` reads too.

    A save writes a temporary file in the target's folder, brings it to the disk, and renames it: the path holds
    the old checkpoint or the new one in any case. A checksum over the whole file is verified before anything
    in it is used. Files that plain torch.save wrote load as well, by the zip's own checksums.

    Args:
        storage_options: given to fsspec with every URL (``"s3://..."``); local paths need none.
    """

    features: ClassVar[frozenset[str]] = frozenset({"atomic", "checksum", "fsspec", "streaming"})

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(f"'storage_options' must be a mapping or None (got {storage_options!r})")
        self.storage_options = dict(storage_options or {})

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``checkpoint`` to ``path``; see :meth:`CheckpointIO.save_checkpoint`.

        A value that a ``weights_only`` load would refuse is an error here, with its key. A tensor that shows a
        small part of its memory is saved as that part. ``storage_options`` go to fsspec; they have no meaning for
        a local path.
        """
        if not isinstance(checkpoint, dict):
            raise TypeError(f"'checkpoint' must be a dict (got {type(checkpoint).__name__})")
        place = location_of(path, self.storage_options, storage_options)
        replaced = inspect_contents(checkpoint)
        pickler = pickle_module(replaced) if replaced else pickle
        try:
            with place.replacing() as file:
                sealing = ChecksumWriter(file)
                try:
                    # Not a name: torch refuses some that start with a dot. It needs no other methods of a file.
                    serialization.save(checkpoint, cast(IO[bytes], sealing), pickle_module=pickler)
                except BaseException:
                    if sealing.error is None:
                        raise
                if sealing.error is not None:  # the cause, not torch's error for it
                    raise sealing.error
                sealing.seal(save_time.next_ns())
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{place.shown!r} could not be saved ({type(error).__name__}: {error})") from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``; see :meth:`CheckpointIO.load_checkpoint`.

        ``weights_only=False`` lets the file run any code, so use it only for files that you trust.
        """
        if not isinstance(weights_only, bool):
            raise TypeError(f"'weights_only' must be a bool (got {weights_only!r})")
        check_map_location(map_location)
        place = location_of(path, self.storage_options)
        with place.reading() as file:
            try:
                save_time.seen(verify(file, place.shown).saved_ns)
                loaded = serialization.load(file, map_location=map_location, weights_only=weights_only)
            except CheckpointError:
                raise
            except Exception as error:
                raise _load_error(place.shown, file, error) from error
        return _as_checkpoint(loaded, place.shown)

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the checkpoint with tensors whose memory is the file: read where used, and not verified before.

        Other values are verified. A file behind a URL is loaded.
        """
        place = location_of(path, self.storage_options)
        if not isinstance(place, LocalPlace):
            return self.load_checkpoint(path)
        with place.reading() as file:
            try:
                save_time.seen(verify_description(file, place.shown).saved_ns)
                loaded = serialization.load(place.path, mmap=True, map_location="cpu", weights_only=True)
            except CheckpointError:
                raise
            except Exception as error:
                raise _load_error(place.shown, file, error) from error
        return _as_checkpoint(loaded, place.shown)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a completed checkpoint is at ``path``: a file with the start and the end of one.

        Its checksum is verified only by a load. False for a dangling link.

        Checks: CIO-16.
        """
        place = location_of(path, self.storage_options)
        return read_ending(*place.ends(len(HEAD), TAIL)) is not None

    def recognizes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file is at ``path`` that begins as those of torch.save.

        The seal at its end doesn't count: another format may hold such a file.

        Checks: CIO-30.
        """
        head, _ = location_of(path, self.storage_options).ends(_NAME_WITHIN, 0)
        return _FIRST_RECORD.fullmatch(_first_record(head)) is not None

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        """Return the completed checkpoints in ``folder``, ordered by when they were saved, then by name.

        The time is recorded in the file, so that a copied folder keeps its order, and is later than those of what the
        run had loaded and saved before, regardless of the clock; for one that plain torch.save wrote it is the file's
        modification time.

        Checks: CIO-16.
        """
        found = []
        for place in location_of(folder, self.storage_options, folder=True).children():
            saved_ns = saved_at(place)
            if saved_ns is not None:
                found.append((saved_ns, place.shown))
        return [shown for _, shown in sorted(found)]

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        return saved_at(location_of(path, self.storage_options)) or 0


def _first_record(head: bytes) -> bytes:
    """Return the name of a zip's first record from the file's first bytes; empty for another file."""
    if head[:4] != HEAD or len(head) < 30:
        return b""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")]


def saved_at(place: CheckpointLocation) -> int | None:
    """Return when the checkpoint file here was saved, in ns since the epoch; None if it is none."""
    ending = read_ending(*place.ends(len(HEAD), TAIL))
    if ending is None:
        return None
    return ending.saved_ns if ending.sealed else place.modified_ns()


def _as_checkpoint(loaded: Any, shown: str) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{shown!r} must hold a dict to be a checkpoint (got {type(loaded).__name__})")
    return loaded


def _load_error(shown: str, file: Any, error: Exception) -> CheckpointError:
    """Return the error for a file whose checksums hold and that didn't load."""
    if isinstance(error, pickle.UnpicklingError):
        try:
            file.seek(0)
            names = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
        except Exception:
            names = ""
        if names:
            return CheckpointError(
                f"{shown!r} was not loaded: it wants to call {names}, which weights_only=True refuses, as a pickle "
                f"can run any code. If these are harmless classes of yours, allow them with "
                f"torch.serialization.add_safe_globals([...]). Use weights_only=False only for a file whose "
                f"origin you trust"
            )
        return CheckpointCorruptError(
            f"{shown!r} is no checkpoint that weights_only=True can load ({_first_line(error)})"
        )
    return CheckpointError(f"{shown!r} could not be loaded ({type(error).__name__}: {_first_line(error)})")


def _first_line(error: Exception) -> str:
    return (str(error).split("WeightsUnpickler error:")[-1].strip().splitlines() or [""])[0]
