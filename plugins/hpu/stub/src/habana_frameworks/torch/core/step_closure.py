"""Where a step ends. The stub's operators have run by then: it notes how many, and runs what was to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from habana_frameworks.torch.utils.internal import is_lazy, lazy_only
from habana_frameworks_stub import trace
from habana_frameworks_stub.device import DEVICE

__all__ = ["add_step_closure", "is_lazy", "iter_mark_step", "lazy_only", "mark_step"]

_closures: list[Callable[[], Any]] = []


@lazy_only
def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
    _closures.append(lambda: closure(*args))


def _run_closures() -> None:
    waiting = _closures[:]
    _closures.clear()
    for closure in waiting:
        closure()


@lazy_only
def mark_step(device_str: str = "", sync: bool = False) -> None:
    trace.mark()
    if sync:
        DEVICE.synchronize()
    _run_closures()


@lazy_only
def iter_mark_step(device_str: str = "") -> None:
    trace.mark()
    _run_closures()


def _mark_step_if_lazy(device_str: str = "") -> None:
    mark_step(device_str)
