"""Scale the tests' limits of time by how slow the machine is: by the seconds that ``import torch`` took at the start.

A limit only ends what hangs, so a busy machine may have more of it. :func:`install` scales pytest-timeout's, those of
``communicate`` and ``wait`` of every process that a test starts, and takes Hypothesis' 200 ms per example away; others
ask :func:`scaled`. What a test asserts of time is a comparison within the run, with the sleep or the timeout of whoever
waits in vain, or such a limit.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

VARIABLE = "TESTS_SLOWNESS"
QUIET = 1.7
"""Seconds of ``import torch`` on an idle core of the machine that the limits were written on."""
MOST = 10.0
AT_LEAST = 10.0
"""Seconds: a shorter timeout of a process is no limit but part of a test."""


def slowness() -> float:
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> float:
    return seconds * slowness()


def measure() -> None:
    """Measure once per session, in the process that starts the others."""
    if VARIABLE not in os.environ:
        start = time.perf_counter()
        import torch  # noqa: F401

        os.environ[VARIABLE] = f"{min(MOST, max(1.0, (time.perf_counter() - start) / QUIET)):.2f}"


def install() -> None:
    measure()
    if slowness() > 1:
        os.environ.setdefault("TORCHHAL_CONFORMANCE_SLOWNESS", str(slowness()))
        for name in ("communicate", "wait"):
            setattr(subprocess.Popen, name, _scaling(getattr(subprocess.Popen, name)))
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("no deadline", parent=settings(), deadline=None)
        settings.load_profile("no deadline")


def _scaling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        timeout = given.arguments.get("timeout")
        if timeout is not None and timeout >= AT_LEAST:
            given.arguments["timeout"] = scaled(timeout)
        return method(*given.args, **given.kwargs)

    signature = inspect.signature(method)
    return call


def scale_timeouts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale what pytest-timeout allows each test."""
    import pytest

    if slowness() > 1:
        for item in items:
            mark = item.get_closest_marker("timeout")
            own = (*mark.args, mark.kwargs.get("timeout")) if mark is not None else (config.getini("timeout"),)
            seconds = float(own[0])
            item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
