"""Define the checkpoint contract: how a dictionary of state becomes durable and is restored."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torchhal.checkpoint._locate import location_of
from torchhal.composition import Composable

DEFAULT_EXTENSION: Final = ".ckpt"


class CheckpointIO(Composable, ABC):
    """A format and a place for checkpoints.

    A subclass has to define :meth:`save_checkpoint` and :meth:`load_checkpoint` alone. Callers rely on this:

    * A checkpoint exists completely or not at all. A save that fails, or is killed, leaves the previous checkpoint of
      that name as it was and nothing beside it that :meth:`exists` or :meth:`list_checkpoints` would show.
    * Unless ``"sharded"`` is in :attr:`features`, the strategy calls :meth:`save_checkpoint` and
      :meth:`remove_checkpoint` on global rank 0 only, :meth:`load_checkpoint` on every rank, and a barrier follows a
      save. With it, every rank calls every method, with the same path.
    * An instance holds no open file, thread or connection before its first use, and pickles.

    Checks: CIO-06, CIO-07, CIO-16, CIO-21, CIO-23, CIO-25, CIO-26, CIO-28, CIO-51, CIO-57.
    """

    features: ClassVar[frozenset[str]] = frozenset()
    """Capabilities beyond the core level, which ``torchhal_conformance`` then checks.

    ``"atomic"``: a save survives SIGKILL, readers never see a gap, the file is on the disk before its name is, and what
    a killed save has left the next one in that folder removes. ``"fsspec"``: URLs work. ``"checksum"``: one
    flipped bit is refused. ``"streaming"``: a save needs no second copy in memory. ``"async"``: a save returns before
    it is durable. ``"sharded"``: every rank writes its part. ``"reshard"``: another number of ranks may read it.
    ``"links"``, of a sharded one: :meth:`link_checkpoint` works.

    Checks: CIO-08, CIO-09, CIO-17 to CIO-19, CIO-21, CIO-22, CIO-24, CIO-27, CIO-29, CIO-54 to CIO-56, CIO-58,
    CIO-62.
    """

    extension: ClassVar[str] = DEFAULT_EXTENSION
    """End of the names that a Trainer gives to checkpoints of this IO, with its dot; "" for none, as for folders.

    Names that users choose may end differently, and :meth:`recognizes` decides without the name.

    Checks: CIO-31.

    .. versionadded:: 0.2
    """

    group: Any = None
    """Process group of the messages of a save, for a ``"sharded"`` one; None for all ranks.

    A save in a thread is given a group of its own.
    """

    storage_options: Mapping[str, Any] = {}
    """Options given to fsspec with every URL, such as credentials and endpoints; local paths need none.

    Checks: CIO-58.
    """

    @abstractmethod
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Make ``checkpoint`` durable at ``path``, replacing all of what was there.

        Called on global rank 0, or on every rank of a ``"sharded"`` one. An ``"async"`` one may return earlier: it has
        then copied every value. A link at ``path`` is replaced, not followed.

        Args:
            checkpoint: tensors of any dtype, shape and strides, and plain data, at any depth; not changed. Tensors that
                share memory still do after a load, and a module's state dict has its ``_metadata``.
            path: a local path or, with the feature ``"fsspec"``, a URL. Missing folders are created.
            storage_options: options for this save, over :attr:`storage_options`.

        Raises:
            TypeError: ``storage_options`` holds a name that means nothing here; the message names it.
            CheckpointError: it could not be written; the cause is chained. Or a value can't be saved, or a load with
                ``weights_only`` would refuse it; the message names its key. Or what no save wrote is at ``path``.

        Checks: CIO-01, CIO-02, CIO-04 to CIO-07, CIO-10, CIO-11, CIO-15, CIO-17, CIO-20, CIO-51, CIO-53, CIO-57,
        CIO-63 to CIO-65, CIO-67, CIO-68.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        """Return the checkpoint that :meth:`save_checkpoint` wrote at ``path``.

        Called on every rank.

        Args:
            path: a local path or, with the feature ``"fsspec"``, a URL.
            map_location: as of ``torch.load``: a device or its name, a dict of device names, or a callable, which is
                called with each storage, on the CPU, and a device's name, and returns the storage to use or None.
            weights_only: execute nothing that the file holds.

        Raises:
            FileNotFoundError: nothing is there; the message holds the path.
            CheckpointCorruptError: it is damaged: other values than were saved are never returned.
            CheckpointError: it can't be loaded for another reason, e.g. a refused class.

        Checks: CIO-01 to CIO-03, CIO-12, CIO-14, CIO-29, CIO-41, CIO-51 to CIO-53, CIO-56, CIO-61, CIO-63.
        """

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the checkpoint for inspection, or to read a small part of it: its tensors need not be read yet.

        By default everything is loaded.

        Args:
            path: as of :meth:`load_checkpoint`.

        Returns:
            The dictionary that was saved. In place of a tensor there may be an object with its ``shape`` and ``dtype``,
            and with ``read()``, which returns the tensor on the CPU.

        Raises:
            FileNotFoundError: nothing is there.
            CheckpointError: as of :meth:`load_checkpoint`, but damage to a tensor may be detected only when it is read.

        Checks: CIO-40.
        """
        return self.load_checkpoint(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete exactly what a save wrote at ``path``; do nothing if there is nothing.

        The folder that it is in stays. A link is removed itself, never its target. By default one file; a folder is
        refused, so an IO that writes folders overrides this. Called on global rank 0, or on every rank of a
        ``"sharded"`` one.

        Args:
            path: as of :meth:`save_checkpoint`.

        Raises:
            CheckpointError: ``path`` is a folder, or the file can't be removed.

        Checks: CIO-13, CIO-51, CIO-67.
        """
        location_of(path, self.storage_options).remove()

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a completed checkpoint is at ``path``.

        By default whether a file is that :meth:`recognizes` accepts; any file, where a class doesn't override that.

        Args:
            path: as of :meth:`save_checkpoint`.

        Checks: CIO-16, CIO-51, CIO-52, CIO-54.
        """
        if not location_of(path, self.storage_options).is_checkpoint_file():
            return False
        return not overrides_recognizes(self) or self.recognizes(path)

    def recognizes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the file or folder at ``path`` is in this IO's format, complete or damaged.

        A Trainer asks every installed IO whose a checkpoint is that the run's own doesn't recognise, so that its error
        names the IO to use; a damaged file is one that the run's own recognises and can't load. Decide by the first
        bytes or by the names in a folder, never by the path's ending, and read no more than that.

        By default False: an IO that doesn't say which files are its own is never named as the writer of one. Called on
        global rank 0.

        Args:
            path: as of :meth:`save_checkpoint`; anything may be there, or nothing.

        Returns:
            False for a missing, empty, unreadable or foreign file. Never raises for what is at ``path``.

        Checks: CIO-30.

        .. versionadded:: 0.2
        """
        return False

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        """Return the completed checkpoints directly in ``folder``, the last saved one last.

        By default the order is that of :meth:`saved_ns`, then of names. An IO that has an :attr:`extension` of its own
        and no :meth:`recognizes` lists the files that end in it.

        Args:
            folder: a local path or a URL.

        Returns:
            Paths that :meth:`load_checkpoint` takes; empty if there is no such folder.

        Checks: CIO-16, CIO-52, CIO-54.
        """
        found = [child.shown for child in location_of(folder, self.storage_options, folder=True).children()]
        if not overrides_recognizes(self) and self.extension not in ("", DEFAULT_EXTENSION):
            found = [path for path in found if path.endswith(self.extension)]
        return sorted(filter(self.exists, found), key=lambda path: (self.saved_ns(path), path))

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        """Return the time at which the checkpoint at ``path`` was saved; by default its file's last change.

        A clock may be set back. An IO that writes ``next_ns()`` of ``torchhal.checkpoint`` into its files, and calls
        ``seen()`` of that module with what it loads, keeps a run's checkpoints in the order in which the run saved
        them.

        Args:
            path: a completed checkpoint.

        Returns:
            Nanoseconds since the epoch, an int.

        Checks: CIO-52, CIO-58.
        """
        return location_of(path, self.storage_options).modified_ns()

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        """Make ``target`` a second name of the completed checkpoint ``source``, replacing in one step what is there.

        Either may be removed and the other stays. Where the file system has no such links it is a copy. Called on
        global rank 0 only, after :meth:`wait`. By default for a local file.

        Args:
            source: a completed checkpoint.
            target: the new name.

        Returns:
            True if it was done; False, with nothing changed, where only a second save can do it.

        Raises:
            CheckpointError: it failed; ``target`` is unchanged.

        Checks: CIO-50, CIO-66.
        """
        from torchhal.checkpoint._local_file import LocalPlace, link_file

        places = [location_of(path, self.storage_options) for path in (source, target)]
        return all(isinstance(place, LocalPlace) for place in places) and link_file(*(place.shown for place in places))

    def wait(self) -> None:
        """Return when every save is durable; does nothing unless ``"async"``.

        Called on the ranks that save, before a checkpoint is reported, linked or counted.

        Raises:
            Exception: the error of a save that no earlier call has raised.

        Checks: CIO-18, CIO-20, CIO-60, CIO-69.
        """

    def teardown(self) -> None:
        """Flush and release everything; the instance works again afterwards.

        Idempotent, and legal before any use. Called on every rank.

        Raises:
            Exception: the error of a save that no earlier call has raised.

        Checks: CIO-18, CIO-28, CIO-60.
        """
        self.wait()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def overrides_recognizes(io: CheckpointIO) -> bool:
    """Return whether the class of ``io`` says which files are its own; those of releases before 0.2 don't."""
    return type(io).recognizes is not CheckpointIO.recognizes
