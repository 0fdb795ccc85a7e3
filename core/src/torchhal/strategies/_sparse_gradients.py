"""Give sparse gradients memory of their own, since DistributedDataParallel divides them in place.

The values of an embedding's sparse gradient are the gradient of its output itself, not a copy. Where the output is
added to something, as those of word and position embeddings are, the same tensor is the gradient of the other summand,
and backward goes on with what DistributedDataParallel has divided by the number of ranks already: torch 2.13 trains
wrongly in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def copy_sparse_gradients(module: nn.Module) -> list[Any]:
    """Let backward accumulate copies of sparse gradients; return the handles of the hooks.

    These are the layers of which DistributedDataParallel expects sparse gradients. Any other one is an error of its.
    """
    return [
        part.weight.register_hook(_copy)  # type: ignore[no-untyped-call]
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]


def _copy(gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient.clone() if gradient.is_sparse else None
