"""What callbacks that watch a metric share: its direction, and the error when nobody logged it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchhal.errors import ConfigurationError


def check_mode(mode: Any) -> str:
    if mode not in ("min", "max"):
        raise ValueError(f"'mode' must be 'min' or 'max' (got {mode!r})")
    return str(mode)


def check_monitor(monitor: Any, *, optional: bool) -> Any:
    if (monitor is None and optional) or (isinstance(monitor, str) and monitor):
        return monitor
    raise TypeError(f"'monitor' must be a non-empty str{' or None' if optional else ''} (got {monitor!r})")


def check_number(name: str, value: Any, *, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"'{name}' must be a number{' or None' if optional else ''} (got {value!r})")
    if value != value:
        raise ValueError(f"'{name}' must be a number (got {value!r})")
    return value


def check_score(name: str, value: Any) -> Any:
    """A number, as a tensor or not, of a state."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value
    return check_number(name, value)


def is_better(mode: str, candidate: float, reference: float) -> bool:
    """Strictly better; nan is worse than everything."""
    if candidate != candidate:
        return False
    if reference != reference:
        return True
    return candidate < reference if mode == "min" else candidate > reference


def missing_metric(owner: Any, monitor: str, metrics: Mapping[str, Any]) -> ConfigurationError:
    known = ", ".join(map(repr, sorted(metrics))) or "none"
    return ConfigurationError(
        f"{type(owner).__name__} monitors {monitor!r}, which was not logged; callback_metrics has {known}. Log it with "
        f"self.log({monitor!r}, ...) in a hook that runs before, or monitor one of these"
    )


def validates_once_per_epoch(trainer: Any) -> bool:
    """Whether each epoch ends with its only validation, or there is none: then the epoch's end is the time to look."""
    if not trainer.has_validation:
        return True
    return bool(
        trainer.check_val_every_n_epoch == 1
        and isinstance(trainer.val_check_interval, float)  # the int 1 is every batch
        and trainer.val_check_interval == 1.0
    )
