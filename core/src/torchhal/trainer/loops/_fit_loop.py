"""Epochs and batches: the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchhal import rng
from torchhal.distributed.signals import at_once
from torchhal.errors import ConfigurationError, ModelError
from torchhal.pytree import map_tensors
from torchhal.trainer import _rank_consistency as rank_consistency
from torchhal.trainer._part import TrainerPart
from torchhal.trainer.data import _elastic_resume as elastic_resume
from torchhal.trainer.data._loaders import (
    TrainingData,
    batch_transfer,
    close_iterator,
    exhaust_sampler,
    load_validation_data,
    no_batch,
)
from torchhal.trainer.logging._log_options import batch_size_of
from torchhal.trainer.loops._hook_calls import module_hook
from torchhal.trainer.loops._hook_names import near_miss
from torchhal.trainer.loops._optimization import Optimization, step_schedulers

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer

# Reasons for a stop that ranks agree on as they do on a signal; no signal has a negative number.
STOP_ASKED = -1
OUT_OF_TIME = -2


class StopOnSignal(Exception):
    """All ranks stop here, at the same step boundary, on this signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class DataPositionChanged(Exception):
    """A strategy has taken over the counters of others, who are elsewhere in the data: the loop goes on from there.

    Raised by the callable of ``Strategy.step_function("training_step")`` before it does anything with its batch, which
    is left out.
    """


class FitLoop(TrainerPart):
    """Counters of a fit, and the loop that moves them.

    ``epoch`` counts finished epochs, ``batches_done`` the batches used of the running one, ``global_step`` the
    optimizer steps, ``total_batches`` the batches of all epochs. They describe the state between two batches, so a
    checkpoint taken at any hook after a batch continues with the next one.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.epoch = 0
        self.batches_done = 0
        self.batch_idx = 0
        self.global_step = 0
        self.total_batches = 0
        self.scheduler_steps = 0
        self.validated_at = -1
        self.accumulate = self.asked_accumulate = trainer.accumulate_grad_batches
        self.batch_size = self.step_size = 1
        """Samples of a batch of one replica, and those that an optimizer step takes over all replicas, or would, if the
        replicas of now divided them; each batch counts as one where the loader doesn't say."""
        self.before: Mapping[str, Any] = {}
        """The counters of the life that this one goes on from."""
        self.epoch_done = False
        self.stepped = False
        self.restored_gradients = False
        self.step_schedulers = False
        self.lr_scheduler_step: Callable[..., Any] | None = None
        self.deadline: float | None = None
        self.out_of_time = False
        """Whether ``max_time`` has ended the latest fit."""
        self.elapsed_before = 0.0
        self.started = 0.0
        self.data: TrainingData | None = None
        self.optimization: Optimization | None = None
        self.settings_changed = False
        """Whether a hook has set an argument of the Trainer that the loop has not looked at yet."""
        self.settings_differ = False
        """Whether it has set one that the ranks have not compared yet."""
        self._got_batch = False
        self._wish: int | None = None
        self._resume_position: dict[str, Any] | None = None
        self._resume_rng: dict[str, Any] | None = None

    @property
    def max_epochs(self) -> int | None:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.trainer.max_epochs = value

    def count_step(self, updated: int = True) -> None:
        """An optimizer step has been taken; ``updated`` is False when the precision skipped it, 2 or more when the
        model has got so many steps further."""
        self.global_step += max(1, int(updated))
        self.stepped = bool(updated)

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters: the same on every rank."""
        return {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "global_step": self.global_step,
            "total_batches": self.total_batches,
            "scheduler_steps": self.scheduler_steps,
            "validated_at": self.validated_at,
            "epoch_done": self.epoch_done,
            "elapsed": self.elapsed(),
            "accumulate": self.accumulate,
            "asked_accumulate": self.asked_accumulate,
            "batch_size": self.batch_size,
            "step_size": self.step_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("epoch", "batches_done", "global_step", "total_batches", "scheduler_steps", "validated_at"):
            setattr(self, name, state[name])
        self.epoch_done = state["epoch_done"]
        self.elapsed_before = state["elapsed"]
        if self.epoch_done:
            self._next_epoch()

    def begin(self) -> None:
        """A new fit: forget the data and what an earlier one, which may have failed, was about to resume."""
        self.data = None
        self._resume_position = self._resume_rng = None
        self.restored_gradients = False

    def go_on(self) -> None:
        """A fit without a checkpoint: from where this Trainer is, at the beginning of an epoch."""
        if self.epoch_done:
            self._next_epoch()
        self.batches_done = 0

    def resume(self, position: dict[str, Any] | None, generators: dict[str, Any] | None) -> None:
        """Continue from this rank's data position and generator states at the next :meth:`run`."""
        self._resume_position = position
        self._resume_rng = generators

    def elapsed(self) -> float:
        """Seconds of training, earlier runs of a resumed one included."""
        return self.elapsed_before + (time.monotonic() - self.started if self.started else 0.0)

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until a limit is reached or somebody asks to stop."""
        try:
            self._run()
        finally:  # also where there was nothing to do, or the clock would run on after the fit
            self.elapsed_before, self.started = self.elapsed(), 0.0

    def _run(self) -> None:
        trainer = self.trainer
        assert self.data is not None
        self.started = time.monotonic()
        self.out_of_time = False
        self._set_deadline()
        if trainer.max_time is not None:
            late = int(self.elapsed_before >= trainer.max_time.total_seconds())
            if trainer.world_size > 1:  # the clock of any: after a fit each has its own
                late = int(trainer.strategy.reduce(late, "max"))
            if late:
                trainer.should_stop = self.out_of_time = True
        self._wish = None
        if self.data.length == 0:
            return
        if self._done():
            if self.epoch or self.total_batches:  # not what was asked for, as with max_epochs=0
                trainer.warn_once(
                    f"fit has nothing to do: {self.why_done()}. To go on, raise trainer.fit_loop.max_epochs or "
                    "max_steps; another model wants a Trainer of its own"
                )
            return
        with at_once():
            self.optimization = Optimization(trainer)
            trainer.hooks.call("on_train_start")
            trainer.frozen_parameters.begin()
        if not self.batches_done:
            self._restore_rng()
        while not self._done():
            try:
                self._run_epoch()
            except DataPositionChanged:
                self._reposition()
        trainer.hooks.call("on_train_end")
        signum = trainer.strategy.watch.agree_on_stop_at_end(trainer.strategy.timeout)
        if signum is not None and signum > 0:
            raise StopOnSignal(signum)

    def _restore_rng(self) -> None:
        generators, self._resume_rng = self._resume_rng, None
        if generators is not None:
            rng.restore(generators, self.trainer.strategy.accelerator, self.trainer.strategy.root_device)

    def _steps_reached(self) -> bool:
        return self.trainer.max_steps != -1 and self.global_step >= self.trainer.max_steps

    def _done(self) -> bool:
        """Whether training is over; the same on every rank."""
        trainer = self.trainer
        if self._steps_reached():
            return True
        if trainer.max_epochs is not None and trainer.max_epochs != -1 and self.epoch >= trainer.max_epochs:
            return True
        return trainer.should_stop and self._minimum_reached()

    def why_done(self) -> str:
        """What has ended the latest fit, or leaves nothing to do for the next one."""
        trainer = self.trainer
        if self.data is not None and self.data.length == 0:
            return "its limit allows no training batch"
        if self._steps_reached():
            return f"max_steps={trainer.max_steps} is reached at optimizer step {self.global_step}"
        if self.out_of_time:
            return f"max_time is used up ({trainer.max_time})"
        if trainer.should_stop:
            reasons = [callback.stop_reason for callback in trainer.early_stopping_callbacks if callback.stop_reason]
            return f"EarlyStopping: {reasons[0]}" if reasons else "trainer.should_stop is set"
        return f"max_epochs={trainer.max_epochs} is reached after {self.epoch} epoch(s)"

    def _set_deadline(self) -> None:
        limit = self.trainer.max_time
        self.deadline = None if limit is None else self.started + limit.total_seconds() - self.elapsed_before

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _stop_if_late(self) -> None:
        if not self.trainer.should_stop and self._late():
            self.trainer.should_stop = self.out_of_time = True

    def _minimum_reached(self) -> bool:
        trainer = self.trainer
        return self.epoch >= (trainer.min_epochs or 0) and self.global_step >= (trainer.min_steps or 0)

    def _reposition(self) -> None:
        """Go on where the counters are now, in this process's own order of the data and with its random numbers."""
        assert self.data is not None
        trainer = self.trainer
        trainer.results.start_batch(None)
        if self.batches_done:
            if self.data.length is not None:  # others may have more batches in an epoch
                self.batches_done = min(self.batches_done, self.data.length)
            self.resume(self.data.position(), rng.collect(trainer.strategy.accelerator, trainer.strategy.root_device))

    def _batches(self) -> Iterator[Any]:
        """The epoch's batches that are left."""
        assert self.data is not None
        position, self._resume_position = self._resume_position, None
        if not self.batches_done:
            begins_anew = self._reloads_data() and self.trainer.attachments.train is None  # by train_dataloader
            if position is not None and not begins_anew:
                self.data.restore_generators(position["generators"])
            return self.data.epoch(self.epoch)
        position = position or self.data.position()
        return self.data.resume(self.epoch, self.batches_done, position, self._restore_rng)

    def _reloads_data(self) -> bool:
        """Whether this epoch begins by asking for its loaders again."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        return bool(every) and self.epoch % every == 0

    def _run_epoch(self) -> None:
        trainer = self.trainer
        data = self.data
        assert data is not None
        if self._reloads_data() and not data.is_new:
            data = trainer.reload_train_loader()
            trainer.attachments.validation_data = load_validation_data(trainer)
        resuming = self.batches_done > 0
        if not resuming:
            data.reset_epoch()
        trainer.results.stage = "train"
        trainer.hooks.call("on_train_epoch_start")
        trainer.strategy.begin_epoch()
        length = data.length
        if resuming and self._validation_due(length):
            # the run that wrote the checkpoint stopped between the batch and its validation
            self._restore_rng()
            self._validate()
            self._resume_rng = rng.collect(trainer.strategy.accelerator, trainer.strategy.root_device)
        batches = self._batches()
        self._got_batch = False
        stopped = False
        try:
            if length is None or self.batches_done < length:
                stopped = self._run_batches(batches, length)
            else:
                exhaust_sampler(batches)
        finally:
            close_iterator(batches)
        if not self.batches_done and not self._got_batch:  # an exhausted generator would "train" all epochs left
            raise no_batch(f"the training loader (in epoch {self.epoch})", data.loader)
        self._end_epoch(complete=not stopped)

    def _run_batches(self, batches: Iterator[Any], length: int | None) -> bool:
        """The hot loop. True if it stopped before the epoch's end."""
        trainer = self.trainer
        optimization, data = self.optimization, self.data
        assert optimization is not None and data is not None
        start_batch, hooks, watch = trainer.results.start_batch, trainer.hooks, trainer.strategy.watch
        # everything below that can be known before the first batch is looked up here and nowhere else
        step = optimization.step
        transfer = batch_transfer(trainer, trainer.module)
        batch_start = hooks.has("on_train_batch_start")
        batch_end = hooks.has("on_train_batch_end")
        log_loss = not callable(getattr(trainer.module, "log", None))  # a plain module has no way to
        schedulers = self.step_schedulers = self._has_step_schedulers()
        self.lr_scheduler_step = module_hook(trainer.module, "lr_scheduler_step")
        accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
        whole = length is not None and length == data.loader_length
        alone = trainer.world_size == 1
        trainer.current_hook = "training_step"
        source = batches if data.loader_length is not None or alone else self._together(batches)

        while True:
            try:  # a for loop would call iter() again, and a loader that is its own iterator would begin anew
                batch = next(source)
            except StopIteration:
                break
            # nobody looks ahead for the last one of a loader without a length: that would draw random numbers early
            last = length is not None and self.batches_done + 1 >= length
            index = self.batch_idx = self.batches_done
            if transfer is not None:
                batch = transfer(batch, 0)
            start_batch(batch)
            if batch_start and self._batch_start(batch, index):
                self._finish_accumulation()
                return False
            if self.settings_changed:
                accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
            if accumulate == 1:
                first = update = True
            else:
                first = index % accumulate == 0
                update = last or (index + 1) % accumulate == 0
            self.stepped = False
            before = self.global_step
            output = step(batch, index, first, update)
            self.batches_done = index + 1
            self.total_batches += 1
            if schedulers and update and self.stepped:
                self._after_update()
            if log_loss:
                self._log_loss(output, batch)
            if log_every and self.global_step // log_every != before // log_every:
                trainer.log_step()
            if batch_end:
                hooks.call("on_train_batch_end", without_graph(output), batch, index)
            del output  # or the next step would run beside all that this one returned
            if validate_every and (
                last if validate_every == -1 else (self.total_batches if crossing else index + 1) % validate_every == 0
            ):
                self._validate()
                trainer.current_hook = "training_step"
            if self.settings_changed:
                accumulate, max_steps, log_every, validate_every, crossing, deadline = self._settings(length)
            # counted after the validation: a signal that cuts it short finds every rank still before this boundary
            watch.steps_done += 1
            if max_steps != -1 and self.global_step >= max_steps:
                if last and whole:
                    exhaust_sampler(batches)
                return not last
            late = deadline is not None and time.monotonic() > deadline
            if (watch.stop_requested or trainer.should_stop or late) and self._stop_at_boundary(alone):
                return not last
            if last:
                if whole:  # else it was a limit, and what is left of the sampler stays undrawn
                    exhaust_sampler(batches)
                return False
        # the end of a loader that didn't say it was near
        self._finish_accumulation()
        if validate_every and isinstance(trainer.val_check_interval, float) and self.validated_at != self.total_batches:
            self._validate()
        return False

    def _settings(self, length: int | None) -> tuple[int, int, int, int, bool, float | None]:
        """What each batch of an epoch goes by; asked again when a hook has set some of it."""
        trainer, optimization = self.trainer, self.optimization
        assert optimization is not None
        self.settings_changed = False
        self._set_deadline()
        if self.accumulate != trainer.accumulate_grad_batches:
            if optimization.has_gradients:
                self.settings_changed = True  # until the accumulation that has begun is at its end
            else:
                elastic_resume.change_accumulation(trainer)
                optimization.accumulate_over(self.accumulate)
        # rank 0 may have loggers that others have not, so they don't decide whether ranks meet
        log_every = trainer.log_every_n_steps if trainer.loggers or trainer.results.leader else 0
        validate_every, crossing = trainer.validation_interval(length), trainer.check_val_every_n_epoch is None
        return optimization.accumulate, trainer.max_steps, log_every, validate_every, crossing, self.deadline

    def _log_loss(self, output: Any, batch: Any) -> None:
        """What ``self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)`` does in a ``torchhal.Module``."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor) or not loss.numel():
            return  # skipped, or no affair of this rank's
        if loss.numel() > 1:  # of a strategy that owns the step
            loss = loss.detach().mean()
        size = batch_size_of(batch)
        self.trainer.results.log(
            "loss", loss, "training_step", True, None, True, True, batch_size=1 if size is None else size
        )

    def _finish_accumulation(self) -> None:
        """Step with what has accumulated when the epoch ends sooner than expected."""
        assert self.optimization is not None
        if self.optimization.finish():
            self._after_update()

    def _has_step_schedulers(self) -> bool:
        trainer = self.trainer
        if "owns_schedulers" in trainer.strategy.features or not getattr(
            trainer.module, "automatic_optimization", True
        ):
            return False
        return any(config.interval == "step" for config in trainer.lr_scheduler_configs)

    def _after_update(self) -> None:
        """Schedulers that follow optimizer steps."""
        if self.step_schedulers and self.stepped:
            self.scheduler_steps += 1
            step_schedulers(self.trainer, "step", self.scheduler_steps, self.lr_scheduler_step)

    def _validate(self) -> None:
        trainer = self.trainer
        state = rng.collect(trainer.strategy.accelerator, trainer.strategy.root_device)
        if not trainer.validate_in_fit():  # cut short by a signal: it will run again, from the same random numbers
            rng.restore(state, trainer.strategy.accelerator, trainer.strategy.root_device)

    def _batch_start(self, batch: Any, index: int) -> bool:
        """The hooks before a batch; True when one of them ends the epoch."""
        trainer = self.trainer
        self._got_batch = True
        trainer.current_hook = "on_train_batch_start"
        before, after = trainer.hooks.around_module("on_train_batch_start")
        for function in before:
            function(trainer, trainer.module, batch, index)
        own = trainer.hooks.of_module("on_train_batch_start")
        response = own(batch, index) if own is not None else None
        for function in after:
            function(trainer, trainer.module, batch, index)
        trainer.current_hook = "training_step"
        return isinstance(response, int) and response == -1

    def _stop_at_boundary(self, alone: bool) -> bool:
        """Somebody wants to stop: True when every rank does so here; raises Interrupted for a signal."""
        trainer = self.trainer
        watch = trainer.strategy.watch
        if alone:
            if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
                raise StopOnSignal(signum)
            self._stop_if_late()
            return trainer.should_stop and self._minimum_reached()
        # one rank's clock or callback may be alone in this: agree as on a signal, without a collective per step
        wish = STOP_ASKED if trainer.should_stop else OUT_OF_TIME if self._late() else None
        if wish is not None and wish != self._wish and self._minimum_reached():
            self._wish = wish  # once: a signal that comes later must not be forgotten over it
            watch.request_stop(wish)
        if watch.stop_requested and (signum := watch.agree_on_stop_step()) is not None:
            if signum > 0:
                raise StopOnSignal(signum)
            trainer.should_stop = True
            self.out_of_time = signum == OUT_OF_TIME
            return self._minimum_reached()
        return False

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A loader without a length over several ranks: all end together, with the first that runs out."""
        decide = self.trainer.strategy.reduce_boolean_decision
        nothing = object()
        while True:
            batch = next(batches, nothing)
            if not decide(batch is not nothing):
                return
            yield batch

    def _validation_due(self, length: int | None) -> bool:
        every = self.trainer.validation_interval(length)
        if every <= 0 or self.validated_at == self.total_batches:
            return False
        count = self.total_batches if self.trainer.check_val_every_n_epoch is None else self.batches_done
        return count % every == 0

    def _end_epoch(self, *, complete: bool) -> None:
        trainer = self.trainer
        results = trainer.results
        if self.optimization is not None:
            self.optimization.check_losses()
        results.start_batch(None)
        results.finalize_epoch()
        trainer.call_epoch_end("on_train_epoch_end", before_monitors=lambda: self._epoch_schedulers(complete))
        trainer.log_epoch()
        results.reset()
        self._stop_if_late()
        if trainer.world_size > 1:
            mine = [int(trainer.should_stop), int(self.out_of_time), int(self.settings_differ)]
            stops, late, differ = trainer.strategy.reduce(mine, "max")
            trainer.should_stop, self.out_of_time = bool(stops), bool(late)
            if differ:  # on some rank at least: one that steps by other numbers than the rest would part from it
                rank_consistency.check_settings(trainer)
        self.settings_differ = False
        if complete:
            self._next_epoch()

    def _epoch_schedulers(self, complete: bool) -> None:
        self.epoch_done = complete
        trainer = self.trainer
        automatic = self.optimization is not None and self.optimization.automatic
        if complete and automatic and "owns_schedulers" not in trainer.strategy.features:
            step_schedulers(trainer, "epoch", self.epoch + 1, self.lr_scheduler_step)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.batches_done = 0
        self.epoch_done = False


def without_graph(output: Any) -> Any:
    """What ``training_step`` returned, as hooks see it: a callback that keeps it keeps no graph."""
    if type(output) is torch.Tensor:
        return output.detach()
    return map_tensors(
        output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
    )


def check_can_fit(trainer: Trainer, module: Any) -> None:
    """Refuse what can't train, before a process starts."""
    name = type(module).__name__
    for method, what in (
        ("training_step", "takes (batch, batch_idx) and returns the loss"),
        ("configure_optimizers", "returns the optimizer"),
    ):
        if not callable(getattr(module, method, None)):
            other = near_miss(module, method)
            said = f" (its {other} is no hook, and never called)" if other else ""
            raise ModelError(f"{name} can't be fitted: it has no {method}{said}. Define one that {what}")
    if trainer.max_epochs == -1 and trainer.max_steps == -1 and trainer.max_time is None:
        trainer.warn_once("max_epochs=-1 and no max_steps or max_time: training runs until somebody stops it")
    if trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        raise ConfigurationError("'max_epochs', 'max_steps' or 'max_time' must be given")
