"""The base of loggers that were written for Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchhal.trainer import loggers
from torchhal_lightning.stand_in.pytorch.utilities.rank_zero import rank_zero_only


class Logger(loggers.Logger):
    """A logger, called on rank 0."""

    @property
    def group_separator(self) -> str:
        """What separates a group from a name in the names of metrics."""
        return "/"

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the model; most loggers can't."""


class DummyExperiment:
    """Takes every call and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __getitem__(self, index: Any) -> DummyExperiment:
        return self

    def __setitem__(self, index: Any, value: Any) -> None: ...


class DummyLogger(Logger):
    """Takes everything, and writes nothing."""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        return self._experiment

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def rank_zero_experiment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``experiment`` so that other ranks than 0 get an object that takes every call."""

    @functools.wraps(function)
    def experiment(self: Any) -> Any:
        return function(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment
