"""Refuse what Bagua can't do with a model, before it trains wrongly or waits for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.composition import Composition
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.precision import Precision, needs_closure
from torchhal.strategies.model_checks import (
    check_automatic_optimization,
    check_dense_gradients,
    check_optimized_parameters,
)
from torchhal_bagua._algorithms import ALGORITHMS


def check_parts(name: str, options: Mapping[str, Any], composition: Composition) -> None:
    """Refuse algorithms that don't fit the device, the precision or the number of ranks.

    Raises:
        UnsupportedCombinationError: the algorithm can't work there, in this precision, or among so many ranks.
    """
    precision: Precision = composition.precision
    if composition.accelerator.device_type == "cuda" and torch.version.hip is not None:
        raise UnsupportedCombinationError(
            "strategy 'bagua' works on NVIDIA's GPUs only, and this torch is built for AMD's: use 'ddp'"
        )
    scales_loss = "scales_loss" in precision.features
    if scales_loss and name == "qadam":
        raise UnsupportedCombinationError(
            f"algorithm 'qadam' puts gradients into its momentum in backward, and precision {precision.alias!r} "
            "unscales them after it: use '32-true' or 'bf16-mixed'"
        )
    if scales_loss and ALGORITHMS[name].own_weights:
        raise UnsupportedCombinationError(
            f"algorithm {name!r} leaves each rank its own gradients, and in precision {precision.alias!r} one rank "
            "would skip a step that the others take: use '32-true' or 'bf16-mixed'"
        )
    if precision.param_dtype is not torch.float32 and name == "async":
        raise UnsupportedCombinationError(
            f"algorithm 'async' averages float32 weights only (got precision {precision.alias!r}): use '32-true' or "
            "'bf16-mixed'"
        )
    if options.get("peer_selection_mode") == "shift_one":
        hierarchical = options.get("hierarchical", True)
        nodes, ranks = composition.num_nodes, composition.world_size
        peers, what = (nodes, "node(s)") if hierarchical else (ranks, "rank(s)")
        if peers is not None and peers % 2:
            pairs = hierarchical and ranks % 2 == 0
            advice = ": pass hierarchical=False, which pairs ranks" if pairs else ""
            raise UnsupportedCombinationError(
                f"peer_selection_mode='shift_one' with hierarchical={hierarchical} needs an even number of "
                f"{what.removesuffix('(s)')}s (got {peers} {what}){advice}"
            )


def check_accumulation(name: str, options: Mapping[str, Any], accumulate: int) -> None:
    """Raise ConfigurationError where the algorithm can't take so many batches to a step."""
    if accumulate > 1 and name == "qadam":
        raise ConfigurationError(
            "algorithm 'qadam' puts the gradients of each backward into its momentum at once, so "
            f"'accumulate_grad_batches' must be 1 (got {accumulate})"
        )
    interval = options.get("communication_interval", 1)
    if accumulate > 1 and interval > 1 and name == "low_precision_decentralized":
        raise ConfigurationError(
            "algorithm 'low_precision_decentralized' counts 'communication_interval' in batches and communicates in "
            f"optimizer steps, so with 'accumulate_grad_batches' ({accumulate}) it must be 1 (got {interval})"
        )


def check_clipping(name: str, clip_val: float | None) -> None:
    """Raise ConfigurationError where the algorithm has used the gradients before they could be clipped."""
    if clip_val is not None and name == "qadam":
        raise ConfigurationError(
            "algorithm 'qadam' has put the gradients into its momentum when 'gradient_clip_val' would clip them (got "
            f"{clip_val}): leave it out"
        )


def check_model(
    name: str,
    options: Mapping[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    accumulate: int,
    clip_val: float | None,
) -> None:
    """Refuse models, optimizers and flags of the Trainer that the algorithm can't train with.

    Raises:
        ConfigurationError: a flag of the Trainer that the algorithm would silently get wrong.
        ModelError: a model or an optimizer that Bagua can't train.
    """
    if name != "gradient_allreduce" or not options.get("average", True):
        check_automatic_optimization(
            module,
            f"algorithm {name!r} needs one forward and one backward of the whole training_step, not several",
            "use algorithm 'gradient_allreduce' with average=True",
        )
    check_accumulation(name, options, accumulate)
    check_clipping(name, clip_val)
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise ModelError(f"Bagua can't share the state of {type(optimizer).__name__}: use another optimizer")
    check_dense_gradients(module, "Bagua sends dense gradients")
    _check_parameters(name, module, optimizers)


def frozen_in_the_run(
    module: nn.Module, parameters: Sequence[nn.Parameter], were_trained: Sequence[bool]
) -> ModelError:
    """Return the error for parameters that were frozen or unfrozen since Bagua began to average."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    changed = [one for one, before in zip(parameters, were_trained, strict=True) if one.requires_grad is not before]
    done = "unfrozen" if changed[0].requires_grad else "frozen"
    others = f" and {len(changed) - 1} other(s) were" if len(changed) > 1 else " was"
    return ModelError(
        f"{names.get(changed[0], 'a parameter')!r} of {type(module).__name__}{others} {done} in a run, and Bagua goes "
        "on averaging what was trained when the run began: fit the model anew from a checkpoint, with these parameters "
        "as they are to be, or use strategy='ddp'"
    )


def _check_parameters(name: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    known = (torch.float32,) if name == "async" else (torch.float32, torch.float16)
    for key, parameter in trained.items():
        if parameter.dtype not in known:
            raise ModelError(
                f"algorithm {name!r} knows {' and '.join(str(dtype) for dtype in known)}, and {key!r} of "
                f"{type(module).__name__} is {parameter.dtype}: convert it, or freeze it"
            )
    dtypes = {parameter.dtype: key for key, parameter in trained.items()}
    if len(dtypes) > 1:
        raise ModelError(
            "Bagua sends parameters together as one dtype, and of those that are trained "
            f"{', '.join(f'{key!r} is {dtype}' for dtype, key in dtypes.items())}: use one for all"
        )
    if name == "low_precision_decentralized":
        check_optimized_parameters(
            module, optimizers, "algorithm 'low_precision_decentralized' communicates in the optimizer's step"
        )
