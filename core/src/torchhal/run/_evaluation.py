"""Evaluate in a loop of the user's own: each sample once, over ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from torchhal.pytree import map_tensors, move_to_device
from torchhal.trainer.data._accelerator_loader import start_accelerator_iterator
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._evaluation_data import EvaluationData
from torchhal.trainer.data._iterators import close_iterator
from torchhal.trainer.data._loaders import check_one_loader, last_batch, loader_length, no_batch
from torchhal.trainer.run_state import RunState

_ROUND_ENDS, _LEFT = "torchhal: end of round", "torchhal: left"
"""What ranks say, in place of a value, when they have done with a round, or with the evaluation by ``break``."""

_WHAT = "the loader of evaluation_batches"


class Evaluation:
    """One pass over a loader's batches, in rounds of one batch per rank.

    In the last rounds some ranks may have no batch. These take part in what the others do there: the communication of
    a forward that gathers parameters, and the values that the loop gathers or reduces.

    Args:
        state: of the run, set up.
        loader: the user's.
        boundary: called between two rounds; raises where the run stops.
    """

    def __init__(self, state: RunState, loader: Any, boundary: Callable[[], None]) -> None:
        check_one_loader(loader, "loader")
        self._loader = loader
        if loader_length(loader) == 0:
            raise no_batch(_WHAT, loader)
        self._state = state
        self._strategy = state.strategy
        self._boundary = boundary
        self.ranks: list[int] | None = None
        """The ranks that have a batch in this round, where some have none; else None."""
        self._round = ExitStack()
        """What is left when this rank has done the forward of its batch."""
        self._owes_end = False
        """Whether this rank has left the loop in a round in which others have no batch, and wait for it."""
        self._data = EvaluationData.build(loader, state, 1.0, "limit", "loader")

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches, on its device."""
        data, strategy = self._data, self._strategy
        alone = strategy.world_size == 1
        transfer = batch_transfer(strategy, None, None)
        loader, length, counts = data.loaders[0], data.lengths[0], data.batches[0]
        stop = last_batch(loader, length)
        iterator = start_accelerator_iterator(loader, data.iterated[0]) if length != 0 else iter(())
        end = object()
        position = 0
        try:
            while True:
                batch = end if position == stop else next(iterator, end)
                mine = batch is not end
                if alone:
                    ranks = [0] if mine else []
                elif counts is not None:
                    ranks = [rank for rank, count in enumerate(counts) if count > position]
                else:
                    everybody = strategy.all_gather_object(mine)
                    ranks = [rank for rank, has in enumerate(everybody) if has]
                if not ranks:
                    if not position:  # a generator that was read before, which has no length
                        raise no_batch(_WHAT, self._loader)
                    return
                position += 1
                self.ranks = None if len(ranks) == strategy.world_size else ranks
                with self._round:
                    if self.ranks is not None and strategy.evaluation_communicates:
                        self._round.enter_context(strategy.evaluation_step_of(ranks))
                    if mine:
                        yield batch if transfer is None else transfer(batch, 0)
                if self.ranks is not None and self._end_round():
                    return
                self.ranks = None
                self._boundary()
        except GeneratorExit:
            self._owes_end = self.ranks is not None
            raise
        finally:
            self.ranks = None
            close_iterator(iterator)
            data.close()

    # -- rounds in which some ranks have no batch ------------------------------------------------------------------

    def _end_round(self) -> bool:
        """Take part in what other ranks gather, until all have come here; return whether some have left the loop."""
        while True:
            told = self._exchange(_ROUND_ENDS)
            if all(isinstance(value, str) for value in told):
                return _LEFT in told

    def leave(self) -> None:
        """Tell the ranks that wait for this one in a round that it has left the loop. Once, before all else."""
        if self._owes_end:
            self._owes_end = False
            self._exchange(_LEFT)

    def _exchange(self, value: Any) -> list[Any]:
        return self._strategy.all_gather_object(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of the ranks that have a batch in this round, in their order, on this rank's device."""
        assert self.ranks is not None
        self._round.close()  # the ranks without a batch have taken part in the forward, and wait for this
        host = torch.device("cpu")
        sent = map_tensors(value, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
        found = self._exchange((move_to_device(sent, host),))
        device = self._strategy.root_device
        return [move_to_device(each[0], device) for each in found if isinstance(each, tuple)]
