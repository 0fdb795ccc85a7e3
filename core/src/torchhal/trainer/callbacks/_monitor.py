"""Check, compare and look up the metric that a callback monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchhal.errors import ConfigurationError


def check_mode(mode: Any) -> str:
    """Return ``mode``; raise ValueError unless it is ``"min"`` or ``"max"``."""
    if mode not in ("min", "max"):
        raise ValueError(f"'mode' must be 'min' or 'max' (got {mode!r})")
    return str(mode)


def check_monitor(monitor: Any, *, optional: bool) -> Any:
    """Return ``monitor``; raise TypeError unless it is the name of a metric or, if ``optional``, None."""
    if (monitor is None and optional) or (isinstance(monitor, str) and monitor):
        return monitor
    raise TypeError(f"'monitor' must be a non-empty str{' or None' if optional else ''} (got {monitor!r})")


def check_number(name: str, value: Any, *, optional: bool = False) -> Any:
    """Return ``value``; raise unless it is a number other than nan or, if ``optional``, None."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"'{name}' must be a number{' or None' if optional else ''} (got {value!r})")
    if value != value:
        raise ValueError(f"'{name}' must be a number (got {value!r})")
    return value


def check_score(name: str, value: Any) -> Any:
    """Return ``value``; raise unless it is a number or a real tensor with one element, as states hold scores."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value
    return check_number(name, value)


def is_better(mode: str, candidate: float, reference: float) -> bool:
    """Return whether ``candidate`` is strictly better than ``reference``; nan is worse than everything."""
    if candidate != candidate:
        return False
    if reference != reference:
        return True
    return candidate < reference if mode == "min" else candidate > reference


def missing_metric(owner: Any, monitor: str, metrics: Mapping[str, Any]) -> ConfigurationError:
    """Return the error that ``owner`` monitors a metric that was not logged, with the names of ``metrics``."""
    known = ", ".join(map(repr, sorted(metrics))) or "none"
    return ConfigurationError(
        f"{type(owner).__name__} monitors {monitor!r}, which was not logged; callback_metrics has {known}. Log it with "
        f"self.log({monitor!r}, ...) in a hook that runs before, or monitor one of these"
    )


def validates_once_per_epoch(trainer: Any) -> bool:
    """Return whether each epoch ends with its only validation, or has none, so that its end is the time to check."""
    if not trainer.has_validation:
        return True
    return bool(
        trainer.check_val_every_n_epoch == 1
        and isinstance(trainer.val_check_interval, float)  # the int 1 is every batch
        and trainer.val_check_interval == 1.0
    )
