"""Add parameter groups to optimizers whose schedulers are made already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal import Trainer

_LISTS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
"""Attributes of torch's schedulers with a value for each group."""


def extend_schedulers(trainer: Trainer, optimizer: Optimizer) -> None:
    """Let the schedulers of ``optimizer`` have as many rates as it has groups.

    Raises:
        ConfigurationError: a scheduler keeps values in each group that an added one lacks.
    """
    groups = optimizer.param_groups
    extended: list[Any] = []
    for config in trainer.lr_scheduler_configs:
        for scheduler in _nested(config.scheduler):
            lists = {name: values for name in _LISTS if isinstance(values := getattr(scheduler, name, None), list)}
            if getattr(scheduler, "optimizer", None) is not optimizer or not lists:
                continue
            if hasattr(scheduler, "max_lrs") and len(scheduler.max_lrs) < len(groups):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} can't take another parameter group while training: it has no highest "
                    "rate for it. Use another scheduler, such as LambdaLR"
                )
            lists = {name: values for name, values in lists.items() if not any(values is each for each in extended)}
            if not lists:  # another one's list
                continue
            extended += lists.values()
            for group in groups[min(map(len, lists.values())) :]:
                if missing := sorted(set(groups[0]) - set(group) - {"initial_lr"}):
                    raise ConfigurationError(
                        f"{type(scheduler).__name__} can't take another parameter group while training: it keeps "
                        f"{', '.join(map(repr, missing))} in each. Use another scheduler, such as LambdaLR"
                    )
                rates = {"base_lrs": group.setdefault("initial_lr", group["lr"]), "_last_lr": group["lr"]}
                for name, values in lists.items():
                    values.append(rates.get(name, values[-1]))


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)
