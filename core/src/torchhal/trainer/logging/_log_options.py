"""Check the options of ``self.log`` at the first call of a key, and decide their defaults by the hook."""

from __future__ import annotations

import builtins
import contextlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch

from torchhal.errors import ConfigurationError

# Once per batch: a value of the step is possible and is the default.
_TRAIN_STEP_HOOKS = (
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
_EVALUATION_STEP_HOOKS = (
    "validation_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "test_step",
    "on_test_batch_start",
    "on_test_batch_end",
)
# Once per epoch: there is no step to log for.
_EPOCH_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
)


class Hook(NamedTuple):
    """Stage and defaults of the values logged in one hook."""

    stage: str
    on_step: bool
    """The default."""
    on_epoch: bool
    """The default."""
    step_allowed: bool


def _stage_of(hook: str) -> str:
    return "validate" if "validation" in hook else "test" if "test" in hook else "train"


HOOKS: dict[str, Hook] = {
    **{hook: Hook(_stage_of(hook), True, False, True) for hook in _TRAIN_STEP_HOOKS},
    **{hook: Hook(_stage_of(hook), False, True, True) for hook in _EVALUATION_STEP_HOOKS},
    **{hook: Hook(_stage_of(hook), False, True, False) for hook in _EPOCH_HOOKS},
}

REDUCTIONS: dict[Any, str] = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.amin: "min",
    torch.max: "max",
    torch.amax: "max",
    builtins.sum: "sum",
    builtins.min: "min",
    builtins.max: "max",
}


ASKED = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "sync_dist",
    "add_dataloader_idx",
    "rank_zero_only",
)
"""The options that must not change between the calls of a key, in the order ``self.log`` compares them."""


@dataclass(frozen=True)
class LogOptions:
    """The options of one key with every default decided."""

    on_step: bool
    on_epoch: bool
    reduction: str
    """``"mean"``, ``"sum"``, ``"min"`` or ``"max"``."""
    prog_bar: bool
    logger: bool
    sync_step: bool
    sync_epoch: bool
    add_dataloader_idx: bool
    rank_zero_only: bool


def is_metric(value: Any) -> bool:
    """Return whether ``value`` is an object that accumulates itself, with ``compute`` and ``reset``."""
    return not isinstance(value, torch.Tensor) and callable(getattr(value, "compute", None)) and hasattr(value, "reset")


def decide(name: str, hook: str | None, asked: tuple[Any, ...]) -> LogOptions:
    """Return the options of a key with the defaults of its hook filled in; raise if they are invalid.

    Args:
        name: the name of the metric.
        hook: the hook that is running; None outside the hooks.
        asked: the options as they were given, in the order of :data:`ASKED`.
    """
    prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only = asked
    if not isinstance(name, str) or not name:
        raise TypeError(f"'name' must be a non-empty str (got {name!r})")
    if hook not in HOOKS:
        where = f"in {hook}" if hook else "outside the hooks of a running Trainer"
        raise ConfigurationError(
            f"self.log({name!r}, ...) was called {where}, where no metric can be attributed to a step or an epoch; "
            f"it works in {', '.join(HOOKS)}"
        )
    for option, flag in (
        ("prog_bar", prog_bar),
        ("add_dataloader_idx", add_dataloader_idx),
        ("rank_zero_only", rank_zero_only),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"'{option}' must be a bool (got {flag!r}) in self.log({name!r}, ...)")
    for option, choice in (("logger", logger), ("on_step", on_step), ("on_epoch", on_epoch), ("sync_dist", sync_dist)):
        if choice is not None and not isinstance(choice, bool):
            raise TypeError(f"'{option}' must be a bool or None (got {choice!r}) in self.log({name!r}, ...)")
    try:
        reduction = REDUCTIONS[reduce_fx]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(key) for key in REDUCTIONS if isinstance(key, str))
        raise ConfigurationError(
            f"'reduce_fx' must be one of {allowed}, torch.mean, torch.sum, torch.min or torch.max (got {reduce_fx!r}) "
            f"in self.log({name!r}, ...); for anything else log a metric object with compute() and reset()"
        ) from None
    _, step_default, epoch_default, step_allowed = HOOKS[hook]
    if on_step and not step_allowed:
        raise ConfigurationError(f"'on_step' must not be True in {hook}: it runs once per epoch (key {name!r})")
    on_step = step_default if on_step is None else on_step
    on_epoch = epoch_default if on_epoch is None else on_epoch
    if not on_step and not on_epoch:
        raise ConfigurationError(
            f"one of 'on_step' and 'on_epoch' must be True in self.log({name!r}, ...): with both False in {hook} "
            "nothing would be kept"
        )
    if rank_zero_only and sync_dist:
        raise ConfigurationError(
            f"'sync_dist' must not be True together with rank_zero_only=True (key {name!r}): only rank 0 has the value"
        )
    return LogOptions(
        on_step=on_step,
        on_epoch=on_epoch,
        reduction=reduction,
        prog_bar=prog_bar,
        logger=logger is not False,
        sync_step=bool(sync_dist),
        sync_epoch=sync_dist is not False and not rank_zero_only,
        add_dataloader_idx=add_dataloader_idx,
        rank_zero_only=rank_zero_only,
    )


def changed(name: str, hook: str, before: tuple[Any, ...], now: tuple[Any, ...]) -> ConfigurationError:
    """Return the error for a key whose options are not those of its first call."""
    differing = [
        f"{option}={first!r}, then {option}={second!r}"
        for option, first, second in zip(ASKED, before, now, strict=True)
        if first != second
    ]
    return ConfigurationError(
        f"self.log({name!r}, ...) must have the same options at every call in {hook} "
        f"(got {'; '.join(differing)}); use another name for another meaning"
    )


def check_value(name: str, value: Any) -> None:
    """Raise unless ``value`` can be logged under one key."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            kind = "complex " if value.is_complex() else ""
            raise ValueError(
                f"'value' of self.log({name!r}, ...) must be a real tensor with one element (got a {kind}tensor of "
                f"shape {tuple(value.shape)}); reduce it first, e.g. with .mean()"
            )
        if value.is_meta:
            with contextlib.suppress(RuntimeError):  # a placeholder for another rank's tensor raises its own
                value.item()
            raise ValueError(
                f"'value' of self.log({name!r}, ...) must have a value on this rank (got {value!r}, on the meta device)"
            )
        return
    if isinstance(value, Mapping) or (is_metric(value) and hasattr(value, "items")):
        raise TypeError(
            f"'value' of self.log({name!r}, ...) must be one number (got a {type(value).__name__} with the keys "
            f"{', '.join(repr(key) for key, _ in value.items())}); use self.log_dict for several"
        )
    if not isinstance(value, numbers.Real) and not is_metric(value):
        raise TypeError(
            f"'value' of self.log({name!r}, ...) must be a number, a tensor with one element, or a metric object with "
            f"compute() and reset() (got {value!r})"
        )


def check_batch_size(name: str, batch_size: Any) -> None:
    """Raise unless ``batch_size`` is None, a tensor or a finite number from 0."""
    if batch_size is None or isinstance(batch_size, torch.Tensor):
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Real):
        raise TypeError(f"'batch_size' of self.log({name!r}, ...) must be an int or None (got {batch_size!r})")
    if not math.isfinite(batch_size) or batch_size < 0:
        raise ValueError(f"'batch_size' of self.log({name!r}, ...) must be 0 or more (got {batch_size!r})")


def batch_size_of(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in ``batch``, depth first; None when it has no tensor.

    For a graph batch (an object with an int ``num_graphs``) or any object with an int ``batch_size`` it is that number;
    a number, and a tensor without dimensions, is one sample.
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 1
    if isinstance(batch, list | tuple):
        return _first_size(batch)
    if batch is None or isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Mapping):
        return _first_size(batch.values())
    for attribute in ("num_graphs", "batch_size"):
        size = getattr(batch, attribute, None)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    if is_dataclass(batch):
        return _first_size(getattr(batch, field.name) for field in fields(batch))
    return 1 if isinstance(batch, numbers.Real) else None


def _first_size(items: Any) -> int | None:
    number_seen = None
    for item in items:
        size = batch_size_of(item)
        if size is not None:
            if isinstance(item, torch.Tensor) or not isinstance(item, numbers.Real):
                return size
            number_seen = size  # a flag or an index beside the data doesn't determine its size
    return number_seen
