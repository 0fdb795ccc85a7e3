"""Record the operators of some training steps with torch.profiler, with TorchProfiler."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchhal._arguments import check_count
from torchhal.checkpoint._location import is_url
from torchhal.errors import ConfigurationError
from torchhal.trainer.profilers.simple import SimpleProfiler


class TorchProfiler(SimpleProfiler):
    """Profiler that writes a Chrome trace per rank, of a few steps, beside the table of all actions.

    The trace, ``trace_rank0.json`` and so on, opens in Perfetto or in a browser's ``about:tracing``. It has the
    operators, the kernels of the device, the collectives, and each action as a region; the next fit into the same
    folder replaces it. The device's own profiler is used where the accelerator has one (:meth:`.Accelerator.profile`).
    The clock of the table doesn't wait for the device, so that the trace shows host and device as they overlap.

    Args:
        folder: where the traces go; the run's folder, or ``default_root_dir`` without one, if None.
        wait: steps to leave out first, in which caches and kernels are set up.
        warmup: steps to record and drop, as the recording itself starts slowly.
        active: steps to record.
        row_limit: operators in the summary.
        **options: further ones of ``torch.profiler.profile``: ``record_shapes``, ``profile_memory``, ``with_stack``.

    Raises:
        ConfigurationError: an argument outside its domain.

    .. versionadded:: 0.2
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        row_limit: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(synchronize=False)
        self.folder = None if folder is None else os.path.abspath(os.fspath(folder))
        self.wait = check_count("wait", wait, minimum=0)
        self.warmup = check_count("warmup", warmup, minimum=0)
        self.active = check_count("active", active, minimum=1)
        self.row_limit = check_count("row_limit", row_limit, minimum=0)
        for name in ("schedule", "on_trace_ready"):
            if name in options:
                raise ConfigurationError(f"'{name}' is TorchProfiler's own: give it wait, warmup and active instead")
        self.options = options
        self.trace_path: str | None = None
        """This rank's trace; None before it is written."""
        self._target = ""
        self._operators = ""
        self._accelerator: Any = None
        self._profile: Any = None
        self._torch: Any = None
        self._regions: list[AbstractContextManager[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_accelerator": None, "_profile": None, "_torch": None, "_regions": []}
        return {**super().__getstate__(), **own}

    def setup(self, trainer: Any) -> None:
        """Start recording.

        Raises:
            ConfigurationError: ``torch.profiler`` has no such option, or the folder can't be written to.
        """
        super().setup(trainer)
        strategy = trainer.strategy
        self._target = os.path.join(self._folder_of(trainer), f"trace_rank{strategy.global_rank}.json")
        self.trace_path, self._operators, self._regions = None, "", []
        self._accelerator = strategy.accelerator
        schedule = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        try:
            self._profile = self._accelerator.profile(schedule=schedule, on_trace_ready=self._export, **self.options)
        except TypeError as error:
            raise ConfigurationError(
                f"TorchProfiler's options must be those of torch.profiler.profile: {error}"
            ) from error
        self._torch = self._profile.__enter__()

    def _folder_of(self, trainer: Any) -> str:
        folder = self.folder or trainer.log_dir or trainer.default_root_dir
        folder = os.getcwd() if is_url(folder) else folder
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"TorchProfiler can't write to {folder!r}: {error.strerror}. Give it another folder"
            ) from error
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"TorchProfiler can't write to {folder!r}. Give it another folder")
        return folder

    def _export(self, profile: Any) -> None:
        if self.trace_path is not None:  # torch raises at a second export
            return
        try:
            profile.export_chrome_trace(self._target)
            self.trace_path = self._target
        except (OSError, RuntimeError) as error:  # the training goes on
            warnings.warn(f"the trace can't be written to {self._target!r}: {error}", stacklevel=2)
        if self.row_limit:
            sort = "self_cpu_time_total"
            self._operators = profile.key_averages().table(sort_by=sort, row_limit=self.row_limit).rstrip()

    def start(self, action: str) -> None:
        super().start(action)
        region = nullcontext() if self._accelerator is None else self._accelerator.profile_region(action)
        region.__enter__()
        self._regions.append(region)

    def stop(self, action: str) -> None:
        super().stop(action)
        self._regions.pop().__exit__(None, None, None)

    def step(self) -> None:
        super().step()
        SimpleProfiler.start(self, "profiler")  # starting, stopping and writing the trace take long
        self._torch.step()
        SimpleProfiler.stop(self, "profiler")

    def teardown(self) -> None:
        """Stop recording; a trace that has begun is written."""
        profile, self._profile, self._torch = self._profile, None, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def summary(self) -> str:
        """Return the table of actions, the operators that took longest, and where the trace is."""
        if not self.steps:
            return super().summary()
        if self.trace_path is not None:
            last = f"trace of {self.active} step(s) at most: {self.trace_path}"
        else:
            needed = self.wait + self.warmup + 1
            last = f"no trace: it begins with step {needed}, and the fit had {self.steps}. Use a smaller wait"
        return "\n".join(part for part in (super().summary(), self._operators, last) if part)
