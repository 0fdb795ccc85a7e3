"""Hold the loaders of one evaluation, and how many batches of each every rank has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchhal.errors import ModelError
from torchhal.trainer.data._accelerator_loader import accelerator_loader, close_accelerator_loader
from torchhal.trainer.data._batch_indices import recording
from torchhal.trainer.data._context import DataContext
from torchhal.trainer.data._iterators import close_loader
from torchhal.trainer.data._loaders import as_loaders, check_loader, is_sized, limit_length, loader_length, no_batch
from torchhal.trainer.data._sharing import prepare_loader


@dataclass
class EvaluationData:
    """The loaders of one evaluation and how many batches of each are used."""

    loaders: list[Any] = field(default_factory=list)
    lengths: list[int | None] = field(default_factory=list)
    """This rank's; None for a loader without a length."""
    common: list[int] = field(default_factory=list)
    """Number of batches that every rank has, for which all ranks are in step."""
    batches: list[list[int] | None] = field(default_factory=list)
    """How many each rank has; None if a length is unknown on any rank, empty where none is used."""
    iterated: list[Any] = field(default_factory=list)
    """What the accelerator made of each loader, which gives the same batches."""
    anywhere: bool = False
    """Whether any rank has a batch: the same on every rank, as all must take part in its collectives."""
    with_indices: bool = False
    """Whether it is recorded which samples each batch holds."""
    _is_closed: bool = False

    @classmethod
    def build(
        cls,
        given: Any,
        run: DataContext,
        limit: int | float,
        limit_name: str,
        what: str,
        *,
        as_trained: bool = False,
        with_indices: bool = False,
    ) -> EvaluationData:
        """Make the loaders of this rank, on every rank.

        Args:
            given: the loaders of all ranks.
            run: whose data they are.
            limit: how many batches of each are used.
            limit_name: the argument that ``limit`` comes from, for messages.
            what: the argument that ``given`` comes from, for messages.
            as_trained: each rank has the share of the batches that it trains on.
            with_indices: record which samples each batch holds.
        """
        loaders = as_loaders(given)
        for loader in loaders:
            check_loader(loader, what)
            if loader_length(loader) == 0 and limit:
                raise no_batch(f"a loader of {what!r}" if len(loaders) > 1 else f"the loader of {what!r}", loader)
            limit_length(loader_length(loader), limit, limit_name)  # of the whole, so that all ranks raise or none
        prepared = [prepare_loader(loader, run, training=as_trained) for loader in loaders]
        if with_indices:
            prepared = [recording(loader) for loader in prepared]
        lengths = [limit_length(loader_length(loader), limit, limit_name, part=True) for loader in prepared]
        exact = [length if is_sized(loader) else None for length, loader in zip(lengths, prepared, strict=True)]
        told = run.strategy.all_gather_object((lengths, exact))
        everybody = [theirs for theirs, _ in told]
        if len({len(theirs) for theirs in everybody}) > 1:
            listing = ", ".join(f"rank {rank}: {len(theirs)}" for rank, theirs in enumerate(everybody))
            raise ModelError(f"every rank must evaluate on the same number of loaders ({listing})")
        common = [min(length or 0 for length in column) for column in zip(*everybody, strict=True)]
        batches = [
            None if None in column else list(column) for column in zip(*(theirs for _, theirs in told), strict=True)
        ]
        iterated = [accelerator_loader(loader, run) for loader in prepared]
        anywhere = any(length != 0 for theirs in everybody for length in theirs)
        return cls(prepared, lengths, common, batches, iterated, anywhere, with_indices)

    def first(self, batches: int) -> EvaluationData:
        """Return the same data with at most so many batches of each loader; -1 for all."""
        lengths, common, counts = list(self.lengths), list(self.common), list(self.batches)
        if batches != -1:
            lengths = [batches if length is None else min(batches, length) for length in lengths]
            common = [min(batches, each) for each in common]
            counts = [each and [min(batches, count) for count in each] for each in counts]
        return EvaluationData(self.loaders, lengths, common, counts, self.iterated, self.anywhere)

    def replace_by(self, other: EvaluationData) -> None:
        """End these loaders, and go on with the ones of ``other``, also where an evaluation has begun."""
        self.close()
        vars(self).update(vars(other))

    def skip(self, index: int) -> None:
        """Use no batch of a loader."""
        self.lengths[index] = self.common[index] = 0
        self.batches[index] = []

    def close(self) -> None:
        """End, once, what the loaders keep between evaluations: worker processes, and what the accelerator added."""
        if not self._is_closed:
            self._is_closed = True
            for loader, made in zip(self.loaders, self.iterated, strict=True):
                close_accelerator_loader(loader, made)
                close_loader(loader)

    def __bool__(self) -> bool:
        return self.anywhere
