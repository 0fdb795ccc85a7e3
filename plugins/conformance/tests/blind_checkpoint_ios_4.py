"""Checkpoint IOs that differ from core's, or from one that saves in a thread, in one defect each."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sound_components import ThreadedTorch
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO, inspect_contents, location_of


@caught_by("CIO-67")
class GlobbedRemovalCheckpointIO(TorchCheckpointIO):
    """It removes what matches the path as a pattern, so brackets in a name are not taken as they are."""

    # "Delete exactly what a save wrote at `path`; do nothing if there is nothing."
    # "best[val].ckpt" is never removed, and the disk fills; in its place "bestv.ckpt", "besta.ckpt" or "bestl.ckpt" are
    # deleted, which other saves wrote.

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        place = location_of(path, self.storage_options)
        if "://" in place.shown:
            super().remove_checkpoint(path)
            return
        for found in glob.glob(place.shown):  # also the parts of a save that was split
            super().remove_checkpoint(found)


@caught_by("CIO-68")
class FollowedLinkCheckpointIO(TorchCheckpointIO):
    """A save to a path that is a link overwrites the link's target and leaves the link."""

    # "Make `checkpoint` durable at `path`, replacing all of what was there."
    # Where "last.ckpt" is a link to "epoch=3.ckpt", a save to "last.ckpt" destroys the weights of epoch 3; and the new
    # ones are gone as soon as "epoch=3.ckpt" is removed as too old.

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        place = location_of(path, self.storage_options, storage_options)
        target = path if "://" in place.shown else os.path.realpath(place.shown)  # the script may change its folder
        super().save_checkpoint(checkpoint, target, storage_options=storage_options)


@caught_by("CIO-14")
class UnpickledOpenCheckpointIO(TorchCheckpointIO):
    """To show any checkpoint, `open_checkpoint` unpickles whatever the file holds."""

    # "`CheckpointError`: as of `load_checkpoint`", of which "`weights_only`: execute nothing that the file holds" is
    # the default.
    # A user who only looks into a file of unknown origin, with `torchhal checkpoint inspect`, runs the code in it.

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        return self.load_checkpoint(path, weights_only=False)


@caught_by("CIO-26")
class SharedResultCheckpointIO(TorchCheckpointIO):
    """A second load of an unchanged file returns the very dictionary that the first one returned."""

    # "Return the checkpoint that `save_checkpoint` wrote at `path`"; "other values than were saved are never returned".
    # Whoever changes what was loaded (pops keys, trains tensors that were assigned to a model) changes what later loads
    # return: the second of two fine-tunings from one checkpoint begins with the weights of the first.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._last: tuple[Any, dict[str, Any]] | None = None

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        place = location_of(path, self.storage_options)
        version = place.version()
        if version is None or not isinstance(map_location, str | torch.device):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        key = (place.shown, version, str(map_location), weights_only)
        if self._last is None or self._last[0] != key:
            self._last = (key, super().load_checkpoint(path, map_location=map_location, weights_only=weights_only))
        return self._last[1]

    def teardown(self) -> None:
        self._last = None
        super().teardown()


@caught_by("CIO-19")
class OverlappingSavesCheckpointIO(ThreadedTorch):
    """A save doesn't wait for the one before it, so of two to one path the older may be written last."""

    # "Make `checkpoint` durable at `path`, replacing all of what was there."
    # After a large checkpoint and a small one to "last.ckpt" in short succession the large, older one is there: a
    # resumed run loses the steps between, and nobody is told.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._threads: list[threading.Thread] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(checkpoint, dict):
            raise TypeError(f"'checkpoint' must be a dict (got {type(checkpoint).__name__})")
        location_of(path, self.storage_options, storage_options)
        inspect_contents(checkpoint)
        copied = self._copied(checkpoint)
        self._start(lambda: TorchCheckpointIO.save_checkpoint(self, copied, path, storage_options=storage_options))

    def _start(self, work: Callable[[], None]) -> None:
        super()._start(work)
        assert self._thread is not None
        self._threads.append(self._thread)

    def _join(self) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        super()._join()


@caught_by("CIO-69")
class ImpatientWaitCheckpointIO(ThreadedTorch):
    """It waits for a save for ten seconds at most and then takes it as done."""

    # "Return when every save is durable; does nothing unless `"async"`."
    # A checkpoint that takes longer is reported and linked, and the one before it deleted, while the new one isn't
    # there yet: if the job ends now, or the disk turns out to be full, there is none.

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=10.0)  # the end of a job must not hang on a slow disk
