"""Loops under the names by which Lightning's callbacks, and models, look into them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchhal.trainer.adapters import RunState, implements


class Counts:
    """One number under the four words by which Lightning counts an event; setting one sets torchhal's counter.

    Args:
        owner: has the counter.
        name: of it.
    """

    _owner: Any
    _name: str

    def __init__(self, owner: Any, name: str) -> None:
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> int:
        if name not in ("ready", "started", "processed", "completed"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        number: int = getattr(self._owner, self._name)
        return number

    def __setattr__(self, name: str, value: int) -> None:
        getattr(self, name)
        setattr(self._owner, self._name, value)


def progress_of(owner: Any, current: str, total: str | None = None, **more: Any) -> SimpleNamespace:
    """Return the counters of an event as Lightning's progress of it: ``current``, of this epoch or run, and ``total``.

    Args:
        owner: has the counters.
        current: the name of one.
        total: the name of the other; by default the same.
        **more: other attributes.
    """
    return SimpleNamespace(current=Counts(owner, current), total=Counts(owner, total or current), **more)


class FitLoopView:
    """``trainer.fit_loop``; what isn't named here is torchhal's loop's own."""

    _run: RunState

    def __init__(self, run: RunState) -> None:
        object.__setattr__(self, "_run", run)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._run.trainer.fit_loop, name)

    @property
    def max_epochs(self) -> int | None:
        return self._run.max_epochs

    @property
    def min_epochs(self) -> int | None:
        return self._run.min_epochs

    @property
    def max_steps(self) -> int:
        return self._run.max_steps

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("max_epochs", "min_epochs", "max_steps", "min_steps"):
            setattr(self._run.trainer, name, value)
        else:
            object.__setattr__(self, name, value)

    @property
    def max_batches(self) -> int | float:
        batches: int | float = self._run.trainer.num_training_batches
        return batches

    @property
    def total_batch_idx(self) -> int:
        return self._run.progress.total_batches - 1

    @property
    def batch_idx(self) -> int:
        return self._run.progress.batch_idx

    @property
    def done(self) -> bool:
        """Whether a limit is reached, or a stop was asked for."""
        is_done: bool = self._run.trainer.fit_loop.stop.is_done()
        return is_done

    @property
    def epoch_progress(self) -> SimpleNamespace:
        return progress_of(self._run.progress, "epoch")

    @property
    def epoch_loop(self) -> EpochLoopView:
        return EpochLoopView(self._run)

    def _should_accumulate(self) -> bool:
        """Return whether the last batch belongs to an optimizer step that more will follow for."""
        progress = self._run.progress
        return progress.batches_done % progress.accumulate != 0 and not self._run.trainer.is_last_batch


class EpochLoopView:
    """``trainer.fit_loop.epoch_loop``."""

    _run: RunState

    def __init__(self, run: RunState) -> None:
        object.__setattr__(self, "_run", run)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("min_steps", "max_steps"):
            setattr(self._run.trainer, name, value)
        else:
            object.__setattr__(self, name, value)

    @property
    def min_steps(self) -> int | None:
        return self._run.min_steps

    @property
    def max_steps(self) -> int:
        return self._run.max_steps

    @property
    def total_batch_idx(self) -> int:
        return self._run.progress.total_batches - 1

    @property
    def global_step(self) -> int:
        return self._run.global_step

    @property
    def batch_progress(self) -> SimpleNamespace:
        run = self._run
        return progress_of(run.progress, "batches_done", "total_batches", is_last_batch=run.trainer.is_last_batch)

    @property
    def scheduler_progress(self) -> SimpleNamespace:
        return progress_of(self._run.progress, "scheduler_steps")

    @property
    def automatic_optimization(self) -> SimpleNamespace:
        steps = progress_of(self._run.progress, "global_step")
        optimizer = SimpleNamespace(step=steps, zero_grad=steps)
        return SimpleNamespace(
            optim_progress=SimpleNamespace(optimizer=optimizer, optimizer_steps=self._run.global_step)
        )

    @property
    def manual_optimization(self) -> SimpleNamespace:
        return SimpleNamespace(optim_step_progress=progress_of(self._run.progress, "global_step"))

    @property
    def val_loop(self) -> SimpleNamespace:
        defined = SimpleNamespace(is_defined=lambda: self.validates)
        return SimpleNamespace(_data_source=defined, _has_run=self._run.progress.validated_at >= 0)

    @property
    def validates(self) -> bool:
        """Whether there are validation data."""
        run = self._run
        given = run.sources.validate
        return given is not None or any(implements(each, "val_dataloader") for each in (run.datamodule, run.module))

    @property
    def batch_idx(self) -> int:
        return self._run.progress.batch_idx

    @property
    def _batches_that_stepped(self) -> int:
        return batches_that_stepped(self._run)

    def _should_check_val_epoch(self) -> bool:
        every = self._run.check_val_every_n_epoch
        return self.validates and (every is None or (self._run.current_epoch + 1) % every == 0)


class EvaluationLoopView:
    """``trainer.validate_loop`` and ``trainer.test_loop``.

    Args:
        run: that evaluates.
        fn: "validate", "test" or "predict".
    """

    def __init__(self, run: RunState, fn: str) -> None:
        self._run = run
        self._fn = fn

    @property
    def batches_done(self) -> int:
        """The batches of the last call of this kind, where nothing else was called since."""
        run = self._run
        return run.trainer.evaluation_loop.batch_idx + 1 if run.state.fn == self._fn else 0

    @property
    def batch_progress(self) -> SimpleNamespace:
        return progress_of(self, "batches_done")


def batches_that_stepped(run: RunState) -> int:
    """Return the batches after which optimizers have stepped, by which Lightning counts what it logs."""
    steps: int = run.global_step
    return steps if getattr(run.module, "automatic_optimization", True) else run.progress.total_batches
