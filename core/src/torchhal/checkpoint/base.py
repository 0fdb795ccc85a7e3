"""The checkpoint contract: how a dictionary of state becomes durable and comes back."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torchhal.checkpoint._locate import location_of


class CheckpointIO(ABC):
    """Writes and reads checkpoints. :meth:`save_checkpoint` and :meth:`load_checkpoint` are all a subclass must give.

    Callers rely on this:

    * A checkpoint is there completely or not at all. A save that fails, or is killed, leaves the previous
      checkpoint of that name as it was and nothing beside it that :meth:`exists` or :meth:`list_checkpoints`
      would show (CIO-06, CIO-07, CIO-16).
    * Unless ``"sharded"`` is in :attr:`features`, the strategy calls :meth:`save_checkpoint` and
      :meth:`remove_checkpoint` on global rank 0 only, :meth:`load_checkpoint` on every rank, and puts a barrier
      after a save (CIO-23). With it, every rank calls every method, with the same path (CIO-21).
    * An instance holds no open file, thread or connection before its first use, and pickles (CIO-28).
    """

    features: ClassVar[frozenset[str]] = frozenset()
    """What it can do beyond the core level; the conformance kit tests what is declared.

    ``"atomic"``: survives SIGKILL, readers never see a gap (CIO-08, CIO-09). ``"fsspec"``: URLs work (CIO-24).
    ``"checksum"``: one flipped bit is refused (CIO-29). ``"streaming"``: no second copy in memory (CIO-27).
    ``"async"``: a save returns before it is durable (CIO-17 to CIO-19). ``"sharded"``, ``"reshard"``: every rank
    writes its part (CIO-21); another number of ranks may read it (CIO-22). ``"links"``, of a sharded one:
    :meth:`link_checkpoint` works.
    """

    group: Any = None
    """For a ``"sharded"`` one: the process group of a save's own messages; None for all ranks. A save in a thread is
    given one of its own."""

    storage_options: Mapping[str, Any] = {}
    """Given to fsspec with every URL: credentials, endpoints. Local paths need none."""

    @abstractmethod
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Make ``checkpoint`` durable at ``path``, replacing all of what stood there (CIO-05, CIO-20).

        ``checkpoint`` holds tensors and plain data and is not changed (CIO-04); tensors that share memory still
        do after a load (CIO-01, CIO-02). Missing folders of ``path`` are made (CIO-11). An ``"async"`` one may
        return earlier: it has then taken a copy of every value (CIO-17).

        Raises:
            TypeError: ``storage_options`` holds a name that means nothing here; the message names it (CIO-15).
            CheckpointError: it could not be written; the cause is chained (CIO-06, CIO-07).
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        """What :meth:`save_checkpoint` was given.

        ``map_location`` is torch's: a device or its name, a callable, or a dict of device names (CIO-03). With
        ``weights_only`` nothing in the file is ever executed (CIO-14).

        Raises:
            FileNotFoundError: nothing is there; the message holds the path (CIO-12).
            CheckpointCorruptError: it is damaged: never other values than were saved (CIO-12, CIO-29).
            CheckpointError: it can't be loaded for another reason, e.g. a refused class.
        """

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The checkpoint, to look at or to take little of: its tensors need not be read yet.

        In place of a tensor may stand an object with its ``shape`` and ``dtype``, and with ``read()``, which returns
        it on the CPU. By default everything is loaded. Raises as :meth:`load_checkpoint` does, but damage to a
        tensor may be noticed only when it is read.
        """
        return self.load_checkpoint(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete exactly what a save wrote at ``path``; nothing if there is nothing (CIO-13).

        A link is removed itself, never what it points to. By default one file; a folder is refused, so an IO that
        writes folders overrides this.

        Raises:
            CheckpointError: ``path`` is a folder, or the file can't be removed.
        """
        location_of(path, self.storage_options).remove()

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a completed checkpoint is at ``path`` (CIO-16). By default: whether a file is."""
        return location_of(path, self.storage_options).is_checkpoint_file()

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        """The completed checkpoints directly in ``folder``, last saved last; ``[]`` without the folder (CIO-16).

        Each is a path that :meth:`load_checkpoint` takes. By default the order is that of :meth:`saved_ns`, then of
        names.
        """
        found = [child.shown for child in location_of(folder, self.storage_options, folder=True).children()]
        return sorted(filter(self.exists, found), key=lambda path: (self.saved_ns(path), path))

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        """When the checkpoint at ``path`` was saved, in ns since the epoch. By default when its file was last changed.

        A clock may be set back. An IO that writes ``next_ns()`` of ``torchhal.checkpoint`` into its files,
        and calls ``seen()`` of that module with what it loads, keeps a run's checkpoints in the order in which the run
        made them.
        """
        return location_of(path, self.storage_options).modified_ns()

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        """Make ``target``, replacing what is there in one step, a second name of the completed checkpoint ``source``.

        Either may be removed and the other stays. Where the file system has no such links it is a copy. Called on
        global rank 0 only, after :meth:`wait`. By default for a local file.

        Returns:
            False, with nothing changed, where only a second save can do it.

        Raises:
            CheckpointError: it failed; ``target`` is what it was.
        """
        from torchhal.checkpoint._local_file import LocalPlace, link_file

        places = [location_of(path, self.storage_options) for path in (source, target)]
        return all(isinstance(place, LocalPlace) for place in places) and link_file(*(place.shown for place in places))

    def wait(self) -> None:
        """Return when every save is durable; raise what one of them met (CIO-18). Nothing to do unless ``"async"``.

        Called on the ranks that save, before a checkpoint is reported, linked or counted.
        """

    def teardown(self) -> None:
        """Flush and release everything; the instance works again afterwards (CIO-18, CIO-28). Idempotent."""
        self.wait()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
