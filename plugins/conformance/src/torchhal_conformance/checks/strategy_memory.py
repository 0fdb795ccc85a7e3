"""STR-54 and STR-100: how much memory a strategy says that a model, and a step of it, takes on a rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchhal.errors import TorchhalError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory, bytes_of
from torchhal.step_memory import MemoryByPhase, Moment, StepMemory
from torchhal_conformance._assertions import require
from torchhal_conformance._check import NotApplicable, check
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


@check("STR-100", since="0.2", world_sizes=(1, 2), after=("STR-54",))
def memory_of_the_phases(rank: RankContext) -> None:
    """memory_by_phase() gives a MemoryByPhase, the same for the same arguments, on every rank and in every call.

    No number is negative, and the peak is at least what memory_per_rank() says that a rank holds between steps, unless
    a note names host memory. More activations take no fewer bytes. The model and its optimizers are left as they are.

    Why: a planner compares strategies by these numbers on one rank, and another rank would have chosen otherwise.
    Fix: compute them from the arguments and the options of the strategy alone, and add what a rank holds to each phase.
    """
    strategy = rank.create_strategy()
    module = copy.deepcopy(_Wide()).to("meta")
    optimizer = torch.optim.Adam(module.parameters())
    parameters = tuple(
        ParameterMemory(name, parameter, (torch.empty_like(parameter), torch.empty_like(parameter)))
        for name, parameter in module.named_parameters()
    )
    model = ModelMemory(module, (optimizer,), parameters)
    try:
        held = strategy.memory_per_rank(model, rank.size).total
        small, large = (_measured(strategy, model, rank.size, activations) for activations in (0, 1 << 20))
        again = _measured(strategy, model, rank.size, 1 << 20)
    except TorchhalError as error:
        raise NotApplicable(f"it refuses the model: {error}") from error
    require(large == again, f"a second call of memory_by_phase() says {again}, the first one {large}")
    everybody = rank.gather(repr(large))
    require(all(told == everybody[0] for told in everybody), f"memory_by_phase() differs between ranks: {everybody}")
    for name, phase in large.phases.items():
        require(phase.bytes >= 0, f"memory_by_phase() says {phase.bytes} bytes for the phase {name!r}")
    if "host memory" not in large.note:
        require(
            small.peak >= held,
            f"the peak of memory_by_phase() is {small.peak} bytes without activations, and memory_per_rank() says that "
            f"a rank holds {held} between steps",
        )
    for name, phase in small.phases.items():
        more = large.phases[name].bytes
        require(more >= phase.bytes, f"{name}: {more} bytes with activations, and {phase.bytes} without")
    require(
        large.backward.bytes > small.backward.bytes,
        f"memory_by_phase() leaves out the activations: backward has {large.backward.bytes} bytes with and without",
    )
    touched = [
        name for name, parameter in module.named_parameters() if not parameter.is_meta or parameter.grad is not None
    ]
    require(not touched, f"memory_by_phase() has changed the parameter {touched[:1]} of the model that it was given")
    require(not optimizer.state, "memory_by_phase() has stepped the optimizer that it was given")


def _measured(strategy: Any, model: ModelMemory, world_size: int, activations: int) -> MemoryByPhase:
    """Return what memory_by_phase() says of a step with as many bytes of activations, all of the wide layers."""
    whole = model.estimate()
    moments = (
        Moment("forward", "wide.0", activations, 0),
        Moment("forward", "wide.1", activations, 0),
        Moment("backward", "wide.1", activations, whole.gradients // 2),
        Moment("backward", "wide.0", activations, whole.gradients),
        Moment("optimizer", "", 1000, whole.gradients),
    )
    step = StepMemory(
        whole.parameters,
        whole.buffers,
        whole.gradients,
        whole.optimizer,
        100,
        moments,
        saved={"wide.0": activations // 2, "wide.1": activations // 2},
        results={"": 1000, "wide": 1000, "wide.0": activations // 2, "wide.1": 1000},
        optimizer_temporary=1000,
    )
    found = strategy.memory_by_phase(step, model, world_size)
    require(isinstance(found, MemoryByPhase), f"memory_by_phase() must return a MemoryByPhase (got {found!r})")
    return cast(MemoryByPhase, found)


def _values(state: Any) -> Iterable[Any]:
    """Return the tensors of one parameter's state that are no mere counters."""
    values = state.values() if isinstance(state, dict) else ()
    return (value for value in values if isinstance(value, torch.Tensor) and value.dim())


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the size of what this rank holds of ``tensors``, each of which counts once."""
    own = {id(tensor): tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors}
    return sum(bytes_of(tensor) for tensor in own.values() if tensor is not None and not tensor.is_meta)
