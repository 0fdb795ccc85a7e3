"""Translate the ``tp_plan`` that a model of Hugging Face's transformers carries into a tensor parallel plan.

Its form is the same, names with ``*`` for the index of a layer and names of styles. Those of the layers that the
vocabulary divides and of the norms within a head are other names. A plan is written for a family of models: what it
names and this model doesn't have is passed over.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from torchhal.errors import ConfigurationError


def _norm_of_each_head() -> SequenceParallel:
    """Return the style of a norm that computes with a rank's heads: (batch, sequence, heads, width of a head)."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


_STYLES: dict[str, Callable[[], Any]] = {
    "colwise": lambda: "colwise",
    "colwise_rep": lambda: "colwise_rep",
    "colwise_gather_output": lambda: "colwise_rep",
    "rowwise": lambda: "rowwise",
    "rowwise_rep": lambda: "rowwise_rep",
    "rowwise_split_input": lambda: "rowwise_rep",
    "embedding_rowwise": lambda: "rowwise_rep",
    "embedding_colwise": lambda: "colwise_rep",
    "replicated_with_grad_allreduce": _norm_of_each_head,
    "replicate": lambda: None,
}
"""A style for each name of transformers'; None: the layer is whole on each rank."""


def transformers_plan(module: nn.Module) -> dict[str, Any] | None:
    """Return the plan that the models of transformers in ``module`` carry, by names in ``module``; None without one.

    Args:
        module: such a model, or one with such models in it.

    Raises:
        ConfigurationError: a style that tensor parallelism doesn't know, of a module or parameter that is there.
    """
    found: dict[str, Any] = {}
    outer: list[str] = []
    for name, model in module.named_modules():
        plan = _plan_of(model)
        if plan is None or any(name.startswith(prefix) for prefix in outer):
            continue
        outer.append(f"{name}." if name else "")  # the models inside of it are in its plan
        for pattern, style in plan.items():
            if _is_there(model, pattern) and (known := _translated(pattern, style, type(model).__name__)) is not None:
                found[f"{name}.{pattern}".lstrip(".")] = known
    return found or None


def _plan_of(model: nn.Module) -> Mapping[str, Any] | None:
    plan = getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan and hasattr(model, "config"):
        return plan
    return None


def _is_there(model: nn.Module, pattern: str) -> bool:
    wanted = pattern.split(".")
    names = [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]
    return any(
        len(parts := name.split(".")) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)) for name in names
    )


def _translated(pattern: str, style: Any, model: str) -> Any:
    if style not in _STYLES:
        raise ConfigurationError(
            f"the tp_plan of {model} gives {pattern!r} the style {style!r}, which has no equal among those of tensor "
            f"parallelism (known: {', '.join(map(repr, _STYLES))}): give the strategy a plan of its own (plan=...) "
            "that leaves the layer whole, or take another strategy, such as zero3"
        )
    return _STYLES[style]()
