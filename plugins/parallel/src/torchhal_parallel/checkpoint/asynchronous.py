"""Save without blocking a step: it is blocked by a copy to host memory only, which a thread then writes."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchhal import registry
from torchhal.checkpoint import CheckpointIO, location_of
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal_parallel.checkpoint._staging import HostMemory, snapshot


class AsyncCheckpointIO(CheckpointIO):
    """Another checkpoint IO, whose saves run in a thread.

    A save copies every tensor to host memory, starts a thread that writes the copy through ``inner``, and returns.
    One save is in flight: the next one waits until it is done. The copy's memory is kept for the next one, until
    :meth:`teardown`. An error of a save is raised, as the CheckpointError it
    is or with its cause chained, by the next :meth:`save_checkpoint`, :meth:`wait`, :meth:`load_checkpoint` or
    :meth:`teardown`, and once. The process does not end before its last save has; an error that was not raised by
    then is written to stderr.

    If ``inner`` is sharded, its ranks communicate over a gloo process group of their own, made at the first save:
    collectives of two threads on one group would block each other. Every rank must call every method then, from one
    thread.

    Args:
        inner: the IO that writes, or its alias.

    Raises:
        ConfigurationError: ``inner`` is asynchronous itself.
    """

    def __init__(self, inner: CheckpointIO | str = "torch") -> None:
        if isinstance(inner, str):
            inner = registry.find("checkpoint_io", inner).create()
        if not isinstance(inner, CheckpointIO):
            raise TypeError(f"'inner' must be a CheckpointIO or the alias of one (got {inner!r})")
        if "async" in inner.features:
            raise ConfigurationError(f"'inner' must save before it returns (got {inner!r}, which is asynchronous)")
        self.inner = inner
        self.storage_options = inner.storage_options
        self._clear()

    def _clear(self) -> None:
        self._flight: _Flight | None = None
        self._memory = HostMemory()
        self._group: Any = None
        self._world: Any = None  # the group of all ranks when _group was made: one that is gone took it along

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.features | {"async"}

    @property
    def extension(self) -> str:  # type: ignore[override]
        return self.inner.extension

    # -- save ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(checkpoint, dict):
            raise TypeError(f"'checkpoint' must be a dict (got {type(checkpoint).__name__})")
        if storage_options and "fsspec" not in self.inner.features:
            raise TypeError(f"'storage_options' have no meaning for {self.inner!r} (got {', '.join(storage_options)})")
        if storage_options:
            location_of(path, self.storage_options, storage_options)  # a TypeError for those that mean nothing there
        taken: dict[str, Any] = {}
        error = self._landed()
        if error is None:
            try:
                taken = snapshot(checkpoint, self._memory)
            except Exception as raised:
                error = CheckpointError(
                    f"{os.fspath(path)!r} could not be saved: its values can't be copied "
                    f"({type(raised).__name__}: {raised})"
                )
                error.__cause__ = raised
        self._agree(error, path)
        if self._sharded:
            self._join_group()
        self._flight = _Flight(self.inner, taken, path, storage_options)
        # An error that was not raised is written to stderr when this object, or the process, ends.
        self._teller = weakref.finalize(self, self._flight.tell)
        self._flight.start()

    def wait(self) -> None:
        error = self._landed()
        if error is not None:
            raise error

    def _landed(self) -> BaseException | None:
        """Wait for the save in flight; return what it met, once."""
        flight = self._flight
        if flight is None:
            return None
        flight.join()  # may be interrupted: then the save is still in flight
        self._flight = None
        self._teller.detach()
        return flight.take_error()

    def _agree(self, error: BaseException | None, path: str | os.PathLike[str]) -> None:
        """Raise on every rank alike: a save that one of them does not start would keep the others waiting."""
        others: list[str] = []
        if self._sharded:
            failures: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, None if error is None else f"{type(error).__name__}: {error}")
            others = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
            if others:  # a collective may have failed, and with it the group
                self._leave_group()
        if error is not None:
            raise error
        if others:
            raise CheckpointError(f"{os.fspath(path)!r} could not be saved ({'; '.join(others)})")

    # -- the rest --------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        self.wait()
        return self.inner.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        self.wait()
        return self.inner.open_checkpoint(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._join()
        self.inner.remove_checkpoint(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        self._join()
        return self.inner.exists(path)

    def recognizes(self, path: str | os.PathLike[str]) -> bool:
        return self.inner.recognizes(path)

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        self._join()
        return self.inner.list_checkpoints(folder)

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        self._join()
        return self.inner.saved_ns(path)

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        self._join()
        return self.inner.link_checkpoint(source, target)

    def _join(self) -> None:
        if self._flight is not None:
            self._flight.join()

    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            self._memory = HostMemory()
            self._leave_group()
            self.inner.teardown()

    # -- the group of a sharded inner ------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several and "sharded" in self.inner.features

    def _join_group(self) -> None:
        if self._group is None or self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self._group = dist.new_group(backend="gloo", timeout=_timeout_of(self._world))
        self.inner.group = self._group

    def _leave_group(self) -> None:
        group, world = self._group, self._world
        self._group = self._world = None
        if group is not None:
            self.inner.group = None
            if dist.is_initialized() and world is dist.group.WORLD:
                dist.destroy_process_group(group)

    # ----

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.storage_options = self.inner.storage_options
        self._clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of the group's collectives; None if its backend has no such option.

    The default of a new group is half an hour.
    """
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


class _Flight:
    """One save in a thread; not a daemon, so that the interpreter waits for it at exit."""

    def __init__(
        self,
        inner: CheckpointIO,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._inner = inner
        self._checkpoint = checkpoint
        self._path = path
        self._options = storage_options
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._forgotten = False  # no reference is left to raise it by
        self._thread = threading.Thread(target=self._run, name="torchhal-checkpoint", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._inner.save_checkpoint(self._checkpoint, self._path, storage_options=self._options)
        except BaseException as raised:
            error = raised
        self._checkpoint = {}  # the next copy overwrites it
        with self._lock:
            self._error = error
            forgotten = self._forgotten
        if forgotten:
            self.tell()

    def take_error(self) -> BaseException | None:
        """Return what the save met, as a CheckpointError; None from the second time on."""
        error, self._error = self._error, None
        if error is None or isinstance(error, CheckpointError):
            return error
        wrapped = CheckpointError(f"{os.fspath(self._path)!r} could not be saved ({type(error).__name__}: {error})")
        wrapped.__cause__ = error
        return wrapped

    def tell(self) -> None:
        """Write an error that was never raised to stderr; a save that still runs does so itself when it has ended."""
        with self._lock:
            self._forgotten = True
        error = self.take_error()
        if error is not None and sys.stderr is not None:
            print(f"torchhal: a checkpoint was lost: {error}", file=sys.stderr, flush=True)
