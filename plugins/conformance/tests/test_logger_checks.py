"""The checks of loggers leave no files behind, and pass loggers that say what they can't hold."""

from __future__ import annotations

import io
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from logger_rows import read_csv

from torchhal.trainer.loggers import CSVLogger
from torchhal_conformance import CHECKS, ComponentUnderTest, Session
from torchhal_conformance.checks.trainer import component_argument


class PassesOn(CSVLogger):
    """Logger whose constructor names no parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("cls", [CSVLogger, PassesOn])
def test_logger_class_writes_into_folder_of_check(cls: type[Any], tmp_path: Path) -> None:
    """Its own default is the working folder, where SYS-02 to SYS-05 left the files of their runs."""
    made = component_argument(ComponentUnderTest.of("logger", cls), str(tmp_path))
    assert made.save_dir == str(tmp_path)
    given = ComponentUnderTest.of("logger", cls, arguments={"save_dir": str(tmp_path / "own")})
    assert component_argument(given, str(tmp_path)).save_dir == str(tmp_path / "own")


class FiniteOnly(CSVLogger):
    """Its service has no number for NaN, and it says so."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if len(finite) < len(metrics):
            warnings.warn("no number for NaN", UserWarning, stacklevel=2)
        super().log_metrics(finite, step)


class SaysItCannotWrite(CSVLogger):
    """Warns where its folder can't be created, as loggers of services do."""

    def save(self) -> None:
        try:
            super().save()
        except OSError as error:
            warnings.warn(f"not written: {error}", UserWarning, stacklevel=2)


class NeedsNoFolder(CSVLogger):
    """Sends to a service, and has no use for its folder."""

    sent: list[dict[str, Any]]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        vars(self).setdefault("sent", []).append({"step": step, "metrics": dict(metrics)})


class WrapsConsole(CSVLogger):
    """Records the console from the first row on, while its run is open."""

    is_open = False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if not self.is_open:
            self.is_open, sys.stdout = True, io.StringIO()
        super().log_metrics(metrics, step)


@pytest.mark.parametrize(
    ("cls", "id", "read"),
    [
        (FiniteOnly, "LOG-02", read_csv),
        (SaysItCannotWrite, "LOG-10", read_csv),
        (NeedsNoFolder, "LOG-10", lambda logger: logger.sent),
        (WrapsConsole, "LOG-06", read_csv),
    ],
)
def test_sound_logger_passes(cls: type[Any], id: str, read: Any) -> None:
    stream = sys.stdout
    with Session(ComponentUnderTest.of("logger", cls, read=read)) as session:
        result = session.run(CHECKS[id])
    assert result.outcome == "passed", result.reason
    assert sys.stdout is stream


@pytest.mark.parametrize("id", ["LOG-02", "LOG-03", "LOG-04", "LOG-05", "LOG-11"])
def test_without_read_nothing_is_compared(id: str) -> None:
    with Session(ComponentUnderTest.of("logger", CSVLogger)) as session:
        result = session.run(CHECKS[id])
    assert (result.outcome, "read=FUNCTION" in result.reason) == ("skipped", True), result.reason
