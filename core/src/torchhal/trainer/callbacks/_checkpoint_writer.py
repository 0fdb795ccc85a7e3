"""Save, link and delete the files of one ModelCheckpoint, so that a save that fails loses none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchhal.checkpoint._location import is_url
from torchhal.errors import CheckpointError
from torchhal.trainer.callbacks._kept_checkpoints import KeptCheckpoints
from torchhal.trainer.callbacks._rank_agreement import decide_on_rank_zero
from torchhal.trainer.callbacks._written_files import WrittenFiles

if TYPE_CHECKING:
    from torchhal import Trainer


@dataclass(frozen=True)
class PendingSave:
    """A save that may not be durable yet.

    Attributes:
        before: what was kept before it.
        paths: its files.
        text: the message to print when it is durable, or "".
        link: the durable file and the second name that it then gets; None without one.
    """

    before: KeptCheckpoints
    paths: tuple[str, ...]
    text: str = ""
    link: tuple[str, str] | None = None


class CheckpointWriter:
    """Files of one ModelCheckpoint, of which at most one save is pending. Every rank must call its methods.

    A file is deleted only when the save that supersedes it is durable.

    Attributes:
        files: the files that this run may replace and delete.
        pending: the save that :meth:`settle` has to wait for; None without one.
        durable_path: the first file of the latest durable save, or "".
    """

    def __init__(self) -> None:
        self.files = WrittenFiles("", "")
        self.pending: PendingSave | None = None
        self.durable_path = ""

    def save(self, trainer: Trainer, path: str | None, last: str | None, weights_only: bool) -> tuple[str, str] | None:
        """Save to ``path``, to ``last`` or to both, where the second one is a link if it can be.

        Returns:
            The link that can only be made once the save is durable, as (file, second name); None for no such link.
        """
        first = path or last
        assert first is not None
        # Saved after ``kept`` was updated, so that a run resumed from this very file treats the file as its own.
        trainer.save_checkpoint(first, weights_only)
        if path is None or last is None:
            return None
        can_link = self._can_link(trainer, path)
        if can_link and "async" in trainer.strategy.checkpoint_io.features:
            return path, last  # a second save would wait for the first
        if not can_link or not self._link(trainer, path, last):
            trainer.save_checkpoint(last, weights_only)
        return None

    @contextmanager
    def undone_on_failure(
        self, trainer: Trainer, kept: KeptCheckpoints, before: KeptCheckpoints, paths: tuple[str, ...]
    ) -> Iterator[None]:
        """Make ``kept`` what it was ``before``, and release ``paths``, if what is done inside raises."""
        try:
            yield
        except BaseException:
            self._undo(trainer, kept, before, paths)
            raise

    def settle(self, trainer: Trainer, kept: KeptCheckpoints) -> PendingSave | None:
        """Wait until the pending save is durable, then delete what it supersedes; return that save or None.

        If the save has failed, ``kept`` becomes what it was before it.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                trainer.strategy.wait_for_checkpoints()
                if pending.link is not None:
                    source, target = pending.link
                    if not self._link(trainer, source, target):
                        raise CheckpointError(f"{source!r} is not there to get the second name {target!r}")
            except Exception:
                self._undo(trainer, kept, pending.before, pending.paths)
                raise
            self.durable_path = pending.paths[0]
            if trainer.is_global_zero:
                for path in pending.paths:
                    self.files.wrote(path)
        self._delete_superseded(trainer, kept)
        return pending

    def _undo(self, trainer: Trainer, kept: KeptCheckpoints, before: KeptCheckpoints, paths: tuple[str, ...]) -> None:
        kept.assign(before)
        if trainer.is_global_zero:
            for path in paths:
                self.files.release(path)

    def _delete_superseded(self, trainer: Trainer, kept: KeptCheckpoints) -> None:
        superseded = kept.take_superseded()
        if not superseded:
            return
        owned = decide_on_rank_zero(trainer, lambda: [*map(self.files.owns, superseded)])
        for path, own in zip(superseded, owned, strict=True):
            if not own:
                continue
            try:
                trainer.strategy.remove_checkpoint(path)
                if trainer.is_global_zero:
                    self.files.release(path)
            except (CheckpointError, OSError) as error:
                kept.superseded.append(path)
                trainer.warn_once(f"an old checkpoint can't be removed, which will be tried again: {error}")

    def _can_link(self, trainer: Trainer, path: str) -> bool:
        """Return whether ``last`` can be a second name of what is saved at ``path``, rather than a second save."""
        features = trainer.strategy.checkpoint_io.features
        return not is_url(path) and ("sharded" not in features or "links" in features)

    def _link(self, trainer: Trainer, path: str, last: str) -> bool:
        """Make ``last`` a second name of the durable ``path``; return False where only a second save can do that."""
        io = trainer.strategy.checkpoint_io
        return bool(decide_on_rank_zero(trainer, lambda: io.link_checkpoint(path, last)))
