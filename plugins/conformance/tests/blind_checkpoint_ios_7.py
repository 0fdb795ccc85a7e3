"""Checkpoint IOs that differ from sound ones in one mistake each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from sound_components import SameTorch, ThreadedTorch
from zoo import caught_by


def _is_local(path: str | os.PathLike[str]) -> bool:
    return "://" not in os.fspath(path)


@caught_by("CIO-60")
class LastErrorCheckpointIO(ThreadedTorch):
    """Forgets that a save has failed as soon as the next one begins."""

    # Contract, wait: "Exception: the error of a save that no earlier call has raised."
    # Of several saves between two waits only the last one's error is raised: a checkpoint that was never written is
    # reported as kept, and the run loses it when it wants to go back there.

    def _start(self, work: Callable[[], None]) -> None:
        self._errors = []
        super()._start(work)


@caught_by("CIO-14")
class TrustingInspectionCheckpointIO(SameTorch):
    """Opens a checkpoint for inspection with weights_only=False."""

    # Contract, open_checkpoint: "CheckpointError: as of `load_checkpoint`, but damage to a tensor may be detected only
    # when it is read." (there: "it can't be loaded for another reason, e.g. a refused class", and "execute nothing
    # that the file holds")
    # Whoever looks into a foreign file before trusting it runs the code in it.

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        return self.load_checkpoint(path, weights_only=False)


@caught_by("CIO-13")
class TidyFoldersCheckpointIO(SameTorch):
    """Removes the folder of a removed checkpoint too, if it is empty then."""

    # Contract, remove_checkpoint: "Delete exactly what a save wrote at `path`; do nothing if there is nothing."
    # A folder that the user has made, with its permissions, quota or project, is gone when its last checkpoint is
    # removed; what another process is about to write there fails.

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        there = _is_local(path) and os.path.lexists(path)
        super().remove_checkpoint(path)
        if there:
            with suppress(OSError):  # others are in it
                os.rmdir(os.path.dirname(os.path.abspath(path)))


@caught_by("CIO-06")
class BackupBesideCheckpointIO(SameTorch):
    """Keeps what a save replaces beside it, as name.bak, before it begins."""

    # Contract, class: "A save that fails, or is killed, leaves the previous checkpoint of that name as it was and
    # nothing beside it that `exists` or `list_checkpoints` would show."
    # A second checkpoint appears that nobody saved: lists have it, a run may continue from it, and no removal deletes
    # it, so disks fill up with twice the checkpoints.

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if _is_local(path) and self.exists(path):
            backup = f"{os.fspath(path)}.bak"
            with suppress(FileNotFoundError):
                os.unlink(backup)
            with suppress(OSError):  # no links there
                os.link(path, backup)
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


@caught_by("CIO-52")
class ChangeTimeOrderCheckpointIO(SameTorch):
    """Lists checkpoints by the change time of their files, which a second name sets to now."""

    # Contract, list_checkpoints: "Return the completed checkpoints directly in `folder`, the last saved one last."
    # An old checkpoint that gets a second name ("best.ckpt"), or other permissions, is listed last: a run that goes on
    # from the last one begins epochs earlier.

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        found = super().list_checkpoints(folder)
        return sorted(found, key=lambda path: os.stat(path).st_ctime_ns) if _is_local(folder) else found


@caught_by("CIO-26")
class CachedLoadCheckpointIO(SameTorch):
    """Returns the same dictionary again while the file is the same."""

    # Contract, load_checkpoint: "CheckpointCorruptError: it is damaged: other values than were saved are never
    # returned."
    # What the first caller has popped, renamed or trained on in place is changed for the next one: the second load of
    # a file returns weights that nobody saved.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._loaded: dict[Any, dict[str, Any]] = {}

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        if not (_is_local(path) and os.path.isfile(path) and isinstance(map_location, str | torch.device)):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        about = os.stat(path)
        key = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_ctime_ns, str(map_location), weights_only)
        if key not in self._loaded:
            self._loaded = {key: super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)}
        return self._loaded[key]

    def teardown(self) -> None:
        super().teardown()
        self._loaded = {}
