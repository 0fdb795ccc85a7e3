"""Let a command line choose the optimizer and the scheduler of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""The type of a model's argument that takes the parameters and returns an optimizer: a class path in a file."""
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""The same for a scheduler, which takes the optimizer."""


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's, with the name of the metric that it follows.

    Args:
        optimizer: of the model.
        monitor: name of the metric.
        *args: of torch's.
        **kwargs: the same.

    .. versionadded:: 0.2
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


def with_schedule(optimizer: Optimizer, lr_scheduler: LRScheduler | None) -> Any:
    """Return what a model's ``configure_optimizers`` returns for an optimizer with its scheduler."""
    if lr_scheduler is None:
        return optimizer
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}}
    return [optimizer], [lr_scheduler]


class ConfigureOptimizers:
    """A ``configure_optimizers`` for one model; it can be pickled, and so go to other processes with the model.

    Args:
        module: the model.
        optimizer: makes the optimizer of its parameters.
        lr_scheduler: makes the scheduler of that; None for none.
    """

    def __init__(
        self, module: nn.Module, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None
    ) -> None:
        self._module, self._optimizer, self._lr_scheduler = module, optimizer, lr_scheduler

    def __call__(self) -> Any:
        optimizer = self._optimizer(self._module.parameters())
        return with_schedule(optimizer, None if self._lr_scheduler is None else self._lr_scheduler(optimizer))
