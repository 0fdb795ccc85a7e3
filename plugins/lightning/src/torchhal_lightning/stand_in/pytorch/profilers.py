"""Profilers of a run's steps and hooks: their durations, cProfile's tables, or torch's trace."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchhal_lightning.stand_in._missing import missing
from torchhal_lightning.stand_in.pytorch.utilities.rank_zero import rank_zero_only


class Profiler:
    """Base class: a subclass defines ``start``, ``stop`` and ``summary``.

    Args:
        dirpath: of the file.
        filename: of the report, without ``.txt``; None prints it.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._log_dir: str | None = None
        self._lightning_module: Any = None

    def start(self, action_name: str) -> None:
        """Begin an action."""

    def stop(self, action_name: str) -> None:
        """End an action."""

    def summary(self) -> str:
        """Return the report."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Profile what runs inside of the context."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def describe(self) -> None:
        """Write the report to its file, or print it on rank 0."""
        report = self.summary()
        if not report:
            return
        if self.filename is None:
            rank_zero_only(print)(report)
        else:
            with open(self._path("txt"), "a", encoding="utf-8") as file:
                file.write(report + "\n")

    def _path(self, extension: str, action: str = "") -> str:
        parts = [self._stage, self.filename, action.replace("/", "_")]
        if self._local_rank is not None:
            parts.append(str(self._local_rank))
        folder = os.fspath(self.dirpath or self._log_dir or os.getcwd())
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, "-".join(filter(None, parts)) + f".{extension}")

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin one call of the Trainer."""
        self._stage, self._local_rank, self._log_dir = stage, local_rank, log_dir

    def teardown(self, stage: str | None) -> None:
        """End it."""


class PassThroughProfiler(Profiler):
    """Profiles nothing."""


class SimpleProfiler(Profiler):
    """Sums the durations of each action.

    Args:
        dirpath: as of Profiler.
        filename: the same.
        extended: whether calls and shares of the time are reported.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ValueError(f"{action_name!r} has started already")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name not in self.current_actions:
            raise ValueError(f"{action_name!r} has not started")
        self.recorded_durations[action_name].append(time.perf_counter() - self.current_actions.pop(action_name))

    def summary(self) -> str:
        whole = time.perf_counter() - self.start_time
        header = ["Action", "Mean duration (s)", "Total time (s)"]
        if self.extended:
            header += ["Num calls", "Percentage %"]
        rows = [header]
        for action, durations in sorted(self.recorded_durations.items(), key=lambda item: -sum(item[1])):
            total = sum(durations)
            row = [action, f"{total / len(durations):.5}", f"{total:.5}"]
            if self.extended:
                row += [str(len(durations)), f"{100 * total / whole:.5}"]
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{(self._stage or '').upper()} Profiler Report".lstrip(), *lines])


class AdvancedProfiler(Profiler):
    """Runs cProfile over each action.

    Args:
        dirpath: as of Profiler.
        filename: the same.
        line_count_restriction: how many functions are reported of each: a number, or a share of all.
        dump_stats: whether cProfile's file of each action is written too.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        if self._running:  # cProfile profiles one thing at a time
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if not self._running or self._running[-1] != action_name:
            raise ValueError(f"{action_name!r} is not what runs")
        self.profiled_actions[self._running.pop()].disable()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        parts = [f"{(self._stage or '').upper()} Profiler Report".lstrip()]
        for action, profile in self.profiled_actions.items():
            if self.dump_stats:
                profile.dump_stats(self._path("prof", action))
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(self.line_count_restriction)
            parts.append(f"Profile stats for: {action}\n{text.getvalue()}")
        return "\n".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiled_actions": {}, "_running": []}


class PyTorchProfiler(Profiler):
    """Runs torch.profiler over a call of the Trainer, with a range for each action.

    Args:
        dirpath: as of Profiler.
        filename: the same.
        group_by_input_shapes: whether operations of different shapes are rows of their own.
        export_to_chrome: whether a trace is written.
        row_limit: rows of the table.
        sort_by_key: of ``key_averages().table``.
        table_kwargs: further arguments of it.
        profiler_kwargs: of ``torch.profiler.profile``.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self._by_shapes = group_by_input_shapes
        self._export = export_to_chrome
        self._table = {"row_limit": row_limit, "sort_by": sort_by_key or "self_cpu_time_total", **(table_kwargs or {})}
        self._kwargs = profiler_kwargs
        if group_by_input_shapes:
            self._kwargs.setdefault("record_shapes", True)
        self.profiler: Any = None
        self._ranges: dict[str, Any] = {}

    def start(self, action_name: str) -> None:
        if self.profiler is None:
            self.profiler = torch.profiler.profile(**self._kwargs)
            self.profiler.__enter__()
        if action_name not in self._ranges:
            self._ranges[action_name] = torch.profiler.record_function(action_name)
            self._ranges[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        if action_name in self._ranges:
            self._ranges.pop(action_name).__exit__(None, None, None)
            if "schedule" in self._kwargs and action_name.endswith("_step"):
                self.profiler.step()

    def summary(self) -> str:
        if self.profiler is None:
            return ""
        profiler, self.profiler = self.profiler, None
        profiler.__exit__(None, None, None)
        if self._export:
            profiler.export_chrome_trace(self._path("pt.trace.json"))
        averages = profiler.key_averages(group_by_input_shape=self._by_shapes)
        return f"{(self._stage or '').upper()} Profiler Report\n{averages.table(**self._table)}".lstrip()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiler": None, "_ranges": {}}


XLAProfiler = missing("XLAProfiler", "torch_xla's own profiler, torch_xla.debug.profiler, needs no Trainer.")
