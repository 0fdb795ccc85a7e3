"""A stub of poptorch: its names, and models recorded as graphs that run on the CPU. See the distribution's README."""

from __future__ import annotations

import poptorch_stub
from poptorch_stub import __version__

poptorch_stub.check()

import copy  # noqa: E402
from typing import Any  # noqa: E402

from torch import nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

from poptorch import optim  # noqa: E402
from poptorch._dataloader import DataLoader  # noqa: E402
from poptorch._impl import isRunningOnIpu  # noqa: E402
from poptorch._poplar_executor import PoplarExecutor  # noqa: E402
from poptorch.enums import (  # noqa: E402
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from poptorch.ops import BeginBlock, Block, identity_loss  # noqa: E402
from poptorch.options import Options, PipelinedExecution, ShardedExecution  # noqa: E402
from poptorch_stub import following, machine  # noqa: E402
from poptorch_stub.machine import Error, RecoverableError, UnrecoverableError  # noqa: E402

__all__ = [
    "AutoStage",
    "BeginBlock",
    "Block",
    "CommGroupType",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "MeanReductionStrategy",
    "Options",
    "OutputMode",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "ShardedExecution",
    "SyncPattern",
    "UnrecoverableError",
    "__version__",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "optim",
    "trainingModel",
]


def trainingModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None, optimizer: Optimizer | None = None
) -> PoplarExecutor:
    if isinstance(model, PoplarExecutor):
        model = model.model
    if isinstance(model, following.OnDevice):
        raise RuntimeError("the model is in training by another executor: call destroy() on that one first")
    return PoplarExecutor(
        model=copy.copy(model), options=options, training=True, optimizer=optimizer, user_model=model,
        poptorch_version=__version__,
    )  # fmt: skip


def inferenceModel(model: nn.Module | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    if isinstance(model, PoplarExecutor):
        model = model.model
    copied: Any = copy.copy(model)
    return PoplarExecutor(model=copied, options=options, training=False, user_model=model, poptorch_version=__version__)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    return 0 < num_ipus <= machine.installed()


def ipuHardwareVersion() -> int:
    assert machine.installed(), "there is no IPU"
    return 2
