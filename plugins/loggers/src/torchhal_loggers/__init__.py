"""Provide loggers for experiment services, which keep what a service doesn't get, and never stop a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_loggers.comet import CometLogger
    from torchhal_loggers.errors import ServiceError
    from torchhal_loggers.mlflow import MLflowLogger
    from torchhal_loggers.service import ServiceLogger
    from torchhal_loggers.swanlab import SwanLabLogger
    from torchhal_loggers.trackio import TrackioLogger
    from torchhal_loggers.wandb import WandbLogger

__version__ = "0.2.0"

__all__ = [
    "CometLogger",
    "MLflowLogger",
    "ServiceError",
    "ServiceLogger",
    "SwanLabLogger",
    "TrackioLogger",
    "WandbLogger",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CometLogger": "comet",
        "MLflowLogger": "mlflow",
        "ServiceError": "errors",
        "ServiceLogger": "service",
        "SwanLabLogger": "swanlab",
        "TrackioLogger": "trackio",
        "WandbLogger": "wandb",
    },
    renamed={"MLFlowLogger": "MLflowLogger", "SwanlabLogger": "SwanLabLogger"},
)
