"""Checkpoints that are folders: written beside the target, then moved there in one step."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from torchhal.checkpoint._local_file import LocalPlace, link_or_copy, make_folders, sync_folder
from torchhal.checkpoint._map_location import apply_map_location, check_map_location, read
from torchhal.checkpoint._temp_files import (
    ASIDE,
    NOTE,
    PREFIX,
    is_temporary_name,
    is_untouched,
    new_temporary_name,
    writer_is_dead,
)
from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.torch_file import TorchCheckpointIO, saved_at
from torchhal.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FolderCheckpointIO(CheckpointIO):
    """The base of IOs whose checkpoint is a folder that every rank writes into; all ranks must see one file system.

    A folder is a checkpoint when it holds :attr:`marker`, which is written last.
    """

    marker: ClassVar[str]
    """Name of the file that is written last."""

    described: ClassVar[str] = "checkpoint"
    """Name of a folder of this kind in messages."""

    @staticmethod
    def check_arguments(checkpoint: object, storage_options: Mapping[str, Any] | None) -> None:
        """Raise TypeError for a value that can't be saved as a folder, before anything is sent or written.

        Checks: CIO-15.
        """
        if storage_options:
            raise TypeError(
                f"'storage_options' have no meaning for a folder on a file system (got {', '.join(storage_options)})"
            )
        if not isinstance(checkpoint, dict):
            raise TypeError(f"'checkpoint' must be a dict (got {type(checkpoint).__name__})")

    @contextmanager
    def new_folder(self, target: Path) -> Iterator[Path]:
        """Yield a new folder beside ``target`` while a save is under way, the same on every rank; all must call.

        What is still in it afterwards, because of an error or as the checkpoint that was replaced, is deleted.

        Raises:
            CheckpointError: on every rank, if there is something else at ``target``, or no room beside it.
        """
        failure: str | None = None
        temporary: Path | None = None
        if self.rank == 0:
            try:
                self._check_replaceable(target)
                make_folders(str(target.parent))
                remove_stale(target.parent)
                temporary = target.parent / new_temporary_name()
                temporary.mkdir()
            except Exception as error:
                failure = self.describe_failure(error)
        temporary = Path(self.gather_results(None if temporary is None else str(temporary), failure, target)[0])
        try:
            yield temporary
        finally:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def finish_save(
        self, temporary: Path, target: Path, content: Callable[[], dict[str, Any]], *, folders: Iterable[Path] = ()
    ) -> None:
        """Write the marker into a folder that all ranks have filled, and put the folder at ``target``; all must call.

        Rank 0 does it: what it writes is durable before anything changes at ``target``. The files of all ranks must be
        durable before.

        Args:
            temporary: the folder of :meth:`new_folder`.
            target: the path of the checkpoint.
            content: returns the marker's content, on rank 0; an error in it fails the save.
            folders: folders inside ``temporary`` whose entries must be made durable, too.

        Raises:
            CheckpointError: on every rank, if rank 0 could not do it.

        .. versionadded:: 0.2
        """
        failure: str | None = None
        if self.rank == 0:
            try:
                TorchCheckpointIO().save_checkpoint(content(), temporary / self.marker)
                for folder in {temporary, *folders}:
                    sync_folder(folder)
                swap_directories(temporary, target)
                sync_folder(target.parent)
            except Exception as error:
                failure = self.describe_failure(error)
        self.gather_results(None, failure, target)

    def _check_replaceable(self, target: Path) -> None:
        if target.is_file():
            raise CheckpointError(f"{str(target)!r} is a file, so no {self.described} can be saved there")
        if target.is_dir() and any(target.iterdir()) and not (target / self.marker).is_file():
            raise CheckpointError(f"{str(target)!r} is a folder that holds something else: choose another path")

    # -- load ------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        """Return the result of :meth:`open_checkpoint`, read, on this rank; see :meth:`CheckpointIO.load_checkpoint`.

        For folders of which nothing is ever executed, so ``weights_only`` changes nothing.
        """
        if not isinstance(weights_only, bool):
            raise TypeError(f"'weights_only' must be a bool (got {weights_only!r})")
        check_map_location(map_location)
        while True:
            before = _identity(path)
            try:
                loaded: dict[str, Any] = read(self.open_checkpoint(path))
                break
            except (CheckpointError, OSError):
                if _identity(path) in (None, before):
                    raise
                # another save has put a new folder here while the old one was read
        placed: dict[str, Any] = apply_map_location(loaded, map_location)
        return placed

    # -- what is there ---------------------------------------------------------------------------------------

    def exists(self, path: str | os.PathLike[str]) -> bool:
        folder = Path(path)
        if is_temporary_name(folder.name):
            return False
        if not folder.exists():
            undo_broken_exchanges(folder.parent, folder.name)
        return (folder / self.marker).is_file()

    def recognizes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a folder with :attr:`marker` in it is at ``path``. Override it where the name is a common one.

        .. versionadded:: 0.2
        """
        return os.path.isfile(os.path.join(path, self.marker))

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        undo_broken_exchanges(Path(folder))
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        paths = [os.path.join(folder, name) for name in names]
        return sorted(filter(self.exists, paths), key=lambda path: (self.saved_ns(path), path))

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        """Return the time in the marker, where a :class:`TorchCheckpointIO` wrote it; else that of the file."""
        marker = LocalPlace(os.path.join(path, self.marker), os.fspath(path))
        return saved_at(marker) or marker.modified_ns()

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        """Create a folder of its own at ``target``, whose files are second names of the source's."""
        old, new = Path(source), Path(target)
        if not self.exists(old):
            return False
        temporary = new.parent / new_temporary_name()
        try:
            self._check_replaceable(new)
            for file in sorted(old.rglob("*")):
                if file.is_file():
                    name = temporary / file.relative_to(old)
                    name.parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(str(file), str(name))
            for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                sync_folder(folder)
            swap_directories(temporary, new)
            sync_folder(new.parent)
        except OSError as error:
            raise CheckpointError(f"{str(new)!r} could not become a second name of {str(old)!r}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the folder on rank 0; a folder that is no checkpoint of this kind is refused."""
        if self.rank != 0:
            return
        target = Path(path)
        if target.is_symlink():
            target.unlink()
            return
        if not target.exists():
            return
        if not self.exists(target):
            raise CheckpointError(f"{str(path)!r} is no {self.described}: not removed")
        try:
            hidden = target.parent / new_temporary_name()
            target.rename(hidden)  # a partly deleted folder must not look like a checkpoint
            shutil.rmtree(hidden)
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} can't be removed: {error}") from error

    # -- ranks -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return dist.get_rank() if _several() else 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order, on every rank."""
        if not _several():
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_results(self, result: Any, failure: str | None, target: Path) -> list[Any]:
        """Gather what each rank has made for a save of ``target``; return them in rank order, on every rank.

        Args:
            result: of this rank; any value where it has failed.
            failure: this rank's error, as :meth:`describe_failure` returns it, or None.
            target: the path of the checkpoint.

        Raises:
            CheckpointError: on every rank, if any has failed.

        .. versionadded:: 0.2
        """
        gathered = self.gather((failure, result))
        self.raise_failures([failed for failed, _ in gathered], target)
        return [value for _, value in gathered]

    def describe_failure(self, error: BaseException) -> str:
        """Return the description of this rank's error for the other ranks. Subclasses may add its cause.

        .. versionadded:: 0.2
        """
        return f"{type(error).__name__}: {error}"

    def raise_failures(self, failures: list[str | None], target: Path) -> None:
        """Raise CheckpointError with each rank's failure, if any; gathered before, so it is the same on every rank."""
        if failed := [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None]:
            raise CheckpointError(f"{str(target)!r} could not be saved ({'; '.join(failed)})")


EXCHANGE_S = 5.0
"""Seconds that other processes wait for another's exchange, which is three renames."""


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return which folder is at ``path`` now; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def remove_stale(folder: Path) -> None:
    """Delete what killed saves left in ``folder``."""
    undo_broken_exchanges(folder)
    with suppress(OSError):
        for path in folder.iterdir():
            if is_temporary_name(path.name) and path.is_dir() and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    return writer_is_dead(path.name) or is_untouched(max(map(_modified, (path, *path.rglob("*")))))


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def swap_directories(source: Path, target: Path) -> None:
    """Put ``source`` at ``target``. The previous folder is at ``source`` afterwards, for the caller to remove.

    In one step, where the system can (Linux); elsewhere there is a moment in which nothing is at ``target``. A process
    that is killed then leaves a note, and the next save or listing here restores the previous folder.
    """
    if not target.exists():
        source.rename(target)
        return
    if not _exchanged(source, target):
        aside, note = (source.with_name(f"{source.name}{ending}") for ending in (ASIDE, NOTE))
        note.write_text(target.name)
        try:
            target.rename(aside)
            source.rename(target)
            with suppress(FileNotFoundError):  # a process that took this one for dead has done it
                aside.rename(source)
        finally:
            _undo(note)


def undo_broken_exchanges(folder: Path, name: str | None = None) -> None:
    """Restore what an interrupted :func:`swap_directories` has moved aside in ``folder``; with ``name``, only that.

    If its process may be alive, such as on another machine, it gets :data:`EXCHANGE_S` to finish. If that process was
    only suspended, its save fails afterwards, as another folder is at its target.
    """
    with suppress(OSError):
        for note in folder.glob(f"{PREFIX}*{NOTE}"):
            if name is not None and note.read_text() != name:
                continue
            if _is_abandoned(note) or (os.access(folder, os.W_OK) and _stays(note)):
                _undo(note)


def _stays(note: Path) -> bool:
    until = time.monotonic() + EXCHANGE_S
    while note.exists():
        if time.monotonic() > until:
            return True
        time.sleep(0.05)
    return False


def _undo(note: Path) -> None:
    """Complete the noted exchange, if it was interrupted after its first or second step."""
    source = note.with_name(note.name.removesuffix(NOTE))
    aside = source.with_name(f"{source.name}{ASIDE}")
    with suppress(OSError, ValueError):  # a note with an invalid name was not written here
        target = note.with_name(Path(note.read_text()).name)
        if aside.exists():
            aside.rename(source if target.exists() else target)
        note.unlink()


def _exchanged(source: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
    return bool(rename(*arguments) == 0)
