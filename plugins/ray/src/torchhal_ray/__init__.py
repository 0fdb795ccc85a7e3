"""Ray clusters for torchhal: the same fit in actors of a placement group, and reports to Ray Tune."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_ray.environment import RayLauncher
    from torchhal_ray.tune import TuneReportCallback

__version__ = "0.1.0"

__all__ = ["RayLauncher", "TuneReportCallback"]

_HOMES = {"RayLauncher": "environment", "TuneReportCallback": "tune"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
