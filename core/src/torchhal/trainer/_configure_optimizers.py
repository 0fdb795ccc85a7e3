"""Read what ``configure_optimizers`` returned: optimizers, schedulers and when these step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchhal.errors import ModelError

FORMS = (
    "an optimizer, a list of them, (optimizers, schedulers), {'optimizer': ..., 'lr_scheduler': ...}, a tuple of "
    "such dicts, or None"
)


@dataclass
class SchedulerConfig:
    """One scheduler and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    """"epoch" or "step" (an optimizer step)."""
    frequency: int = 1
    monitor: str | None = None
    """The metric handed to ``step``; needed by ReduceLROnPlateau."""
    strict: bool = True
    """Whether a missing metric is an error or a skipped step."""
    name: str | None = None
    reduce_on_plateau: bool = False


def configure_optimizers(module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return what ``module.configure_optimizers()`` returned, in one form; raise ModelError for anything else."""
    return parse_optimizers(module.configure_optimizers(), type(module).__name__, module)


def parse_optimizers(value: Any, model: str, module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers: list[Any]
    schedulers: list[Any] = []
    if value is None:
        return [], []
    if isinstance(value, Mapping):
        optimizers, schedulers = _from_dict(value, model)
    elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        optimizers = []
        for item in value:
            own, its = _from_dict(item, model)
            optimizers += own
            schedulers += its
    elif isinstance(value, Sequence) and len(value) == 2 and isinstance(value[0], Sequence):
        optimizers = list(value[0])
        schedulers = list(value[1]) if isinstance(value[1], Sequence) else [value[1]]
    elif isinstance(value, Sequence):
        optimizers = list(value)
    else:
        optimizers = [value]
    for optimizer in optimizers:
        if not _is_optimizer(optimizer):
            # torch prints an optimizer on a line for each of its settings
            given = ", ".join(type(item).__name__ if hasattr(item, "step") else repr(item) for item in optimizers)
            meant = ": write [optimizer], [scheduler]" if any(map(_is_optimizer, optimizers)) else ""
            raise ModelError(f"{model}.configure_optimizers must return {FORMS} (got {given}){meant}")
    _check_parameters(optimizers, module, model)
    configs = [_scheduler_config(item, model, schedulers) for item in schedulers]
    for config in configs:
        _check_optimizer_of(config.scheduler, optimizers, model)
    return optimizers, configs


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer) or (hasattr(value, "step") and hasattr(value, "param_groups"))


def _from_dict(value: Mapping[str, Any], model: str) -> tuple[list[Any], list[Any]]:
    if unknown := sorted(set(value) - {"optimizer", "lr_scheduler", "monitor"}):
        raise ModelError(
            f"{model}.configure_optimizers returned a dict with the keys {', '.join(map(repr, unknown))}; it may hold "
            "'optimizer', 'lr_scheduler' and 'monitor'"
        )
    if "optimizer" not in value:
        raise ModelError(f"{model}.configure_optimizers returned a dict without 'optimizer' (got {dict(value)!r})")
    scheduler = value.get("lr_scheduler")
    if scheduler is None:
        return [value["optimizer"]], []
    if value.get("monitor") is not None and not isinstance(scheduler, SchedulerConfig):
        own = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        scheduler = {"monitor": value["monitor"], **own}
    return [value["optimizer"]], [scheduler]


def _scheduler_config(item: Any, model: str, schedulers: Sequence[Any]) -> SchedulerConfig:
    if isinstance(item, SchedulerConfig):
        return item
    fields = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    known = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
    if unknown := sorted(set(fields) - known):
        raise ModelError(
            f"an lr_scheduler of {model} may hold {', '.join(sorted(known))} (got {', '.join(map(repr, unknown))} too)"
        )
    scheduler = fields.get("scheduler")
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise ModelError(f"an lr_scheduler of {model} must be an object with a method step (got {scheduler!r})")
    config = SchedulerConfig(**fields)
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
        if config.monitor is None:
            raise ModelError(
                f"the ReduceLROnPlateau of {model} needs the name of a logged metric: return "
                "{'optimizer': ..., 'lr_scheduler': ..., 'monitor': 'val_loss'}"
            )
    if config.interval not in ("epoch", "step"):
        raise ModelError(f"'interval' of an lr_scheduler must be 'epoch' or 'step' (got {config.interval!r})")
    if isinstance(config.frequency, bool) or not isinstance(config.frequency, int) or config.frequency < 1:
        raise ModelError(f"'frequency' of an lr_scheduler must be an int of at least 1 (got {config.frequency!r})")
    return config


def _check_optimizer_of(scheduler: Any, optimizers: Sequence[Any], model: str) -> None:
    """Raise ModelError for a scheduler of an optimizer that is not returned: it would set nobody's learning rate."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if groups is None:  # of another library
        return
    own = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    if groups and not any(id(group) in own for group in groups):
        raise ModelError(
            f"the {type(scheduler).__name__} of {model} sets the learning rates of an optimizer that "
            "configure_optimizers didn't return: make it of the one that is returned"
        )


def _check_parameters(optimizers: Sequence[Any], module: Any, model: str) -> None:
    """Raise ModelError for an optimizer over tensors of another model or of a copy: it would train nothing."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in given)
        if given and foreign == len(given):
            raise ModelError(
                f"the {type(optimizer).__name__} of {model} holds {foreign} parameter(s), none of which belong to the "
                "model: build it from self.parameters() inside configure_optimizers"
            )
