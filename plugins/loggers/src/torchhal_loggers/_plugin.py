"""List what this distribution provides, without importing a service's library."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_loggers() -> list[Component]:
    return [
        Component("mlflow", "torchhal_loggers.mlflow:MLflowLogger", summary="An MLflow tracking server or database"),
        Component("wandb", "torchhal_loggers.wandb:WandbLogger", summary="Weights & Biases, online or offline"),
        Component("comet", "torchhal_loggers.comet:CometLogger", summary="Comet, online or offline"),
        Component("swanlab", "torchhal_loggers.swanlab:SwanLabLogger", summary="SwanLab, online or offline"),
        Component("trackio", "torchhal_loggers.trackio:TrackioLogger", summary="Trackio, a local database by default"),
    ]


@hookimpl
def torchhal_commands() -> list[Component]:
    return [
        Component(
            "sync-logs",
            "torchhal_loggers._sync_command:configure",
            "send what a run has logged and its service didn't get",
        )
    ]
