"""Names of types for annotations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypedDict, Union

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

STEP_OUTPUT = Optional[Union[Tensor, Mapping[str, Any]]]
EVAL_DATALOADERS = Any
TRAIN_DATALOADERS = Any
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]
ReduceOp = Any

_PATH = Union[str, "os.PathLike[str]"]
_DEVICE = Union[torch.device, str, int]
_MAP_LOCATION_TYPE = Optional[
    Union[_DEVICE, Callable[[torch.UntypedStorage, str], Optional[torch.UntypedStorage]], dict[_DEVICE, _DEVICE]]
]
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = Union[list[Any], list[list[Any]]]
_METRIC = Any
_NUMBER = Union[int, float]


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


OptimizerLRScheduler = Optional[
    Union[
        Optimizer,
        Sequence[Optimizer],
        tuple[Sequence[Optimizer], Sequence[Any]],
        OptimizerConfig,
        OptimizerLRSchedulerConfig,
        Sequence[OptimizerConfig],
        Sequence[OptimizerLRSchedulerConfig],
    ]
]
