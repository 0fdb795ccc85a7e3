"""Refuse what a compiled step can't do, before a model is trained wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies import check_lookups
from torchhal.strategies.model_checks import check_automatic_optimization, check_optimized_parameters
from torchhal.trainer.loops import module_hook

_HOOKS = {
    "on_after_backward": "look at what training_step returns, in on_train_batch_end",
    "on_before_zero_grad": "use on_train_batch_start",
    "on_before_optimizer_step": "use on_train_batch_start, or on_train_batch_end",
    "optimizer_step": "change learning rates by a scheduler, or in on_train_batch_start",
    "optimizer_zero_grad": "leave it out",
    "configure_gradient_clipping": "use gradient_clip_val",
}


def check_model(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a model that a compiled step can't train.

    Raises:
        ModelError: no optimizer, several, one that leaves trainable parameters out, manual optimization, or a layer
            that writes to its own weight.
    """
    name = type(module).__name__
    check_automatic_optimization(module, "on IPUs backward and update are part of the compiled step")
    check_lookups(module, "poptorch doesn't say whether a compiled step keeps that")
    if len(optimizers) != 1:
        raise ModelError(f"{name}.configure_optimizers must return one optimizer for IPUs (got {len(optimizers)})")
    check_optimized_parameters(
        module, optimizers, "poptorch trains parameters that no group holds with the optimizer's defaults"
    )


def check_trainer(trainer: Any, iterations: int, configs: Sequence[Any]) -> None:
    """Refuse hooks, flags and schedulers of a Trainer that a compiled step can't follow.

    Args:
        trainer: of the fit that is about to begin.
        iterations: optimizer steps in one call of the compiled step.
        configs: the ``LRSchedulerConfig`` objects of the Trainer.

    Raises:
        ModelError: a hook that is called in the midst of a step, which runs on the device as a whole.
        ConfigurationError: a flag that can't be kept.
    """
    for hook, instead in _HOOKS.items():
        owners = [type(trainer.module).__name__] if module_hook(trainer.module, hook) is not None else []
        if not hook.startswith(("optimizer", "configure")) and trainer.hooks.of_callbacks(hook):
            owners.append("a callback")
        if owners:
            raise ModelError(
                f"{hook} of {owners[0]} can't be called: on IPUs forward, backward and update are one compiled step; "
                f"{instead}"
            )
    if trainer.detect_anomaly:
        raise ConfigurationError(
            "'detect_anomaly' can't look into a compiled step: pass training_options with "
            "Precision.enableFloatingPointExceptions(True)"
        )
    if iterations == 1:
        return
    if trainer.max_steps != -1 and trainer.max_steps % iterations:
        raise ConfigurationError(
            f"'max_steps' must be a multiple of the device iterations, {iterations} optimizer steps in one call (got "
            f"{trainer.max_steps})"
        )
    for config in configs:
        if config.interval != "step":
            continue
        if config.reduce_on_plateau or config.frequency != 1 or module_hook(trainer.module, "lr_scheduler_step"):
            raise ConfigurationError(
                f"with {iterations} device iterations {type(config.scheduler).__name__} takes {iterations} steps after "
                "each call: it must not depend on a metric, have another frequency than 1, or be stepped by the "
                "model's lr_scheduler_step; use interval='epoch', or device_iterations=1"
            )


def check_clipping(clip_val: float | None, algorithm: str) -> None:
    """Raise ConfigurationError for clipping by value, which the device hasn't got."""
    if clip_val is not None and algorithm != "norm":
        raise ConfigurationError(f"IPUs clip gradients by norm only: 'gradient_clip_algorithm' is {algorithm!r}")
