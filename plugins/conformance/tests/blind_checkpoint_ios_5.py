"""Defective checkpoint IOs: each differs from core's, or from it in a thread, in one thing."""

from __future__ import annotations

import copy
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from sound_components import ThreadedTorch, has_graph
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.pytree import map_tensors


@caught_by("CIO-17")
class TensorsOnlyCopyCheckpointIO(ThreadedTorch):
    """Copies the tensors before a save returns, and shares the lists and dicts of plain data with the run."""

    # "An `"async"` one may return earlier: it has then copied every value."
    # While the thread writes, training goes on and changes what a callback or a sampler has handed out: the file holds
    # weights of one step beside counters, histories and positions of a later one, or the save fails with "dictionary
    # changed size during iteration".

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        detached = map_tensors(checkpoint, lambda leaf: leaf.detach() if has_graph(leaf) else leaf)
        memo: dict[int, Any] = {}  # one for all, so that tensors which share memory still do

        def copied(leaf: Any) -> Any:
            return copy.deepcopy(leaf, memo) if isinstance(leaf, torch.Tensor) else leaf

        return dict(map_tensors(detached, copied))


@caught_by("CIO-18")
class OneRunExecutorCheckpointIO(ThreadedTorch):
    """Shuts its executor down in `teardown`, and submits the next run's saves to the same one."""

    # "Flush and release everything; the instance works again afterwards."
    # The second fit of a Trainer, a save after the first one, or a sweep that shares one IO fails at its first
    # checkpoint: "cannot schedule new futures after shutdown". What was trained until then is lost.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def _start(self, work: Callable[[], None]) -> None:
        errors = self._errors

        def run() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint save")
        self._pending = self._executor.submit(run)

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_executor": None}


@caught_by("CIO-51")
class RecursiveRemoveCheckpointIO(TorchCheckpointIO):
    """Deletes a folder at the path, with everything in it."""

    # "Delete exactly what a save wrote at `path`; do nothing if there is nothing." / "CheckpointError: `path` is a
    # folder, or the file can't be removed."
    # A clean-up that is given a folder by mistake (dirpath in place of a file, a checkpoint of a sharded IO) deletes
    # all checkpoints and logs of the run, none of which this IO has written there.

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            super().remove_checkpoint(path)


@caught_by("CIO-14")
class UnsafeRetryCheckpointIO(TorchCheckpointIO):
    """Loads a checkpoint again without `weights_only` where the safe load has refused it."""

    # "`weights_only`: execute nothing that the file holds." / "CheckpointError: it can't be loaded for another reason,
    # e.g. a refused class."
    # Files of older versions load without a question, and so does a file from the internet, whose code runs with the
    # user's rights though the user has asked for a safe load.

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except CheckpointCorruptError:
            raise
        except CheckpointError:
            if not weights_only:
                raise
            return super().load_checkpoint(path, map_location=map_location, weights_only=False)


@caught_by("CIO-50")
class SymbolicLinkCheckpointIO(TorchCheckpointIO):
    """Makes the second name of a checkpoint a symbolic link to the first."""

    # "Either may be removed and the other stays."
    # "last" points to the newest of the k best checkpoints: when that one is removed as a better one comes, or is moved
    # to another place, "last" points to nothing and the run can't be continued.

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        first, second = os.fspath(source), os.fspath(target)
        if "://" in first or "://" in second:
            return super().link_checkpoint(source, target)
        if not os.path.isfile(first):
            return False
        folder = os.path.dirname(second) or "."
        temporary = os.path.join(folder, f".{uuid.uuid4().hex}.link")
        try:
            if not (os.path.exists(second) and os.path.samefile(first, second)):
                os.symlink(os.path.relpath(os.path.realpath(first), os.path.realpath(folder)), temporary)
                os.replace(temporary, second)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise CheckpointError(f"{second!r} could not become a second name of {first!r}: {error}") from error
        return True


@caught_by("CIO-16")
class WholeSecondsCheckpointIO(TorchCheckpointIO):
    """Tells the time of a save in whole seconds, and orders those of one second by their names."""

    # "Return the completed checkpoints directly in `folder`, the last saved one last." / "Nanoseconds since the epoch"
    # A small model is saved several times a second, and "epoch=10" stands before "epoch=9": ckpt_path="last" continues
    # from an older checkpoint, and trains a part of the run again.

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        return super().saved_ns(path) // 1_000_000_000 * 1_000_000_000

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        return sorted(super().list_checkpoints(folder), key=lambda path: (self.saved_ns(path), path))
