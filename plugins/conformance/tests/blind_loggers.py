"""Loggers of one defect each, written from the contract by somebody who had read no check."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
import zoo

from torchhal.trainer.loggers import FolderLogger, NullExperiment, as_dict, is_rank_zero


class JsonLines(FolderLogger):
    """A sound logger: appends a line of JSON per row to a file of its run, in blocks."""

    block = 50

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = "json_lines",
        version: int | str | None = None,
        *,
        on_error: str = "warn",
    ) -> None:
        super().__init__(save_dir, name, version, on_error=on_error)
        self._lines: list[str] = []

    @property
    def file(self) -> str:
        return os.path.join(self.log_dir, "rows.jsonl")

    @property
    def experiment(self) -> Any:
        return self if is_rank_zero() else NullExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._add({"step": step, "metrics": {name: float(value) for name, value in metrics.items()}})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._add({"params": as_dict(params)})

    def save(self) -> None:
        if not self._lines:
            return
        path = self.file
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in self._lines))
        self._lines.clear()

    def _add(self, row: dict[str, Any]) -> None:
        self._lines.append(json.dumps(row, default=repr))
        if len(self._lines) >= self.block:
            self.save()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lines": []}  # what is buffered is written once, by the original


def read_rows(logger: JsonLines) -> list[dict[str, Any]]:
    """Return the rows in the file of the logger's run."""
    try:
        with open(logger.file, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def caught_by(*ids: str) -> Any:
    return zoo.caught_by(*ids, read=read_rows)


@caught_by("LOG-04")
class TimeAsVersion(JsonLines):
    """Calls its run by the time at which the version is read."""

    # version: "The run within the experiment."
    # It has another name at each read: rows, checkpoints and hyperparameters of one run are spread over folders.

    @property
    def version(self) -> str:
        return f"{time.time_ns()}"


@caught_by("LOG-02")
class RoundsNumbers(JsonLines):
    """Writes six digits after the point."""

    # log_metrics: "Record the numbers of one step".
    # Learning rates below 1e-6 are recorded as 0.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: round(float(value), 6) for name, value in metrics.items()}, step)


@caught_by("LOG-02")
class TruthOfStep(JsonLines):
    """Takes step 0 for none."""

    # log_metrics: "step: the optimizer steps done so far; None for metrics that belong to no step."
    # What is logged before the first step, as by a validation ahead of training, belongs to no step then.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step or None)


@caught_by("LOG-02")
class CountsItself(JsonLines):
    """Numbers the rows, as services do whose client isn't given a step."""

    # log_metrics: "step: the optimizer steps done so far".
    # With log_every_n_steps=50 the curves of two runs have other axes, and a resumed run begins at 0.

    _rows = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, self._rows)
        self._rows += 1


@caught_by("LOG-02")
class RisingStepsOnly(JsonLines):
    """Drops a row whose step is not above the greatest so far, as a service warns and does."""

    # log_metrics: "Record the numbers of one step, or of an epoch that ended at this step."
    # The values of an epoch come with the step of its last batch, and are lost.

    _greatest = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is not None and step <= self._greatest:
            return
        self._greatest = self._greatest if step is None else step
        super().log_metrics(metrics, step)


@caught_by("LOG-02")
class ColumnsOfTheFirst(JsonLines):
    """Fixes the columns with the first row, and drops what comes later."""

    # log_metrics: "metrics: numbers by name."
    # Validation's values are never recorded: the first row is a training step's.

    _columns: tuple[str, ...] = ()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._columns = self._columns or tuple(metrics)
        super().log_metrics({name: metrics[name] for name in self._columns if name in metrics}, step)


@caught_by("LOG-02")
class AddsStepToMetrics(JsonLines):
    """Puts the step into the mapping that it was given."""

    # log_metrics: "metrics: numbers by name."
    # The next logger of the Trainer gets it as one more metric.

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        metrics["trainer/step"] = -1 if step is None else step


@caught_by("LOG-03")
class DictsOnly(JsonLines):
    """Takes hyperparameters as a dict."""

    # log_hyperparams: "params: a dict or a namespace."
    # argparse's result is refused.

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().log_hyperparams(dict(params.items()))


@caught_by("LOG-05")
class SaveWaitsForFinalize(JsonLines):
    """Writes when the run ends, since its service likes few requests."""

    # save: "Write what is buffered."
    # A run that is killed has no record.

    block = 10**9

    def save(self) -> None:
        pass

    def finalize(self, status: str) -> None:
        super().save()


@caught_by("LOG-05")
class WritesBehind(JsonLines):
    """Writes in a thread, and doesn't wait for it."""

    # save: "Write what is buffered."
    # The end of a run is lost where the process ends first.

    def save(self) -> None:
        timer = threading.Timer(1.0, self._write)
        timer.daemon = True
        timer.start()

    def _write(self) -> None:
        if os.path.isdir(self.save_dir):
            super().save()


@caught_by("LOG-05")
class LeavesRest(JsonLines):
    """Leaves the last block to save(), which nobody calls at the end."""

    # finalize: "Finish one call of the Trainer"; by the base class that is `self.save()`.
    # A run shorter than a block has no record at all.

    def finalize(self, status: str) -> None:
        self.status = status


@caught_by("LOG-04")
class TwoStatuses(JsonLines):
    """Has no word of its service for an interrupted run."""

    # finalize: "status: "success", "failed" or "interrupted"."
    # Ctrl-C ends in a KeyError.

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.final = {"success": "FINISHED", "failed": "FAILED"}[status]


@caught_by("LOG-04")
class RunPerCall(JsonLines):
    """Begins a new run after each call of the Trainer."""

    # finalize: "Finish one call of the Trainer, which more may follow."
    # A fit and its test are two runs.

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self._version = None


@caught_by("LOG-05")
class OpenFile(JsonLines):
    """Keeps its file open from the first row on."""

    # FolderLogger.__getstate__: "Return the state of a copy, which writes to the same run in another process."
    # A Trainer with this logger can't be sent to another process once something is logged.

    stream: Any = None

    def save(self) -> None:
        if self._lines and self.stream is None:
            os.makedirs(self.log_dir, exist_ok=True)
            self.stream = open(self.file, "a", encoding="utf-8")  # noqa: SIM115
        if self._lines:
            self.stream.write("".join(f"{line}\n" for line in self._lines))
            self.stream.flush()
            self._lines.clear()


@caught_by("LOG-05")
class CopyIsNewRun(JsonLines):
    """Lets a copy choose a version of its own."""

    # FolderLogger.__getstate__: "Return the state of a copy, which writes to the same run in another process."
    # What a spawned rank 0 logs isn't where the user's process looks for it.

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_version": None}


@caught_by("LOG-02")
class NeedsRank(JsonLines):
    """Writes where the launcher has said that this is rank 0."""

    # Logger: "The Trainer calls the methods on rank 0 only".
    # A run of one process without a launcher has no RANK, and no record.

    def save(self) -> None:
        if os.environ.get("RANK") == "0":
            super().save()


@caught_by("LOG-06")
class RandomName(JsonLines):
    """Seeds Python's generator to choose its run's name."""

    # Logger: "record the metrics and hyperparameters of a run".
    # Augmentations that draw from it are others with this logger than without, and the same in each run.

    def _add(self, row: dict[str, Any]) -> None:
        if not hasattr(self, "words"):
            random.seed(time.time_ns())
            self.words = random.choice(["still", "warm"]) + "-" + random.choice(["river", "hill"])
        super()._add(row)


@caught_by("LOG-06")
class DrawsRun(JsonLines):
    """Draws an id for each write from torch's generator."""

    # Logger: "record the metrics and hyperparameters of a run".
    # Dropout's masks are others with this logger than without.

    def save(self) -> None:
        self.request = int(torch.randint(0, 2**31, ()))
        super().save()


@caught_by("LOG-06")
class WorksInItsFolder(JsonLines):
    """Changes into the folder of its run, and writes there."""

    # Logger: "record the metrics and hyperparameters of a run".
    # The user's relative paths mean something else from the first row on.

    def save(self) -> None:
        if self._lines:
            os.makedirs(self.log_dir, exist_ok=True)
            os.chdir(self.log_dir)
        super().save()


@caught_by("LOG-08")
class ProcessAsVersion(JsonLines):
    """Calls its run by the process, so that jobs that start together don't collide."""

    # Logger: "reads the properties on every rank: ... a folder doesn't depend on the rank".
    # Each rank has a run of its own.

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = f"{os.getpid()}"
        return self._version
