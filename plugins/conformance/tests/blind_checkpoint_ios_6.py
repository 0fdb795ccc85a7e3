"""Checkpoint IOs that differ from sound ones in one mistake each."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from sound_components import SameTorch, ThreadedTorch, has_graph
from zoo import caught_by

from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.pytree import map_tensors


@caught_by("CIO-17")
class TensorsOnlyCopiedCheckpointIO(ThreadedTorch):
    """An asynchronous save copies the tensors, and takes lists and dicts without a tensor as they are."""

    # Contract, save_checkpoint: 'An `"async"` one may return earlier: it has then copied every value.'
    # Counters and histories that go on changing while the thread writes are saved with a later step's values beside
    # the weights of this one; a list that grows may even be saved half.

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        memo: dict[int, Any] = {}  # tensors that share memory still do in the copies

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return copy.deepcopy(leaf.detach() if has_graph(leaf) else leaf, memo)

        result: dict[str, Any] = map_tensors(checkpoint, copied)
        return result


@caught_by("CIO-60")
class LatestOutcomeCheckpointIO(ThreadedTorch):
    """Only the outcome of the latest save is kept: one that succeeds clears the error of the one before."""

    # Contract, wait: "Raises: the error of a save that no earlier call has raised."
    # A full disk that is freed in between goes unnoticed: the program goes on as if the earlier checkpoint existed,
    # removes an older one for it, and has nothing to go back to.

    def _start(self, work: Callable[[], None]) -> None:
        def kept() -> None:
            try:
                work()
            except Exception as error:
                self._errors[:] = [error]
            else:
                self._errors.clear()

        super()._start(kept)


@caught_by("CIO-50")
class MakesRoomCheckpointIO(SameTorch):
    """``link_checkpoint`` removes what is at the target first, as a link can't be made over a name that is taken."""

    # Contract, link_checkpoint: "Make `target` a second name of the completed checkpoint `source`, replacing in one
    # step what is there." and "False, with nothing changed, where only a second save can do it."
    # A process that is killed in between, or a source that isn't there, costs the checkpoint that was at the target
    # ("last.ckpt"); where both names are one, the only checkpoint is deleted.

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        self.remove_checkpoint(target)
        return super().link_checkpoint(source, target)


@caught_by("CIO-13")
class TidiesFolderCheckpointIO(SameTorch):
    """``remove_checkpoint`` removes the folder too, once it is empty."""

    # Contract, remove_checkpoint: "Delete exactly what a save wrote at `path`; do nothing if there is nothing."
    # A folder that the user made for the run, or that another process is about to write into, is gone: with its
    # permissions and quota, and even when there was no checkpoint in it.

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(path)
        text = os.fspath(path)
        if "://" not in text:
            with suppress(OSError):  # not empty
                os.rmdir(os.path.dirname(os.path.abspath(text)))


@caught_by("CIO-26")
class OwnEndingCheckpointIO(SameTorch):
    """``list_checkpoints`` leaves out files whose names don't end in the IO's extension."""

    # Contract, list_checkpoints: "Return the completed checkpoints directly in `folder`"; extension: "Names that users
    # choose may end differently, and `recognizes` decides without the name."
    # A checkpoint that a user has saved as "best.pt" is never found again when a run looks for the last one: it
    # continues from an older one, or begins anew.

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        return [path for path in super().list_checkpoints(folder) if path.endswith(self.extension)]


@caught_by("CIO-14")
class SecondTryCheckpointIO(SameTorch):
    """A load that is refused for a class in the file is tried again without the restriction, for convenience."""

    # Contract, load_checkpoint: "weights_only: execute nothing that the file holds." and "CheckpointError: it can't be
    # loaded for another reason, e.g. a refused class."
    # A checkpoint from the network runs its code on the user's machine although the load was the safe one.

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except CheckpointCorruptError:
            raise
        except CheckpointError:
            return super().load_checkpoint(path, map_location=map_location, weights_only=False)
