"""STR-54: how much memory a strategy says that a model takes on a rank, beside what the ranks hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory, bytes_of
from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, running

PADDING: Final = 1024
"""Bytes that a rank may hold beyond the estimate, for parts that are aligned."""


class _Wide(Regression):
    """Model of 34 KB, beside which alignments are small."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(2, 2048), nn.Linear(2048, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(super().forward(x))  # type: ignore[no-any-return]


@check("STR-54", since="0.2", world_sizes=(1, 2), after=("STR-14",))
def memory_of_the_model(rank: RankContext) -> None:
    """No rank holds more of a model than memory_per_rank() says before the set-up.

    Parameters, buffers, gradients and the state of Adam are compared one by one, where they lie in tensors of torch.

    Why: a job was started on as many devices as the estimate asked for, and ran out of memory in its first step.
    Fix: divide only what the ranks really divide, and count what a rank keeps whole.
    """
    strategy = rank.create_strategy()
    module = copy.deepcopy(_Wide()).to("meta")
    parameters = tuple(
        ParameterMemory(name, parameter, (torch.empty_like(parameter), torch.empty_like(parameter)))
        for name, parameter in module.named_parameters()
    )
    adam = torch.optim.Adam(module.parameters())
    estimate = strategy.memory_per_rank(ModelMemory(module, (adam,), parameters), rank.size)
    require(isinstance(estimate, MemoryEstimate), f"memory_per_rank() must return a MemoryEstimate (got {estimate!r})")
    with running(rank, _Wide(), torch.optim.Adam, strategy, may_refuse=True, lr=0.01) as run:
        run.train(0, 1)
        held = {
            "parameters": _bytes(run.module.parameters()),
            "buffers": _bytes(run.module.buffers()),
            "gradients": _bytes(parameter.grad for parameter in run.module.parameters()),
            "optimizer": _bytes(value for state in run.optimizer.state.values() for value in _values(state)),
        }
        rank.gather("measured")
    for name, count in held.items():
        told = getattr(estimate, name)
        require(count <= told + PADDING, f"{name}: this rank holds {count} bytes, and memory_per_rank() says {told}")
    require(estimate.temporary >= 0, f"memory_per_rank() says {estimate.temporary} temporary bytes")


def _values(state: Any) -> Iterable[Any]:
    """Return the tensors of one parameter's state that are no mere counters."""
    values = state.values() if isinstance(state, dict) else ()
    return (value for value in values if isinstance(value, torch.Tensor) and value.dim())


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the size of what this rank holds of ``tensors``, each of which counts once."""
    own = {id(tensor): tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors}
    return sum(bytes_of(tensor) for tensor in own.values() if tensor is not None and not tensor.is_meta)
