"""Let a profiler measure the actions of a fit, by replacing their functions until it is over."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torchhal.trainer._run_part import RunPart
from torchhal.trainer._slow_loader import LoaderWait
from torchhal.trainer.profilers import PassThroughProfiler, Profiler
from torchhal.trainer.run_state import RunState

if TYPE_CHECKING:
    from torchhal.trainer.loops._fit_loop import FitLoop
    from torchhal.trainer.loops._optimization import Optimization

_STRATEGY = {
    "backward": "backward",
    "clip_gradients": "clipping",
    "optimizer_step": "optimizer",
    "save_checkpoint": "checkpoint",
}
_COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_boolean_decision",
    "sync_gradients",
)
_OPTIMIZATION = {"_zero_grad": "optimizer", "module_clip": "clipping", "module_step": "optimizer"}


@contextmanager
def profiled(run: RunState, loop: FitLoop) -> Iterator[None]:
    """Measure what runs inside with the run's profiler, if it has one, and print what it says on rank 0."""
    profiler = run.profiler
    if isinstance(profiler, PassThroughProfiler):
        yield
        return
    profiling = run.profiling = FitProfiling(run, profiler)
    try:
        with profiling.measuring(loop):
            yield
    except BaseException:
        with suppress(Exception):  # the fit's error is raised
            _print_summary(run, profiler)
        raise
    else:
        _print_summary(run, profiler)
    finally:
        run.profiling = None


def _print_summary(run: RunState, profiler: Profiler) -> None:
    if summary := profiler.summary():
        run.print(summary)


class FitProfiling(RunPart[RunState]):
    """A profiler at work in one fit of one process.

    Without one, nothing of this exists: the functions of a step are replaced by measured ones before the loop, so that
    a step decides nothing.

    Args:
        run: the fit's.
        profiler: is called around each action.
    """

    def __init__(self, run: RunState, profiler: Profiler) -> None:
        super().__init__(run)
        self.profiler = profiler
        self._replaced: list[tuple[Any, str, bool, Any]] = []
        self._wait: LoaderWait | None = LoaderWait()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_replaced": []}

    @contextmanager
    def measuring(self, loop: FitLoop) -> Iterator[None]:
        """Measure everything inside as ``"fit"``, and in it what strategy, hooks and loggers do."""
        run, profiler = self.run, self.profiler
        profiler.setup(run.trainer)
        try:
            for name, action in _STRATEGY.items():
                self._replace(run.strategy, name, action)
            for name in _COLLECTIVES if run.world_size > 1 else ():
                self._replace(run.strategy, name, "communication")
            self._replace(run.hooks, "call", "callbacks")
            self._replace(run, "log_step", "logging")
            self._replace(run, "log_epoch", "logging")
            self._replace(loop, "_validate", "validation")
            self._replace(loop, "_after_update", "optimizer")
            with profiler.profile("fit"):
                yield
        finally:
            while self._replaced:
                owner, name, was_own, value = self._replaced.pop()
                if was_own:
                    vars(owner)[name] = value
                else:
                    del vars(owner)[name]
            profiler.teardown()
            self._name_slow_loader()

    def _replace(self, owner: Any, name: str, action: str) -> None:
        """Put a measured function in the place of the attribute ``name``, until the end; nothing where it is None."""
        function = getattr(owner, name, None)
        if callable(function):
            self._replaced.append((owner, name, name in vars(owner), vars(owner).get(name)))
            vars(owner)[name] = self.timed(action, function)

    def timed(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, measured as ``action``."""
        start, stop = self.profiler.start, self.profiler.stop

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start(action)
            try:
                return function(*args, **kwargs)
            finally:
                stop(action)

        return call

    def time_optimization(self, optimization: Optimization) -> None:
        """Measure the parts of a training step; the shortest ways through it are left for those that are measured."""
        step = "step" if optimization.owns_step else "forward+backward" if optimization.owns_backward else "forward"
        self._replace(optimization, "run_step", step)
        for name, action in _OPTIMIZATION.items():
            self._replace(optimization, name, action)
        optimization.plain_backward = optimization.plain_step = False

    def time_batches(
        self,
        batches: Iterator[Any],
        transfer: Callable[[Any, int], Any] | None,
        start: Callable[[Any, int], bool] | None,
        end: Callable[[Any, Any, int], None] | None,
    ) -> tuple[
        Iterator[Any],
        Callable[[Any, int], Any] | None,
        Callable[[Any, int], bool] | None,
        Callable[[Any, Any, int], None],
    ]:
        """Return the functions around a training step, measured; the last one counts the batch."""
        hooks = None if end is None else self.timed("callbacks", end)
        count = self.profiler.step

        def end_batch(output: Any, batch: Any, index: int) -> None:
            if hooks is not None:
                hooks(output, batch, index)
            count()

        return (
            self._measured(batches),
            None if transfer is None else self.timed("transfer", transfer),
            None if start is None else self.timed("callbacks", start),
            end_batch,
        )

    def _measured(self, batches: Iterator[Any]) -> Iterator[Any]:
        start, stop = self.profiler.start, self.profiler.stop
        previous: float | None = None
        while True:
            start("loader")
            began = time.perf_counter()
            try:
                held = [next(batches)]
            except StopIteration:
                return
            finally:
                now = time.perf_counter()
                stop("loader")
            if self._wait is not None:
                total = now - (began if previous is None else previous)
                if self._wait.add(now - began, total, first=previous is None):
                    self._name_slow_loader()
            previous = now
            yield held.pop()  # not kept here: it would stay in memory beside its copy on the device

    def _name_slow_loader(self) -> None:
        wait, self._wait = self._wait, None
        run = self.run
        data = run.progress.data
        if wait is not None and data is not None:
            local = max(1, run.world_size // max(1, run.strategy.num_nodes))
            if sentence := wait.describe(data.loader, run.strategy.root_device, local):
                run.warn_once(sentence)
