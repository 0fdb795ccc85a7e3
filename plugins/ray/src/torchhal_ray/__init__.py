"""Provide Ray clusters: the same fit in actors of a placement group, and reports to Ray Tune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_ray.environment import RayEnvironment
    from torchhal_ray.tune import TuneReportCallback

__version__ = "0.2.0"

__all__ = ["RayEnvironment", "TuneReportCallback"]

__getattr__, __dir__ = lazy_names(
    __name__, {"RayEnvironment": "environment", "TuneReportCallback": "tune"}, renamed={"RayLauncher": "RayEnvironment"}
)
