"""Measure the actions of a fit by the clock of the host, with SimpleProfiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torchhal._arguments import check_bool
from torchhal._text_table import format_table
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.profilers.base import ActionTime, Profiler


class SimpleProfiler(Profiler):
    """Profiler that adds up the seconds of each action, and shows them as a table.

    An action's time is its own, without that of the actions inside it, so the rows add up to the time of the fit.

    Args:
        synchronize: wait for the device before each reading of the clock. Without it, work that an accelerator runs
            asynchronously counts for the action that happens to wait for it; with it, host and device no longer
            overlap, so that a step takes longer than unprofiled. The CPU is never waited for.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, *, synchronize: bool = True) -> None:
        self.synchronize = check_bool("synchronize", synchronize)
        self._begin()

    def _begin(self) -> None:
        self._wait: Callable[[], None] | None = None
        self._running: list[tuple[str, float]] = []
        self._inner = [0.0]
        """For each running action, and for none, the seconds of what has ended inside it."""
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self.steps = 0
        """Training batches measured."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wait": None, "_running": [], "_inner": [0.0]}  # they belong to this process

    def setup(self, trainer: Any) -> None:
        self._begin()
        accelerator, device = trainer.strategy.accelerator, trainer.strategy.root_device
        if self.synchronize and device.type != "cpu":
            self._wait = lambda: accelerator.synchronize(device)

    def start(self, action: str) -> None:
        if self._wait is not None:
            self._wait()
        self._inner.append(0.0)
        self._running.append((action, time.perf_counter()))

    def stop(self, action: str) -> None:
        if self._wait is not None:
            self._wait()
        now = time.perf_counter()
        running = [name for name, _ in self._running]
        if action not in running:
            said = ", ".join(map(repr, running)) or "none"
            raise ValueError(f"'action' must be one that was started (got {action!r}; running: {said})")
        while self._running[-1][0] != action:  # an error has passed by its stop
            self.stop(self._running[-1][0])
        _, began = self._running.pop()
        took = now - began
        self._seconds[action] = self._seconds.get(action, 0.0) + took - self._inner.pop()
        self._calls[action] = self._calls.get(action, 0) + 1
        self._inner[-1] += took

    def step(self) -> None:
        self.steps += 1

    def times(self) -> Mapping[str, ActionTime]:
        return {action: ActionTime(seconds, self._calls[action]) for action, seconds in self._seconds.items()}

    def summary(self) -> str:
        """Return a table of the actions, the longest first: calls, seconds, milliseconds a step, share."""
        times = self.times()
        if not times:
            return ""
        total = sum(each.seconds for each in times.values())
        rows: list[tuple[str, ...]] = [("action", "calls", "seconds", "ms a step", "share")]
        for action, each in sorted(times.items(), key=lambda item: -item[1].seconds):
            name, calls = ("the loop itself", "") if action == "fit" else (action, str(each.calls))
            per_step = f"{1e3 * each.seconds / self.steps:.3f}" if self.steps else ""
            rows.append((name, calls, f"{each.seconds:.3f}", per_step, f"{100 * each.seconds / (total or 1):.1f} %"))
        lines = format_table(rows, align="<>>>>")
        lines.insert(1, "-" * max(map(len, lines)))
        head = f"profile of {self.steps} step(s) in {total:.3f} s"
        if self.steps:
            head += f", {1e3 * total / self.steps:.3f} ms a step"
        return "\n".join([head, *lines])
