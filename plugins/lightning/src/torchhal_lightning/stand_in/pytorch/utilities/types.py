"""Names of types for annotations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
EVAL_DATALOADERS = Any
TRAIN_DATALOADERS = Any
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
ReduceOp = Any

_PATH = str | os.PathLike[str]
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = (
    _DEVICE | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | dict[_DEVICE, _DEVICE] | None
)
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
_METRIC = Any
_NUMBER = int | float


class LRSchedulerConfigType(TypedDict, total=False):
    """A scheduler and when it steps."""

    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


LRSchedulerConfig = LRSchedulerConfigType


class OptimizerConfig(TypedDict):
    """An optimizer."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(OptimizerConfig, total=False):
    """An optimizer and its scheduler."""

    lr_scheduler: Any
    monitor: str


OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[Any]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
