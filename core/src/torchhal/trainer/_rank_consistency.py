"""Check that all ranks train with the same settings: only gradients are shared, so different steps would diverge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal.trainer.run_state import RunState


def check_settings(run: RunState) -> None:
    """Raise ConfigurationError on every rank if the Trainers or the optimizers of the ranks differ.

    Once, before the first step; every rank calls it.
    """
    strategy = run.strategy
    if strategy.world_size == 1:
        return
    everybody = strategy.all_gather_object(_settings(run))
    for name, first in everybody[0].items():
        for rank, other in enumerate(everybody):
            if other[name] != first:
                raise ConfigurationError(
                    f"every rank must train with the same {name} (rank 0 has {first}, rank {rank} has {other[name]})"
                )


def _settings(run: RunState) -> dict[str, str]:
    asked = {
        name: getattr(run, name)
        for name in (
            "max_epochs",
            "max_steps",
            "accumulate_grad_batches",
            "gradient_clip_val",
            "gradient_clip_algorithm",
            "sync_batchnorm",
        )
    }
    asked["precision"] = run.strategy.precision.alias or type(run.strategy.precision).__name__
    asked["optimizers"] = [_description(optimizer) for optimizer in run.strategy.optimizers]
    return {name: str(value) for name, value in asked.items()}


def _description(optimizer: Optimizer) -> str:
    """Return the class and its arguments; not its groups, as ranks that hold parts of a model may have other ones."""
    defaults: dict[str, Any] = getattr(optimizer, "defaults", {})
    options = ", ".join(f"{name}={value}" for name, value in sorted(defaults.items()) if _is_plain(value))
    return f"{type(optimizer).__name__}({options})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or (
        isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    )
