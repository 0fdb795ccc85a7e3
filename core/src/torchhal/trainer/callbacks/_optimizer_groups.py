"""Add parameter groups to optimizers whose schedulers are made already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal import Trainer

_OWNED = frozenset({"owns_step", "owns_backward", "owns_accumulation", "owns_optimizer_state", "owns_schedulers"})


def refuse_owned_optimizers(trainer: Trainer, callback: Any) -> None:
    """Raise ConfigurationError under a strategy whose engine has optimizers or schedulers of its own."""
    strategy = trainer.strategy
    if _OWNED & set(strategy.features):
        raise ConfigurationError(
            f"{type(callback).__name__} can't be used with strategy {strategy.display_name!r}, whose engine sets up "
            "optimizers and schedulers once for a fit: use another strategy, or leave the callback out"
        )


def extend_schedulers(trainer: Trainer, optimizer: Optimizer) -> None:
    """Let the schedulers of ``optimizer`` have as many base rates as it has groups.

    Raises:
        ConfigurationError: a scheduler keeps values in each group that an added one lacks.
    """
    first, *others = optimizer.param_groups
    for config in trainer.lr_scheduler_configs:
        for scheduler in _nested(config.scheduler):
            if getattr(scheduler, "optimizer", None) is not optimizer or not hasattr(scheduler, "base_lrs"):
                continue
            for group in others[len(scheduler.base_lrs) - 1 :]:
                if missing := sorted(set(first) - set(group) - {"initial_lr"}):
                    raise ConfigurationError(
                        f"{type(scheduler).__name__} can't take another parameter group while training: it keeps "
                        f"{', '.join(map(repr, missing))} in each. Use another scheduler, such as LambdaLR"
                    )
                scheduler.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
                for name in ("lr_lambdas", "min_lrs"):
                    if isinstance(values := getattr(scheduler, name, None), list):
                        values.append(values[-1])


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)
