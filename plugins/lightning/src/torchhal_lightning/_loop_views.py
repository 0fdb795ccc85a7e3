"""Loops under the names by which Lightning's callbacks, and models, look into them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchhal.trainer.adapters import Run, implements


class FitLoopView:
    """``trainer.fit_loop``; what isn't named here is torchhal's loop's own."""

    _run: Run

    def __init__(self, run: Run) -> None:
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
    def epoch_loop(self) -> EpochLoopView:
        return EpochLoopView(self._run)


class EpochLoopView:
    """``trainer.fit_loop.epoch_loop``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        ready = SimpleNamespace(ready=run.progress.batches_done, completed=run.progress.batches_done)
        self.batch_progress = SimpleNamespace(current=ready, total=ready, is_last_batch=run.trainer.is_last_batch)
        defined = SimpleNamespace(is_defined=lambda: self.validates)
        self.val_loop = SimpleNamespace(_data_source=defined, _has_run=run.progress.validated_at >= 0)

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


def batches_that_stepped(run: Run) -> int:
    """Return the batches after which optimizers have stepped, by which Lightning counts what it logs."""
    steps: int = run.global_step
    return steps if getattr(run.module, "automatic_optimization", True) else run.progress.total_batches
