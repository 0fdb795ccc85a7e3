"""Make the logger under test, and compare what was logged with what it says, writes and sends."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchhal.trainer.loggers import Logger
from torchhal_conformance._assertions import require
from torchhal_conformance._check import NotGiven
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks.trainer import folder_arguments


def make(context: CheckContext, folder: str = "") -> Logger:
    """Return a logger that writes into ``folder`` of the check's folder, where its constructor takes one."""
    made: Logger = context.create(**folder_arguments(context.component, str(context.folder / folder)))
    return made


def read_rows(context: CheckContext, logger: Logger) -> list[dict[str, Any]]:
    """Return the rows that the logger's back end has.

    Raises:
        NotGiven: the suite has no ``read``.
    """
    if context.component.read is None:
        raise NotGiven("what was logged is not compared with what is there: give the suite read=FUNCTION")
    return context.component.read(logger)


def recorded(rows: list[dict[str, Any]]) -> list[tuple[int | None, float]]:
    """Return step and value of each metric in ``rows``."""
    return [(row.get("step"), float(value)) for row in rows for value in row.get("metrics", {}).values()]


def is_recorded(found: list[tuple[int | None, float]], step: int | None, value: float) -> bool:
    """Return whether ``found`` has a value at its step; one without a step may be at any."""
    # some services keep float32
    return any(math.isclose(one, value, rel_tol=1e-6) and (step is None or at == step) for at, one in found)


def require_recorded(context: CheckContext, logger: Logger, logged: list[tuple[int | None, float]]) -> None:
    """Fail unless ``read`` returns each finite value that was ``logged``, at its step.

    More may be there: services add metrics of their own.

    Raises:
        NotGiven: the suite has no ``read``.
    """
    found = recorded(read_rows(context, logger))
    for step, value in logged:
        there = not math.isfinite(value) or is_recorded(found, step, value)
        require(there, f"{value} was logged at step {step}, and read() returns it not")


@contextmanager
def collect_messages() -> Iterator[list[str]]:
    """Yield a list that gets what is said meanwhile as a warning, or as a log record of at least that level."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
            messages += [str(one.message) for one in caught]
    finally:
        logging.getLogger().removeHandler(handler)
