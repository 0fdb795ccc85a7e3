"""Run the training loop over epochs and batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchhal import rng
from torchhal.distributed.signals import at_once
from torchhal.trainer import _rank_consistency as rank_consistency
from torchhal.trainer import _resume as resume
from torchhal.trainer._forwarded import Forwarded
from torchhal.trainer._hooks import module_hook
from torchhal.trainer._progress import FitProgress
from torchhal.trainer._run_data import reach_end_of_sampler, reload_data
from torchhal.trainer._run_part import RunPart
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._iterators import close_iterator, until_any_ends
from torchhal.trainer.data._loaders import no_batch
from torchhal.trainer.data._training_data import TrainingData
from torchhal.trainer.logging._log_options import batch_size_of
from torchhal.trainer.loops._batch_hooks import train_batch_end, train_batch_start
from torchhal.trainer.loops._control_flow import DataPositionChanged, StopOnSignal
from torchhal.trainer.loops._epoch_end import call_epoch_end
from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
from torchhal.trainer.loops._optimization import Optimization
from torchhal.trainer.loops._schedulers import step_schedulers
from torchhal.trainer.loops._stop_conditions import StopConditions
from torchhal.trainer.loops._validation_schedule import AFTER_LAST_BATCH, ValidationSchedule
from torchhal.trainer.run_state import RunState


class FitLoop(RunPart[RunState]):
    """The loop over epochs and batches of a fit; what it counts is the run's :class:`.FitProgress`."""

    # What callbacks read, and strategies that take over the counters of others set.
    epoch = Forwarded[int]("progress")
    batches_done = Forwarded[int]("progress")
    batch_idx = Forwarded[int]("progress")
    global_step = Forwarded[int]("progress")
    total_batches = Forwarded[int]("progress")
    scheduler_steps = Forwarded[int]("progress")
    validated_at = Forwarded[int]("progress")
    epoch_done = Forwarded[bool]("progress")
    stepped = Forwarded[bool]("progress")
    accumulate = Forwarded[int]("progress")
    batch_size = Forwarded[int]("progress")
    step_size = Forwarded[int]("progress")
    data = Forwarded[TrainingData | None]("progress")
    elapsed_before = Forwarded[float]("progress")
    max_epochs = Forwarded[int | None]("run")

    def __init__(self, run: RunState, evaluation: EvaluationLoop) -> None:
        super().__init__(run)
        self.progress: FitProgress = run.progress
        self.evaluation = evaluation
        self.stop = StopConditions(run)
        self.validations = ValidationSchedule(run)
        self.has_step_schedulers = False
        self.lr_scheduler_step: Callable[..., Any] | None = None
        self.optimization: Optimization | None = None
        self._got_batch = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimization": None}  # the optimization belongs to one fit

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`.FitProgress.state_dict`."""
        return self.progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`.FitProgress.load_state_dict`."""
        self.progress.load_state_dict(state)

    def elapsed(self) -> float:
        """See :meth:`.FitProgress.elapsed`."""
        return self.progress.elapsed()

    # -- the loop --------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until a limit is reached or a stop is requested."""
        try:
            self._run_epochs()
        finally:  # also where there was nothing to do, to stop the clock
            self.progress.stop_clock()

    def _run_epochs(self) -> None:
        run = self.run
        assert self.progress.data is not None
        self.progress.started = time.monotonic()
        self.progress.out_of_time = False
        self.stop.set_deadline()
        if run.max_time is not None:
            late = int(self.progress.elapsed_before >= run.max_time.total_seconds())
            if run.world_size > 1:  # the latest clock: the ranks' clocks differ
                late = int(run.strategy.reduce(late, "max"))
            if late:
                run.should_stop = self.progress.out_of_time = True
        self.stop.begin()
        if self.progress.data.length == 0:
            return
        if self.stop.is_done():
            if self.progress.epoch or self.progress.total_batches:  # not an intended no-op, as with max_epochs=0
                run.warn_once(
                    f"fit has nothing to do: {self.stop.reason()}. To go on, raise trainer.fit_loop.max_epochs or "
                    "max_steps; another model wants a Trainer of its own"
                )
            return
        with at_once():
            self.optimization = Optimization(run)
            if run.profiling is not None:
                run.profiling.time_optimization(self.optimization)
            run.hooks.call("on_train_start")
            run.frozen_parameters.begin(run.module, run.ckpt_path, run.warn_once)
            run.phases.start_train()
        self.validations.start_clock()
        if not self.progress.batches_done:
            self.restore_generators()
        while not self.stop.is_done():
            try:
                self._run_epoch()
            except DataPositionChanged:
                self._reposition()
        run.hooks.call("on_train_end")
        run.phases.end()
        signum = run.strategy.watch.agree_on_stop_at_end(run.strategy.timeout)
        if signum is not None and signum > 0:
            raise StopOnSignal(signum)

    def restore_generators(self) -> None:
        """Restore the generators of the checkpoint that the fit continues from, once."""
        generators, self.progress.generators = self.progress.generators, None
        if generators is not None:
            rng.restore(generators, self.run.strategy.accelerator, self.run.strategy.root_device)

    def _reposition(self) -> None:
        """Continue at the present counters, in this process's own order of the data and with its random numbers."""
        assert self.progress.data is not None
        run = self.run
        run.phases.end_all(down_to=1)
        run.results.start_batch(None)
        self.validations.start_clock()  # others of the world may have theirs from another batch
        if self.progress.batches_done:
            if self.progress.data.length is not None:  # others may have more batches in an epoch
                self.progress.batches_done = min(self.progress.batches_done, self.progress.data.length)
            self.progress.resume(
                self.progress.data.position(), rng.collect(run.strategy.accelerator, run.strategy.root_device)
            )

    def remaining_batches(self) -> Iterator[Any]:
        """Return an iterator over the batches of the epoch that are left."""
        assert self.progress.data is not None
        position, self.progress.data_position = self.progress.data_position, None
        if not self.progress.batches_done:
            begins_anew = self._reloads_data() and self.run.sources.train is None  # by train_dataloader
            if position is not None and not begins_anew:
                self.progress.data.restore_generators(position["generators"])
            return self.progress.data.epoch(self.progress.epoch)
        position = position or self.progress.data.position()
        return self.progress.data.resume(
            self.progress.epoch, self.progress.batches_done, position, self.restore_generators
        )

    def _reloads_data(self) -> bool:
        """Return whether this epoch begins by getting its loaders again."""
        every = self.run.reload_dataloaders_every_n_epochs
        return bool(every) and self.progress.epoch % every == 0

    def _run_epoch(self) -> None:
        run = self.run
        assert self.progress.data is not None
        if self._reloads_data() and not self.progress.data.is_new:
            reload_data(run)
        data = self.progress.data
        resuming = self.progress.batches_done > 0
        if not resuming:
            data.reset_epoch()
        run.results.stage = "train"
        run.hooks.call("on_train_epoch_start")
        run.phases.start_epoch()
        length = data.length
        if resuming and self.validations.is_due(length):
            # the run that wrote the checkpoint stopped between the batch and its validation
            self.restore_generators()
            self._validate()
            self.progress.generators = rng.collect(run.strategy.accelerator, run.strategy.root_device)
        batches = self.remaining_batches()
        self._got_batch = False
        stopped = False
        try:
            if length is None or self.progress.batches_done < length:
                stopped = self._run_batches(batches, length)
            else:
                reach_end_of_sampler(run, batches)
        finally:
            close_iterator(batches)
        if (
            not self.progress.batches_done and not self._got_batch
        ):  # an exhausted generator would "train" all epochs left
            raise no_batch(f"the training loader (in epoch {self.progress.epoch})", data.loader)
        self._end_epoch(complete=not stopped)

    def _run_batches(self, batches: Iterator[Any], length: int | None) -> bool:
        """Run the batches of an epoch; return whether it stopped before the epoch's end."""
        run = self.run
        optimization, progress = self.optimization, self.progress
        data = progress.data
        assert optimization is not None and data is not None
        start_batch, watch, validations = run.results.start_batch, run.strategy.watch, self.validations
        # everything that doesn't change between batches is looked up here, once
        step = optimization.step
        transfer = batch_transfer(run.strategy, run.datamodule, run.module)
        batch_start, batch_end = train_batch_start(run), train_batch_end(run)
        log_loss = not callable(getattr(run.module, "log", None))  # a plain module has no way to
        schedulers = self.has_step_schedulers = self._has_step_schedulers()
        self.lr_scheduler_step = module_hook(run.module, "lr_scheduler_step")
        accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
        whole = length is not None and length == data.loader_length
        by_batch = run.adapters.logs_by_batch(run.module)
        alone = run.world_size == 1
        run.current_hook = "training_step"
        source = batches if data.loader_length is not None or alone else until_any_ends(batches, run.strategy)
        if run.profiling is not None:
            source, transfer, batch_start, batch_end = run.profiling.time_batches(
                source, transfer, batch_start, batch_end
            )

        while True:
            try:  # a for loop would call iter() again, which restarts a loader that is its own iterator
                batch = next(source)
            except StopIteration:
                break
            # no look-ahead for a loader without a length: it would draw random numbers early
            last = length is not None and progress.batches_done + 1 >= length
            index = progress.batch_idx = progress.batches_done
            if transfer is not None:
                start_batch(None)  # which held the last batch: two would lie on the device
                batch = transfer(batch, 0)
            start_batch(batch)
            if batch_start is not None:
                self._got_batch = True
                if batch_start(batch, index):
                    self._finish_accumulation()
                    return False
            if progress.settings_changed:
                accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
            if accumulate == 1:
                first = update = True
            else:
                first = index % accumulate == 0
                update = last or (index + 1) % accumulate == 0
            progress.stepped = False
            before = progress.global_step
            output = step(batch, index, first, update)
            progress.batches_done = index + 1
            progress.total_batches += 1
            if schedulers and update and progress.stepped:
                self._after_update()
            if log_loss:
                self._log_loss(output, batch)
            if log_every and (
                progress.total_batches % log_every == 0
                if by_batch
                else progress.global_step // log_every != before // log_every
            ):
                run.log_step()
            if batch_end is not None:
                batch_end(output, batch, index)
            del output  # or this step's output would stay in memory during the next
            if validate_every and (
                (progress.total_batches if crossing else index + 1) % validate_every == 0
                if validate_every > 0
                else last
                if validate_every == AFTER_LAST_BATCH
                else validations.is_time()
            ):
                self._validate()
                run.current_hook = "training_step"
            if progress.settings_changed:
                accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
            # counted after the validation: if a signal cuts that short, every rank is still before this boundary
            watch.steps_done += 1
            if max_steps != -1 and progress.global_step >= max_steps:
                if last and whole:
                    reach_end_of_sampler(run, batches)
                return not last
            late = deadline is not None and time.monotonic() > deadline
            if (watch.stop_requested or run.should_stop or late) and self.stop.stops_at_boundary(alone):
                validated = progress.validated_at == progress.total_batches
                if validate_every and not last and not validated and run.adapters.validates_when_stopped(run.module):
                    self._validate()
                return not last
            if last:
                if whole:  # else a limit was reached, and the rest of the sampler stays undrawn
                    reach_end_of_sampler(run, batches)
                return False
        # the end of a loader without a length
        self._finish_accumulation()
        if (
            validate_every
            and isinstance(run.val_check_interval, float)
            and progress.validated_at != progress.total_batches
        ):
            self._validate()
        return False

    def _settings(self, length: int | None) -> tuple[int, int, int, int, bool, float | None]:
        """Return the settings that each batch goes by; called again when a hook has changed some of them."""
        run, optimization = self.run, self.optimization
        assert optimization is not None
        self.progress.settings_changed = False
        self.stop.set_deadline()
        if self.progress.accumulate != run.accumulate_grad_batches:
            if self.progress.has_gradients:
                self.progress.settings_changed = True  # until the accumulation that has begun is at its end
            else:
                resume.change_accumulation(run)
                optimization.accumulate_over(self.progress.accumulate)
        # loggers may exist on rank 0 only, so they must not decide whether a collective runs
        log_every = run.log_every_n_steps if run.loggers or run.results.leader else 0
        validate_every, crossing = self.validations.interval(length), run.check_val_every_n_epoch is None
        return optimization.accumulate, run.max_steps, log_every, validate_every, crossing, self.stop.deadline

    def _log_loss(self, output: Any, batch: Any) -> None:
        """Log the loss of a plain module, by step and by epoch, as ``self.log`` of a ``torchhal.Module`` would."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor) or not loss.numel():
            return  # skipped, or not logged on this rank
        if loss.numel() > 1:  # from a strategy that owns the step
            loss = loss.detach().mean()
        size = batch_size_of(batch)
        self.run.results.log(
            "loss", loss, "training_step", True, None, True, True, batch_size=1 if size is None else size
        )

    def _finish_accumulation(self) -> None:
        """Step with the accumulated gradients when the epoch ends sooner than expected."""
        assert self.optimization is not None
        if self.optimization.finish():
            self._after_update()

    def _has_step_schedulers(self) -> bool:
        run = self.run
        if "owns_schedulers" in run.strategy.features or not getattr(run.module, "automatic_optimization", True):
            return False
        return any(config.interval == "step" for config in run.strategy.lr_scheduler_configs)

    def _after_update(self) -> None:
        """Schedulers that follow optimizer steps."""
        if self.has_step_schedulers and self.progress.stepped:
            self.progress.scheduler_steps += 1
            step_schedulers(self.run, "step", self.progress.scheduler_steps, self.lr_scheduler_step)

    def _validate(self) -> None:
        run = self.run
        began = time.perf_counter()
        state = rng.collect(run.strategy.accelerator, run.strategy.root_device)
        if not self._evaluate():  # cut short by a signal: it will run again, from the same random numbers
            rng.restore(state, run.strategy.accelerator, run.strategy.root_device)
        self.validations.start_clock()
        run.seconds["validation"] = run.seconds.get("validation", 0.0) + time.perf_counter() - began

    def _evaluate(self) -> bool:
        """Validate between two training batches; return False if a signal cut it short."""
        run = self.run
        run.state.stage = "validate"
        hook = run.current_hook
        try:
            _, cut = self.evaluation.evaluate("validate", run.sources.validation_data)
        finally:
            run.state.stage = run.results.stage = "train"
            run.current_hook = hook
        if run.world_size > 1:
            run.should_stop = run.strategy.reduce_boolean_decision(run.should_stop, all=False)
        return not cut

    def _end_epoch(self, *, complete: bool) -> None:
        run = self.run
        results = run.results
        if self.optimization is not None:
            self.optimization.check_losses()
        results.start_batch(None)
        results.finalize_epoch()
        call_epoch_end(run, "on_train_epoch_end", before_monitors=lambda: self._before_monitors(complete))
        if not complete:  # a run that continues from what was saved comes to the end again
            run.phases.end()
        run.log_epoch()
        results.reset()
        self.stop.stop_if_late()
        if run.world_size > 1:
            mine = [int(run.should_stop), int(self.progress.out_of_time), int(self.progress.settings_differ)]
            stops, late, differ = run.strategy.reduce(mine, "max")
            run.should_stop, self.progress.out_of_time = bool(stops), bool(late)
            if differ:  # on at least one rank: different settings would let the ranks diverge
                rank_consistency.check_settings(run)
        self.progress.settings_differ = False
        if complete:
            self.progress.next_epoch()

    def _before_monitors(self, complete: bool) -> None:
        self._epoch_schedulers(complete)
        if complete:  # what the strategy does at its end is in the checkpoints of this place
            self.run.phases.end()

    def _epoch_schedulers(self, complete: bool) -> None:
        self.progress.epoch_done = complete
        run = self.run
        automatic = self.optimization is not None and self.optimization.automatic
        if complete and automatic and "owns_schedulers" not in run.strategy.features:
            step_schedulers(run, "epoch", self.progress.epoch + 1, self.lr_scheduler_step)
