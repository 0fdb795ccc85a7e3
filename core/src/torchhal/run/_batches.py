"""Hand a training loader's batches to a loop of the user's own: shared out, moved, counted, with its position kept."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from torchhal.errors import ConfigurationError, ModelError
from torchhal.run._run_trainer import RunTrainer
from torchhal.strategies import Strategy, overrides
from torchhal.trainer._run_data import load_training_data, reach_end_of_sampler
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._iterators import close_iterator, until_any_ends
from torchhal.trainer.data._loaders import check_training_loader, no_batch
from torchhal.trainer.data._training_data import TrainingData

_END = object()


class TrainingBatches:
    """The batches of a run: those of its main loader, whose position checkpoints keep, and those of others.

    A batch counts as used from when it is handed out: a checkpoint that its body saves continues with the next one.

    Args:
        trainer: whose run is set up.
        stop: called with a signal, after a batch, where all ranks stop on it; it raises.

    Attributes:
        in_batch: whether the loop has a batch.
        updates: whether the batch in hand ends an accumulation.
    """

    def __init__(self, trainer: RunTrainer, stop: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._state = trainer._run
        self._stop = stop
        self.in_batch = False
        self.updates = True
        self._is_owned = bool({"owns_accumulation", "owns_step"} & set(self._state.strategy.features))
        self.is_evaluated = False
        """Whether an evaluation is under way, or was left by ``break``."""
        self._epoch_is_open = False
        self._was_left = False
        self._was_thrown_out = False
        """Whether an error or an exit, rather than ``break``, has left the epoch."""
        self._elsewhere = 0
        self._others: dict[int, TrainingData] = {}
        self._other_epochs: dict[int, int] = {}

    # -- batches ---------------------------------------------------------------------------------------------------

    def epoch(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of one that a checkpoint is in the midst of."""
        check_training_loader(loader)
        self.end_evaluation()
        state = self._state
        if state.sources.train is None:
            if state.ckpt_path is not None and state.progress.batches_done:
                raise ConfigurationError(
                    f"{state.ckpt_path!r} continues in the midst of an epoch, at batch {state.progress.batches_done}: "
                    "give setup the loader as well, so that its position is known"
                )
            state.sources.train = loader
        if state.sources.train is not loader:
            yield from self._of_another(loader)
            return
        self.settle()
        load_training_data(state)
        yield from self._of_main()

    def _of_main(self) -> Iterator[Any]:
        state, strategy = self._state, self._state.strategy
        progress = state.progress
        data = progress.data
        assert data is not None
        if not progress.batches_done:
            data.reset_epoch()
        self._epoch_is_open = True
        state.phases.start_epoch()
        transfer = batch_transfer(strategy, None, None)
        before, after = (
            getattr(strategy, name) if overrides(strategy, Strategy, name) else None
            for name in ("on_train_batch_start", "on_train_batch_end")
        )
        length, alone = data.length, state.world_size == 1
        iterator = self._trainer.fit_loop.remaining_batches()
        got_batch = progress.batches_done > 0
        try:
            source = iterator if data.loader_length is not None or alone else until_any_ends(iterator, strategy)
            while length is None or progress.batches_done < length:
                if (batch := next(source, _END)) is _END:
                    break
                got_batch = True
                index = progress.batch_idx = progress.batches_done
                if transfer is not None:
                    batch = transfer(batch, 0)
                if before is not None:
                    before(batch, index)
                progress.batches_done = index + 1
                progress.total_batches += 1
                paused = self._begin(index, last=length is not None and index + 1 >= length)
                try:
                    yield batch
                finally:
                    self._end(paused)
                if after is not None:
                    after(None, batch, index)
                del batch
                if self.is_evaluated:
                    self.end_evaluation()
                self.boundary()
            if length is not None and length == data.loader_length:
                reach_end_of_sampler(state, iterator)
        except GeneratorExit:  # a break, or an error on its way: nothing may communicate here
            self._was_left = True
            self._was_thrown_out = _is_raising(sys._getframe(1))
            raise
        finally:
            close_iterator(iterator)
        if not got_batch:
            raise no_batch("the training loader", data.loader)
        self._end_epoch()

    def _of_another(self, loader: Any) -> Iterator[Any]:
        """Yield an epoch of a loader beside the main one, from its beginning."""
        state, strategy = self._state, self._state.strategy
        if id(loader) not in self._others:
            if state.ckpt_path is not None and state.progress.batches_done:
                state.warn_once(
                    f"{state.ckpt_path!r} has the position in the first loader alone: the others begin anew"
                )
            self._others[id(loader)] = TrainingData(loader, state)
        data = self._others[id(loader)]
        number = self._other_epochs.get(id(loader), 0)
        self._other_epochs[id(loader)] = number + 1
        transfer = batch_transfer(strategy, None, None)
        data.reset_epoch()
        iterator = data.epoch(number)
        nested = self.in_batch
        try:
            source = iterator if data.loader_length is not None else until_any_ends(iterator, strategy)
            index = 0
            while (batch := next(source, _END)) is not _END:
                batch = batch if transfer is None else transfer(batch, 0)
                last = data.length is not None and index + 1 >= data.length
                paused = None if nested else self._begin(index, last=last)
                try:
                    yield batch
                finally:
                    if not nested:
                        self._end(paused)
                del batch
                self.boundary()
                index += 1
                if last:
                    break
        finally:
            close_iterator(iterator)

    def close(self) -> None:
        """End what the loaders beside the main one keep."""
        for data in self._others.values():
            data.close()
        self._others.clear()

    # -- accumulation ----------------------------------------------------------------------------------------------

    def _begin(self, index: int, *, last: bool) -> AbstractContextManager[Any] | None:
        """Let one batch be the one in hand; return the context that pauses the averaging in it, entered, or None."""
        every = self.accumulate
        self.in_batch = True
        self.updates = every == 1 or last or (index + 1) % every == 0
        paused = None if self.updates else self._state.strategy.no_backward_sync()
        if paused is not None:
            paused.__enter__()
        return paused

    def _end(self, paused: AbstractContextManager[Any] | None) -> None:
        self.in_batch, self.updates = False, True
        if paused is not None:
            paused.__exit__(None, None, None)

    @property
    def accumulate(self) -> int:
        """Batches of an optimizer step, as far as the loop counts them."""
        return 1 if self._is_owned else self._state.progress.accumulate

    def elsewhere(self) -> AbstractContextManager[None]:
        """Return the context of a batch that comes from elsewhere; inside of one of these batches it does nothing."""
        return nullcontext() if self.in_batch else self._from_elsewhere()

    @contextmanager
    def _from_elsewhere(self) -> Iterator[None]:
        index, self._elsewhere = self._elsewhere, self._elsewhere + 1
        self._state.progress.total_batches += 1
        paused = self._begin(index, last=False)
        try:
            yield
        finally:
            self._end(paused)
        self.boundary()

    # -- boundaries ------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Stop here if a signal asks for it and all ranks agree on this place."""
        watch = self._state.strategy.watch
        watch.steps_done += 1
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None and signum > 0:
            self._stop(signum)

    def end_evaluation(self) -> None:
        """End an evaluation for the strategy, also one that the loop has left by ``break``. Every rank must call."""
        if self.is_evaluated:
            self.is_evaluated = False
            self._state.phases.end()

    @property
    def current_epoch(self) -> int:
        """Epochs that have ended, one that the loop has left by ``break`` included."""
        return self._state.progress.epoch + self._was_left

    @property
    def is_amid_epoch(self) -> bool:
        """Whether an epoch of the main loader has begun and not come to its end, nor to a ``break``."""
        return self._epoch_is_open and (self._was_thrown_out or not self._was_left)

    def settle(self) -> None:
        """End the epoch that the loop has left by ``break``. Every rank must call."""
        if self._was_left:
            self._end_epoch()
        elif self._epoch_is_open:
            raise ModelError(
                "an epoch of run.batches() is under way: end it, or leave it by break, before the next one begins"
            )

    def _end_epoch(self) -> None:
        self._was_left = self._was_thrown_out = self._epoch_is_open = False
        self._state.phases.end()
        self._state.progress.next_epoch()


def _is_raising(frame: FrameType) -> bool:
    """Return whether an exception leaves ``frame``, which has just dropped an iterator; a ``break`` may have, too.

    Python shows an exception that nothing has caught yet nowhere, but the frame stands at the call or statement that
    raised it. Through another iterator, such as a progress bar's, either looks like a break.
    """
    name = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
    return name.startswith(("CALL", "RAISE", "PRECALL"))
