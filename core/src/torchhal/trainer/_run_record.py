"""Record a fit in ``run.json`` of its folder: what ran, how it ended, and what it used; read by ``torchhal report``."""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

import torchhal
from torchhal.checkpoint._location import is_url
from torchhal.checkpoint._temp_files import new_temporary_name
from torchhal.distributed.signals import is_orderly
from torchhal.report import RECORD_FILE, DamagedRecordError, read_record, write_record
from torchhal.report._metrics import CSV_FILE
from torchhal.trainer._run_part import RunPart
from torchhal.trainer._settings import RunSettings, Setting
from torchhal.trainer.profilers import Profiler
from torchhal.trainer.run_state import RunState


class RunRecord(RunPart[RunState]):
    """The record of one fit, on rank 0; written when it begins, when it is set up and when it ends.

    A fit that continues in the same folder adds itself to those before. Nothing is recorded of an evaluation, of a fit
    without a log folder or with a remote one, and of ``fast_dev_run``. A record that can't be written is warned of, and
    stops no training.

    Args:
        run: whose set-up has chosen the log folder.
        fn: the call of the Trainer.
    """

    def __init__(self, run: RunState, fn: str) -> None:
        super().__init__(run)
        self._began = time.time()
        self._fits: list[dict[str, Any]] = []
        self._fit: dict[str, Any] = {}
        folder = run.log_dir
        records = fn == "fit" and folder is not None and not is_url(folder) and not run.fast_dev_run
        run.keeps_record = records
        """On every rank, as they gather what the record needs."""
        self._folder = folder if records and run.is_global_zero else None

    def begin(self) -> None:
        """Write that the fit has begun."""
        folder, run = self._folder, self.run
        if folder is None:
            return
        try:
            self._fits = read_record(folder)
        except (DamagedRecordError, OSError) as error:
            run.warn_once(f"the record of earlier fits is replaced: {error}")
        for fit in self._fits:
            if fit.get("status") == "running":  # its folder is this fit's now
                fit.update(status="killed", reason="it left without recording an end")
        self._fit = {
            "status": "running",
            "began": self._began,
            "first_row": _count_rows(folder),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "world_size": run.world_size,
            "plan": _rows(run),
            "notes": list(run.plan.notes),
            "versions": versions(run),
            "command": sys.argv,
            "settings": {
                name: _plain(getattr(run, name)) for name, value in vars(RunSettings).items() if type(value) is Setting
            },
        }
        self._fits.append(self._fit)
        self._write()

    def planned(self) -> None:
        """Write that the strategy was chosen."""
        if self._folder is not None:
            self._fit["plan"] = _rows(self.run)
            self._write()

    def ready(self) -> None:
        """Write what is known once everything is set up: where the fit continues, and with which hyperparameters."""
        run = self.run
        run.seconds = {"set-up": time.time() - self._began}
        if self._folder is None:
            return
        hparams: dict[str, Any] = {}
        for owner in (run.datamodule, run.module):
            found = getattr(owner, "hparams", None)
            if isinstance(found, Mapping) and getattr(owner, "_log_hyperparams", True):
                hparams.update({str(name): _plain(value) for name, value in found.items()})
        parameters = list(run.module.parameters())
        self._fit.update(
            model=type(run.module).__name__,
            parameters=sum(p.numel() for p in parameters if not torch.nn.parameter.is_lazy(p)),
            hparams=hparams,
            continued_from=run.ckpt_path,
            first_step=run.global_step,
            first_epoch=run.current_epoch,
        )
        self._write()

    def end(self, error: BaseException | None = None) -> None:
        """Write how the fit has ended, what it used and which checkpoints it keeps.

        Args:
            error: what ended it; None where it reached its end.
        """
        if self._folder is None:
            return
        run = self.run
        if error is None:
            status, reason = "finished", run.end_reason
        elif is_orderly(error):
            status, reason = "stopped", "a signal requested it"
        else:
            status, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
        ended = time.time()
        seconds = {**run.seconds, "all": ended - self._began}
        seconds["training"] = max(0.0, seconds["all"] - sum(run.seconds.values()))
        times = {key: list(value) for key, value in run.profiler.times().items()}
        self._fit.update(
            status=status,
            reason=reason,
            ended=ended,
            end_row=_count_rows(self._folder),
            step=run.global_step,
            epoch=run.current_epoch,
            batches=run.progress.total_batches,
            seconds=seconds,
            profile=times,
            memory=run.peak_memory or [peak_memory(run)],
            checkpoints=[_checkpoints(callback, status == "stopped") for callback in run.checkpoint_callbacks],
        )
        self._write()

    def _write(self) -> None:
        assert self._folder is not None
        try:
            write_record(self._folder, self._fits, new_temporary_name())
        except (OSError, ValueError, TypeError) as error:
            path = os.path.join(self._folder, RECORD_FILE)
            reason = getattr(error, "strerror", None) or error  # else each one names another temporary file
            self.run.warn_once(f"the run can't be recorded in {path!r}, so torchhal report will lack it: {reason}")


def _rows(run: RunState) -> dict[str, Any]:
    """Return the parts of the run's plan, and why they were chosen."""
    return {what: {"choice": choice, "reason": reason} for what, choice, reason in run.plan.rows()}


def _count_rows(folder: str) -> int:
    """Return the number of whole rows of a CSVLogger's file, which tells the rows of one fit from those of the next."""
    try:
        with open(os.path.join(folder, CSV_FILE), "rb") as file:
            return max(0, sum(line.endswith(b"\n") for line in file) - 1)
    except OSError:
        return 0


def peak_memory(run: RunState) -> dict[str, Any]:
    """Return the greatest memory of this process so far, in bytes: the host's, and the device's where it is counted."""
    strategy = run.strategy
    found: dict[str, Any] = {"rank": strategy.global_rank, "device": str(strategy.root_device)}
    with suppress(Exception):  # a vendor's reading must not end the run
        peak = strategy.accelerator.memory_stats(strategy.root_device).get("peak")
        if peak is not None and strategy.root_device.type != "cpu":
            found["device_peak"] = int(peak)
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["host_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return found


def gather_peak_memory(run: RunState) -> None:
    """Gather :func:`peak_memory` of every rank, for the record. Every rank must call."""
    if run.keeps_record:
        mine = peak_memory(run)
        run.peak_memory = [mine] if run.world_size == 1 else run.strategy.all_gather_object(mine)


def versions(run: RunState) -> dict[str, str]:
    """Return the versions of Python, torch, torchhal and the packages that the run's components come from."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torchhal": torchhal.__version__,
    }
    plan = run.plan
    for part in (plan.accelerator, plan.strategy, plan.precision, plan.checkpoint_io, plan.cluster_environment):
        name = "" if part is None else type(part.value).__module__.partition(".")[0].replace("_", "-")
        with suppress(metadata.PackageNotFoundError, ValueError):
            found.setdefault(name, metadata.version(name))
    return found


def _checkpoints(callback: Any, stopped: bool) -> dict[str, Any]:
    score = getattr(callback, "best_model_score", None)
    best = getattr(callback, "best_k_models", None) or {}
    return {
        "monitor": getattr(callback, "monitor", None),
        "best": getattr(callback, "best_model_path", "") or None,
        "best_score": None if score is None else float(score),
        "scores": {str(path): float(value) for path, value in best.items()},
        "last": getattr(callback, "last_model_path", "") or None,
        "interrupted": (getattr(callback, "interrupted_path", "") or None) if stopped else None,
    }


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: nests of numbers and strings as they are, all else as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value).__name__ if isinstance(value, Profiler) else str(value)[:300]
