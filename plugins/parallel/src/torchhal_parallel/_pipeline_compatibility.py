"""Refuse what can't be trained where the ranks of one batch have different parameters, as in a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.precision import Precision


def check_precision(precision: Precision, sizes: Mapping[str, int], alias: str) -> None:
    """Raise UnsupportedCombinationError for a precision that scales the loss on each rank by itself."""
    if "scales_loss" in precision.features and (sizes["tensor"] > 1 or sizes["pipeline"] > 1):
        raise UnsupportedCombinationError(
            f"strategy {alias!r} can't compute in precision {precision.alias!r}, which scales the "
            "loss: ranks of the axes 'tensor' and 'pipeline' have different parameters, and would decide "
            "differently whether a step is skipped. Use 'bf16-mixed'"
        )


def check_automatic_optimization(module: nn.Module) -> None:
    """Raise ConfigurationError for a module that runs its backward passes itself."""
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"a pipeline runs forward and backward itself, and {type(module).__name__} has manual "
            "optimization: set automatic_optimization = True, or use an axis other than 'pipeline'"
        )


def synchronized_batchnorm_error(alias: str) -> UnsupportedCombinationError:
    """Return the error for ``sync_batchnorm=True``."""
    return UnsupportedCombinationError(
        f"strategy {alias!r} can't let batch norms compute over the whole batch "
        "(sync_batchnorm=True): a stage sees one microbatch after the other. Use pipeline=1, or leave "
        "sync_batchnorm out"
    )


def connected_model_error(precision: Precision, model: Any, alias: str) -> UnsupportedCombinationError:
    """Return the error for a precision whose ``connect`` puts ``model`` around the user's module."""
    return UnsupportedCombinationError(
        f"{type(precision).__name__}.connect gives back a {type(model).__name__} for the model, and "
        f"strategy {alias!r} runs the stages of the model one by one, so that no step would "
        "run through it: use no axis 'pipeline', or another precision"
    )


def parameter_hook_error(module: nn.Module | None, parameter: nn.Parameter, alias: str) -> ModelError:
    """Return the error for a hook on a parameter whose gradients ``fully_shard`` averages for each microbatch."""
    return ModelError(
        f"a parameter of {type(module).__name__}, of shape {tuple(parameter.shape)}, has a hook of "
        f"register_hook, and strategy {alias!r} averages the gradients of each microbatch "
        "over the ranks of the axis 'shard': no hook would see that of a batch. Use shard=1 (axis 'data'), or "
        "pipeline=1, or change gradients in on_before_optimizer_step"
    )
