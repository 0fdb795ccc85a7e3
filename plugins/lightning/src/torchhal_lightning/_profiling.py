"""Time the steps and hooks of a run by one of Lightning's profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import proxy

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import RunState, implements
from torchhal_lightning import _trees as trees

_WORDS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
    "xla": "XLAProfiler",
}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def make_profiler(value: Any, root: str | None) -> Any:
    """Return the profiler of an argument: an object, or one of Lightning's words; one that does nothing for None.

    Raises:
        ConfigurationError: another word.
    """
    if value is None:
        return trees.first(root).profilers.PassThroughProfiler()
    if not isinstance(value, str):
        return value
    if value.lower() not in _WORDS:
        raise ConfigurationError(
            f"When passing string value for the `profiler` parameter of `Trainer`, it can only be one of "
            f"{sorted(_WORDS)} (got {value!r})"
        )
    return getattr(trees.first(root).profilers, _WORDS[value.lower()])()


class Profiling:
    """A profiler in one run: actions have the names that they have under Lightning.

    Args:
        run: whose steps and hooks are timed.
        profiler: with ``start``, ``stop``, ``profile``, ``setup``, ``describe`` and ``teardown``.
    """

    def __init__(self, run: RunState, profiler: Any) -> None:
        self._run = run
        self._profiler = profiler
        self._timed_steps: list[str] = []

    def begin(self, log_dir: str | None) -> None:
        """Set the profiler up for this call of the Trainer.

        Args:
            log_dir: where it writes, unless it has a place of its own.
        """
        run, profiler = self._run, self._profiler
        profiler._lightning_module = proxy(run.module)
        rank = run.trainer.local_rank if run.world_size > 1 else None
        profiler.setup(stage=run.state.fn, local_rank=rank, log_dir=log_dir)
        for name in _STEPS:
            if implements(run.module, name) and name not in vars(run.module):
                action = f"[Strategy]{type(run.strategy).__name__}.{name}"
                vars(run.module)[name] = self.timed(getattr(run.module, name), action)
                self._timed_steps.append(name)

    def end(self) -> None:
        """Let it report, and close its files."""
        while self._timed_steps:
            vars(self._run.module).pop(self._timed_steps.pop(), None)
        self._profiler.describe()
        self._profiler.teardown(stage=self._run.state.fn)

    def timed(self, hook: Callable[..., Any], action: str) -> Callable[..., Any]:
        """Return ``hook``, timed as ``action``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._profiler.profile(action):
                return hook(*args, **kwargs)

        call.__wrapped__ = hook  # type: ignore[attr-defined]
        return call


class LoopTimes(torchhal.Callback):
    """Times epochs and batches, as ``run_training_epoch`` and ``run_training_batch``.

    Args:
        profiler: of Lightning's.
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        self._open: list[str] = []

    def _start(self, action: str) -> None:
        self._open.append(action)
        self._profiler.start(action)

    def _stop(self) -> None:
        if self._open:
            self._profiler.stop(self._open.pop())

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._start("run_training_epoch")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._start("run_training_batch")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._stop()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        while self._open:
            self._stop()
