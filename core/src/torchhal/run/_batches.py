"""Hand a training loader's batches to a loop of the user's own: shared out, moved, counted, with its position kept."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from torchhal.errors import ConfigurationError, ModelError
from torchhal.run._evaluation import Evaluation
from torchhal.run._run_trainer import RunTrainer
from torchhal.strategies import Strategy, overrides
from torchhal.trainer._run_data import load_training_data, reach_end_of_sampler
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._iterators import close_iterator, until_any_ends
from torchhal.trainer.data._loaders import check_one_loader, no_batch
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
        ends_accumulation: whether the batch in hand ends an accumulation.
        evaluation: the evaluation that is under way, or that the loop has left by ``break``; None without one.
        in_evaluation: whether it is under way.
        run_has_ended: whether the run has, perhaps in the body of a batch.
    """

    def __init__(self, trainer: RunTrainer, stop: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._state = trainer._run
        self._stop = stop
        self.in_batch = False
        self.ends_accumulation = True
        self._is_owned = bool({"owns_accumulation", "owns_step"} & set(self._state.strategy.features))
        self._was_given = self._state.sources.train is not None
        self.evaluation: Evaluation | None = None
        self.in_evaluation = False
        self.run_has_ended = False
        self._no_sync: AbstractContextManager[Any] | None = None
        self._epoch_is_open = False
        self._was_left = False
        self._was_thrown_out = False
        """Whether an error or an exit, rather than ``break``, has left the epoch."""
        self._counted_elsewhere = 0
        self._passes: dict[int, int] = {}
        """How often each loader beside the main one was read, by its id, for the order of its samples."""

    # -- batches ---------------------------------------------------------------------------------------------------

    def epoch(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of one that a checkpoint is in the midst of."""
        check_one_loader(loader, "loader")
        self.end_evaluation()
        state = self._state
        if state.sources.train is None:
            if state.ckpt_path is not None and state.progress.batches_done:
                raise ConfigurationError(
                    f"{state.ckpt_path!r} continues in the midst of an epoch, at batch {state.progress.batches_done}: "
                    "give setup the loader as well, so that its position is known"
                )
            state.sources.train = loader
        if state.sources.train is not loader and (self._was_given or self.in_batch):
            yield from self._of_another(loader)
            return
        self.end_left_epoch()
        again = state.sources.train is not loader  # a loop that makes one for each epoch
        state.sources.train = loader
        load_training_data(state, again=again)
        yield from self._of_main()

    def _of_main(self) -> Iterator[Any]:
        state, strategy = self._state, self._state.strategy
        progress = state.progress
        data = progress.data
        assert data is not None
        if not progress.batches_done:
            data.reset_epoch()
        self._epoch_is_open = True
        self._no_sync = strategy.no_backward_sync() if self.accumulate > 1 else None
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
                self._check_open()
                if after is not None:
                    after(None, batch, index)
                del batch
                if self.evaluation is not None:
                    self.end_evaluation()
                self.boundary()
            if length is not None and length == data.loader_length:
                reach_end_of_sampler(state, iterator)
        except GeneratorExit:  # a break, or an error on its way: nothing may communicate here
            self._was_left = True
            self._was_thrown_out = _is_left_by_error()
            raise
        except Exception:  # of the loader: a loop that catches it may go on with another epoch
            self._was_left = self._was_thrown_out = True
            raise
        finally:
            close_iterator(iterator)
        if not got_batch:
            raise no_batch("the training loader", data.loader)
        self._end_epoch()

    def _of_another(self, loader: Any) -> Iterator[Any]:
        """Yield an epoch of a loader beside the main one, from its beginning."""
        state, strategy = self._state, self._state.strategy
        if state.ckpt_path is not None and state.progress.batches_done and not self.in_batch:
            state.warn_once(f"{state.ckpt_path!r} has the position in the first loader alone: the others begin anew")
        number = self._passes.get(id(loader), 0)
        self._passes[id(loader)] = number + 1
        transfer = batch_transfer(strategy, None, None)
        data = TrainingData(loader, state)
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
            data.close()

    # -- accumulation ----------------------------------------------------------------------------------------------

    def _begin(self, index: int, *, last: bool) -> AbstractContextManager[Any] | None:
        """Let one batch be the one in hand; return the context that pauses the averaging in it, entered, or None."""
        every = self.accumulate
        self.in_batch = True
        self.ends_accumulation = every == 1 or last or (index + 1) % every == 0
        paused = None if self.ends_accumulation else self._no_sync
        if paused is not None:
            paused.__enter__()
        return paused

    def _end(self, paused: AbstractContextManager[Any] | None) -> None:
        self.in_batch, self.ends_accumulation = False, True
        if paused is not None:
            paused.__exit__(None, None, None)

    @property
    def accumulate(self) -> int:
        """Batches of an optimizer step, as far as the loop counts them."""
        return 1 if self._is_owned else self._state.progress.accumulate

    def from_elsewhere(self) -> AbstractContextManager[None]:
        """Return the context of a batch that comes from elsewhere; inside of one of these batches it does nothing."""
        return nullcontext() if self.in_batch else self._from_elsewhere()

    @contextmanager
    def _from_elsewhere(self) -> Iterator[None]:
        index, self._counted_elsewhere = self._counted_elsewhere, self._counted_elsewhere + 1
        self._state.progress.total_batches += 1
        if self._no_sync is None and self.accumulate > 1:
            self._no_sync = self._state.strategy.no_backward_sync()
        paused = self._begin(index, last=False)
        try:
            yield
        finally:
            self._end(paused)
        if not self.run_has_ended:
            self.boundary()

    # -- boundaries ------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Stop here if a signal asks for it and all ranks agree on this place.

        Not while the loop has a batch: the checkpoint that a stop saves counts it as used.
        """
        if self.in_batch:
            return
        self._check_open()
        watch = self._state.strategy.watch
        watch.steps_done += 1
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None and signum > 0:
            self._stop(signum)

    def _check_open(self) -> None:
        """Raise where the body of a batch has ended the run and asks for another batch."""
        if self.run_has_ended:
            raise ConfigurationError(
                "this Run has ended in the body of a batch, by run.end() or by the setup of another Run, so there is "
                "no next batch: leave the loop where the run ends, or end the run behind the loop"
            )

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """Begin an evaluation; one that the loop has left ends. Every rank must call."""
        if self.in_evaluation:
            raise ConfigurationError("evaluation_batches is under way: end the loop over them before another begins")
        self.end_evaluation()
        self.evaluation, self.in_evaluation = evaluation, True
        self._state.phases.start_evaluation("validate")

    def end_evaluation(self) -> None:
        """End an evaluation for the strategy, also one that the loop has left by ``break``. Every rank must call."""
        if self.evaluation is not None:
            evaluation, self.evaluation, self.in_evaluation = self.evaluation, None, False
            evaluation.leave()
            self._state.phases.end()

    @property
    def current_epoch(self) -> int:
        """Epochs that have ended, one that the loop has left by ``break`` included."""
        return self._state.progress.epoch + self._was_left

    @property
    def is_amid_epoch(self) -> bool:
        """Whether an epoch of the main loader has begun and not come to its end, nor to a ``break``."""
        return self._epoch_is_open and (self._was_thrown_out or not self._was_left)

    def end_left_epoch(self) -> None:
        """End the epoch that the loop has left by ``break``. Every rank must call."""
        if self._was_left:
            self._end_epoch()
        elif self._epoch_is_open:
            raise ModelError(
                "an epoch of run.batches() is under way: end it, or leave it by break, before the next one begins"
            )

    def _end_epoch(self) -> None:
        progress = self._state.progress
        if self.accumulate > 1 and progress.has_gradients:
            progress.has_gradients = False  # the next zero_grad() clears them
            self._state.warn_once(
                f"an epoch has ended within an accumulation of {self.accumulate} batches, and its last gradients are "
                "left out: a loader with a length ends its last accumulation itself, unless the loop leaves it by break"
            )
        self._was_left = self._was_thrown_out = self._epoch_is_open = False
        self._state.phases.end()
        self._state.progress.next_epoch()


_OF_BREAK = frozenset({"POP_TOP", "END_FOR", "POP_ITER", "JUMP_FORWARD", "YIELD_VALUE", "RESUME", "SEND"})
"""Instructions at which a loop stands that drops its iterator by break or return, or is a generator that is closed."""


def _is_left_by_error() -> bool:
    """Return whether an error or an exit, rather than ``break``, closes the generator that calls this.

    Python shows an exception that nothing has caught yet nowhere; but the loop stands at the instruction that raised.
    Through a generator of another library, such as a progress bar's, either looks like a break.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torchhal."):
        frame = frame.f_back
    return frame is not None and opcode.opname[frame.f_code.co_code[frame.f_lasti]] not in _OF_BREAK
