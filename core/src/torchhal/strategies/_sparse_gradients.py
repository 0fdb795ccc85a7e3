"""Make sparse gradients fit for DistributedDataParallel, which divides them in place and waits for each of them.

The values of an embedding's sparse gradient are the gradient of its output itself, not a copy. Where the output is
added to something, as those of word and position embeddings are, the same tensor is the gradient of the other summand,
and backward goes on with what DistributedDataParallel has divided by the number of ranks already: torch 2.13 trains
wrongly in silence. And ``find_unused_parameters`` is for dense gradients: a sparse one that a step doesn't compute is
an error there, which names nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

MISSING = "Expected sparse gradient to be defined"
"""Beginning of torch's error for a sparse gradient that a step doesn't compute."""


def sparse_weights(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return the weights of which DistributedDataParallel expects sparse gradients, with their names.

    A sparse gradient of any other parameter is an error of its.
    """
    return {
        part.weight: f"{prefix}.weight" if prefix else "weight"
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


def copy_sparse_gradients(weights: Iterable[torch.Tensor]) -> list[Any]:
    """Let backward accumulate copies of the sparse gradients of ``weights``; return the handles of the hooks.

    What is frozen has no gradient, and can't have a hook.
    """
    return [
        weight.register_hook(_copy)  # type: ignore[no-untyped-call]
        for weight in weights
        if weight.requires_grad
    ]


def _copy(gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient.clone() if gradient.is_sparse else None


def names_of_unused(weights: Mapping[torch.Tensor, str], loss: torch.Tensor) -> list[str]:
    """Return the names of the ``weights`` on which ``loss`` doesn't depend."""
    used, seen, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            used.add(getattr(node, "variable", None))
            left += [following for following, _ in node.next_functions]
    return [name for weight, name in weights.items() if weight not in used]
