"""Send what a run logs to its loggers, and print its messages on rank 0."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch

from torchhal.distributed.process import write_stderr
from torchhal.errors import message_of
from torchhal.trainer.logging._metric_payloads import to_host
from torchhal.trainer.logging._standard_streams import lossy_streams

if TYPE_CHECKING:
    from torchhal.trainer._run_adapters import Adapters
    from torchhal.trainer.logging._logged_metrics import Results

_log = logging.getLogger("torchhal")


def _callers_level() -> int:
    """Return the ``stacklevel`` with which a warning of the caller shows the user's line that called torchhal."""
    level, frame = 1, sys._getframe(1)
    inside = ("torchhal", "contextlib")  # that enters the context of a call
    while frame.f_globals.get("__name__", "").startswith(inside) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


class RunOutput:
    """Output of a run: on rank 0 only, without communication except what ``Results`` shares and reduces."""

    results: Results
    adapters: Adapters
    module: Any
    loggers: list[Any]
    said: set[str]
    """Warnings that were given."""
    failed_loggers: set[int]
    """The ids of loggers of which one failed call was named."""
    is_trial: bool

    if TYPE_CHECKING:  # of RunState

        @property
        def is_global_zero(self) -> bool: ...
        @property
        def current_epoch(self) -> int: ...
        @property
        def global_step(self) -> int: ...
        @property
        def progress_bar_callback(self) -> Any: ...

    # -- loggers ---------------------------------------------------------------------------------------------

    def log_step(self) -> None:
        """Send the newest step values to the loggers. Every rank must call."""
        self.results.share_steps()
        metrics = self.results.step_metrics()
        if metrics and self.is_global_zero:
            self._send(metrics)

    def log_epoch(self) -> None:
        """Send the finished values of an epoch to the loggers."""
        metrics = self.results.epoch_metrics()
        if metrics and self.is_global_zero:
            self._send(metrics)
            self.call_loggers("save")  # an epoch's values survive a kill

    def _send(self, metrics: dict[str, torch.Tensor]) -> None:
        numbers = {name: float(value) for name, value in zip(metrics, to_host(metrics.values()), strict=True)}
        step = int(numbers.pop("step", self.adapters.logged_step(self.module)))
        numbers.setdefault("epoch", self.current_epoch)
        self.call_loggers("log_metrics", numbers, step)

    def finalize_loggers(self, status: str) -> None:
        """Let every logger end this call of the Trainer."""
        self.call_loggers("finalize", status)

    def call_loggers(self, method: str, *args: Any) -> None:
        """Call a method of every logger on rank 0, where it has it.

        Raises:
            Exception: that of the first logger which failed, after the others were called, if its ``on_error`` is
                ``"raise"``. That of any other logger is a warning, once per logger.
        """
        if not self.is_global_zero:
            return
        first: Exception | None = None
        for logger in self.loggers:
            try:
                self.call_logger(logger, method, *args)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def call_logger(self, logger: Any, method: str, *args: Any) -> None:
        """Call a method of one logger, as :meth:`call_loggers`."""
        try:
            if (function := getattr(logger, method, None)) is not None:
                function(*args)
        except Exception as error:
            if getattr(logger, "on_error", "warn") == "raise":
                raise
            name = type(logger).__name__
            _log.debug("%s.%s failed", name, method, exc_info=True)
            if id(logger) not in self.failed_loggers:
                self.failed_loggers.add(id(logger))
                self.warn_once(
                    f"{name}.{method} failed ({message_of(error)}): the run goes on, without what this logger can't "
                    "take. To have it end instead, set the logger's on_error='raise'"
                )

    # -- messages --------------------------------------------------------------------------------------------

    def print(self, *values: Any, **kwargs: Any) -> None:
        """``print`` on rank 0, above the progress bar."""
        if not self.is_global_zero:
            return
        with lossy_streams():
            bar = self.progress_bar_callback
            if bar is not None and hasattr(bar, "print"):
                bar.print(*values, **kwargs)
            else:
                print(*values, **kwargs)

    def announce(self, line: str) -> None:
        """Show a line about the run, on rank 0.

        It goes to the logger ``torchhal`` at INFO if the program has configured logging for it, else to stderr; nowhere
        if the progress bar is off, or that logger's own level is above INFO.
        """
        if not self.is_global_zero or self.is_trial:
            return
        bar = self.progress_bar_callback
        if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
            _log.info(line)
        elif bar is not None and bar.is_enabled and _log.level <= logging.INFO:
            write_stderr(f"torchhal: {line}\n")

    def warn_once(self, message: str) -> None:
        """Warn on rank 0, once per ``message``."""
        if message not in self.said and self.is_global_zero:
            self.said.add(message)
            with lossy_streams():
                warnings.warn(message, UserWarning, stacklevel=_callers_level())
