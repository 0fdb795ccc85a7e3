"""Bytes that one training step needs on a device, phase by phase: what a fake or real step measures, and per rank.

:class:`StepMemory` is what a step of the whole model takes on one device: measured once, whatever the strategy.
:meth:`.Strategy.memory_by_phase` makes of it, and of :class:`.ModelMemory`, a :class:`MemoryByPhase`: what the rank
that needs most holds in the forward, in the backward and while the optimizer steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import nn

from torchhal.memory_estimate import MemoryEstimate, ModelMemory, bytes_of

__all__ = [
    "MESSAGE_BYTES",
    "MemoryByPhase",
    "Moment",
    "PhaseMemory",
    "StepMemory",
    "TrainingStep",
    "broadcast_memory",
    "largest_parameter",
    "phases_of",
    "setup_memory",
    "share",
    "unknown_step",
]

Phase = Literal["forward", "backward", "optimizer"]

MESSAGE_BYTES: Final = 64 << 20
"""The most bytes of weights sent as one message: many small ones are slow, one of the whole doubles memory."""


class Moment(NamedTuple):
    """The greatest use of memory while one module computes, in one phase of a step.

    Args:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        module: name of the innermost module that computes, or whose backward has begun last; ``""`` for the model.
        activations: bytes of activations and temporary tensors.
        gradients: bytes of the gradients of parameters, whole ones, that lie beside them.

    .. versionadded:: 0.2
    """

    phase: Phase
    module: str
    activations: int
    gradients: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step of the whole model takes on one device, with the batch of one rank.

    Args:
        parameters: of all parameters.
        buffers: of all buffers.
        gradients: of all gradients after the backward.
        optimizer: of the optimizer's state after a step.
        batch: of the batch, which stays from the forward to the end of the step.
        moments: the use with which each module begins, and its greatest, in each phase, in the order in which they
            compute.
        saved: bytes of the activations that wait for the backward when the forward ends, by the name of the module that
            has made them.
        results: bytes of what each module has returned in the forward, by its name; ``""`` for the model.
        result_elements: floating-point numbers in what the model has returned.
        outputs: of what the step has returned, and still lies there while the optimizer steps.
        optimizer_temporary: what the optimizer adds while it steps, such as those of its foreach implementation.
        source: how it was measured: by a fake step, by a real one, or not at all, then without moments.
        note: what the numbers leave out.

    .. versionadded:: 0.2
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    batch: int = 0
    moments: tuple[Moment, ...] = ()
    saved: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)
    result_elements: int = 0
    outputs: int = 0
    optimizer_temporary: int = 0
    source: Literal["fake step", "real step", "unknown"] = "fake step"
    note: str = ""

    @property
    def is_known(self) -> bool:
        """False where no step could be measured: activations are in none of the numbers."""
        return self.source != "unknown"

    def activations(self, phase: Phase) -> int:
        """Return the greatest number of bytes of activations and temporary tensors in ``phase``."""
        return max((moment.activations for moment in self.moments if moment.phase == phase), default=0)

    def peak(self, phase: Phase, gradients: float = 1.0) -> int:
        """Return the greatest number of bytes of activations, temporaries and ``gradients`` times the gradients."""
        return max(
            (
                moment.activations + round(gradients * moment.gradients)
                for moment in self.moments
                if moment.phase == phase
            ),
            default=round(gradients * self.gradients) if phase != "forward" else 0,
        )


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on a rank at the peak of one phase.

    Args:
        bytes: all that lies on its device then.
        unit: what decides: a name, such as that of the unit whose parameters are gathered; ``""`` for the whole model.

    .. versionadded:: 0.2
    """

    bytes: int
    unit: str = ""


@dataclass(frozen=True)
class MemoryByPhase:
    """Bytes on the rank that needs most, at the peak of each phase of a training step.

    Args:
        forward: while the loss is computed.
        backward: while the gradients are.
        optimizer: while the optimizer steps, and what it has changed is sent.
        save: while a checkpoint is made of what the ranks hold; None: as much as between two steps.
        setup: while the model comes to the device and gets the values of rank 0; None: its parameters and buffers.
        note: what the numbers assume or leave out.

    .. versionadded:: 0.2
    """

    forward: PhaseMemory
    backward: PhaseMemory
    optimizer: PhaseMemory
    save: PhaseMemory | None = None
    setup: PhaseMemory | None = None
    note: str = ""

    @property
    def phases(self) -> dict[str, PhaseMemory]:
        """Each phase by its name, in their order."""
        found = {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}
        rest = {"save": self.save, "setup": self.setup}
        return found | {name: phase for name, phase in rest.items() if phase is not None}

    @property
    def phase(self) -> str:
        """The name of the phase that needs most, the first of equals."""
        phases = self.phases
        return max(phases, key=lambda name: phases[name].bytes)

    @property
    def peak(self) -> int:
        """The greatest number of bytes at once."""
        return self.phases[self.phase].bytes

    @property
    def unit(self) -> str:
        """What decides in the phase that needs most; ``""`` for the whole model."""
        return self.phases[self.phase].unit

    def plus(self, count: int, note: str = "") -> MemoryByPhase:
        """Return the same with ``count`` more bytes in every phase."""
        notes = "; ".join(filter(None, (self.note, note)))
        phases = {name: replace(phase, bytes=phase.bytes + count) for name, phase in self.phases.items()}
        return replace(self, note=notes, **phases)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak, "phase": self.phase, "unit": self.unit}


class TrainingStep(Protocol):
    """One training step of a model that can be measured as often as a strategy needs it.

    .. versionadded:: 0.2
    """

    @property
    def module(self) -> nn.Module:
        """The model, of which copies take the step."""

    def measure(
        self,
        *,
        shape_of: Callable[[str, nn.Parameter], Sequence[int] | None] | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
        foreach: bool | None = None,
    ) -> StepMemory:
        """Return what the step takes on one device.

        Args:
            shape_of: called with the name of a parameter and the parameter; returns the shape of the part that a rank
                has and computes with, None for all of it. The forward must work with such parts.
            prepare: called with the copy of the model that takes the step, before it does, to change it: to let it
                recompute activations, for example.
            foreach: whether optimizers that leave it open take all parameters at once, which needs memory; None: as
                torch does by default on the device.

        Raises:
            FakeStepError: it can't run so.
        """


def unknown_step(model: ModelMemory, reason: str, *, batch: int = 0) -> StepMemory:
    """Return the memory of a step that could not be measured: without activations and temporaries, which ``note`` says.

    Args:
        model: sizes of the model.
        reason: why it could not be measured.
        batch: bytes of the batch.

    .. versionadded:: 0.2
    """
    whole = model.estimate()
    note = "; ".join(filter(None, (whole.note, f"activations are unknown and left out: {reason}")))
    return StepMemory(
        whole.parameters, whole.buffers, whole.gradients, whole.optimizer, batch, source="unknown", note=note
    )


def phases_of(step: StepMemory, model: ModelMemory, estimate: MemoryEstimate, *, note: str = "") -> MemoryByPhase:
    """Return the phases of a rank that computes as one device does, and holds what ``estimate`` says.

    Gradients, state and what the optimizer adds are those of the whole step times the share that the rank has of them.
    The estimate's ``temporary`` lies beside all of that in every phase, as buckets of gradients do.

    Args:
        step: of the whole model, on one device.
        model: the sizes of which ``estimate`` was made.
        estimate: of the rank that needs most.
        note: added to those of the two.

    .. versionadded:: 0.2
    """
    whole = model.estimate()
    gradients = share(estimate.gradients, whole.gradients)
    stepped = share(estimate.optimizer, whole.optimizer) if whole.optimizer else gradients
    held = estimate.parameters + estimate.buffers + estimate.optimizer + estimate.temporary + step.batch
    between = held + estimate.gradients + step.outputs
    return MemoryByPhase(
        forward=PhaseMemory(held + step.peak("forward", gradients)),
        backward=PhaseMemory(held + step.peak("backward", gradients)),
        optimizer=PhaseMemory(between + round(stepped * step.optimizer_temporary)),
        save=PhaseMemory(between),
        note=joined(step.note, estimate.note, note),
    )


def broadcast_memory(tensors: Iterable[torch.Tensor], names: Iterable[str] = ()) -> tuple[int, str]:
    """Return the bytes that a rank needs beside ``tensors`` to receive them, as one message or several, and a name.

    Those of the message that takes most, of up to 64 MiB unless one tensor is larger, and of the largest tensor in it,
    which is copied out of it.

    Args:
        tensors: in the order in which they are sent.
        names: of the tensors; the name of the largest one in that message is returned.

    .. versionadded:: 0.2
    """
    messages: list[list[tuple[int, str]]] = [[]]
    for tensor, name in zip(tensors, itertools.chain(names, itertools.repeat("")), strict=False):
        count = bytes_of(tensor)
        if messages[-1] and sum(size for size, _ in messages[-1]) + count > MESSAGE_BYTES:
            messages.append([])
        messages[-1].append((count, name))
    found = [(sum(size for size, _ in message) + max(message)[0], max(message)[1]) for message in messages if message]
    return max(found, default=(0, ""))


def setup_memory(model: ModelMemory) -> PhaseMemory:
    """Return what a rank holds while the whole model, on its device, gets the values of rank 0.

    .. versionadded:: 0.2
    """
    tensors = dict([*model.module.named_parameters(), *model.module.named_buffers()])
    extra, name = broadcast_memory(tensors.values(), tensors)
    return PhaseMemory(sum(map(bytes_of, tensors.values())) + extra, name)


def share(part: int, whole: int) -> float:
    """Return ``part`` of ``whole`` as a number from 0 to 1; 1 where there is nothing to share.

    .. versionadded:: 0.2
    """
    return part / whole if whole else 1.0


def joined(*notes: str) -> str:
    """Return notes as one, each of them once."""
    return "; ".join(dict.fromkeys(filter(None, notes)))


def largest_parameter(model: ModelMemory) -> tuple[int, str]:
    """Return the bytes and the name of the model's largest parameter.

    .. versionadded:: 0.2
    """
    sizes = [(bytes_of(entry.parameter), entry.name) for entry in model.parameters]
    return max(sizes, default=(0, ""))
