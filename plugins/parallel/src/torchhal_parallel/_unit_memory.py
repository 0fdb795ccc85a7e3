"""Bytes of a training step of units that torch's ``fully_shard`` gathers and frees, phase by phase.

The order of allocations is that of FSDP2: a unit is gathered into one flat tensor and copied out of it. In the forward
that tensor stays until the next unit has been copied out; in the backward the next unit is gathered while one computes.
Its whole gradients are copied into one flat tensor, which stays until the next unit's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory
from torchhal.step_memory import (
    MemoryByPhase,
    Moment,
    PhaseMemory,
    StepMemory,
    largest_parameter,
    phases_of,
    share,
)
from torchhal_parallel._wrap_policy import find_blocks

COMPARISON: Final = "the comparison of microbatches"
"""The name of the moment at which a pipeline compares what its model gives for two microbatches."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Args:
        name: of the submodule; ``""`` for what is in no other unit.
        whole: bytes of its gathered parameters.
        gradients: bytes of its whole gradients.
        reduced: bytes of its gradients in the dtype in which they are reduced.
        part: bytes of a rank's part of its gradients.
        largest: bytes of the gradient of its largest parameter.
    """

    name: str
    whole: int = 0
    gradients: int = 0
    reduced: int = 0
    part: int = 0
    largest: int = 0


def find_units(
    model: ModelMemory,
    held: Iterable[ParameterMemory],
    shapes: Mapping[int, Sequence[int]],
    policy: Any,
    size: int,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> dict[str, Unit]:
    """Return the units of a model by their names, ``""`` among them.

    Args:
        model: on the meta device.
        held: the parameters that are sharded.
        shapes: of what is whole to a rank, where tensor parallelism has divided it before, by the parameter's id.
        policy: see :func:`~torchhal_parallel._wrap_policy.find_blocks`.
        size: ranks that share each parameter.
        param_dtype: in which they are gathered; None for their own.
        reduce_dtype: in which gradients are reduced; None for their own.
    """
    own = {id(entry.parameter): entry for entry in held if entry.parameter.dim()}

    def unit(name: str, parameters: Iterable[nn.Parameter]) -> Unit:
        whole = gradients = reduced = part = largest = 0
        for parameter in parameters:
            entry = own.pop(id(parameter), None)
            if entry is None:
                continue
            shape = list(shapes.get(id(parameter), parameter.shape))
            rows = -(-shape[0] // size)
            count = rows * size
            for length in shape[1:]:
                count *= length
            whole += count * (param_dtype or parameter.dtype).itemsize
            if parameter.requires_grad:
                gradient = count * (param_dtype or parameter.dtype).itemsize
                gradients, largest = gradients + gradient, max(largest, gradient)
                reduced += count * (reduce_dtype or param_dtype or parameter.dtype).itemsize
                part += count // size * parameter.dtype.itemsize
        return Unit(name, whole, gradients, reduced, part, largest)

    units = {name: unit(name, module.parameters()) for name, module in find_blocks(model.module, policy)}
    units[""] = unit("", model.module.parameters())
    return units


class UnitTimeline:
    """Goes through the moments of a step and adds what the units take.

    Args:
        step: of the whole model on one device.
        units: by their names.
        keep: parameters stay gathered from the forward to the backward.
        offloads: a rank's parts of the gradients are moved to host memory.
        accumulates: in a pipeline, whose microbatches leave whole gradients behind, and gathered parameters from the
            backward of one to the forward of the next; they are reduced when all are done.
        forward_follows: a microbatch's forward comes after another one's backward.
    """

    def __init__(
        self,
        step: StepMemory,
        units: Mapping[str, Unit],
        *,
        keep: bool,
        offloads: bool = False,
        accumulates: bool = False,
        forward_follows: bool = False,
    ) -> None:
        self._units = units
        self._accumulates = accumulates
        self._forward_follows = forward_follows
        self._keep = keep
        self._offloads = offloads
        self._moments = [(moment, self._unit_of(moment.module)) for moment in step.moments]
        self._root = units[""]
        self._saved = sum(step.saved.values())
        self._outputs = step.outputs
        self._order = list(dict.fromkeys(unit.name for moment, unit in self._of("forward") if unit.name))

    @property
    def knows_units(self) -> bool:
        """False for a step that was not followed module by module, though there are units."""
        return bool(self._order) or set(self._units) == {""}

    def _unit_of(self, module: str) -> Unit:
        while module and module not in self._units:
            module = module.rpartition(".")[0]
        return self._units[module]

    def _of(self, phase: str) -> list[tuple[Moment, Unit]]:
        return [(moment, unit) for moment, unit in self._moments if moment.phase == phase]

    def forward(self, base: int, gradients: float) -> PhaseMemory:
        """Return the peak of the forward beside ``base`` bytes, with a share ``gradients`` of those that lie there."""
        root = self._root
        peak = _Peak()
        if self._forward_follows:
            whole = {unit.name: unit.whole for unit in self._units.values()}
            count = sum(unit.gradients for unit in self._units.values())
            for moment, unit in self._of("forward"):
                peak.see(base + moment.activations + sum(whole.values()) + count, unit.name)
                if not self._keep:
                    whole = {name: each for name, each in whole.items() if name not in self._before(unit.name)}
            return peak.found(base)
        flat, gathered, current = root.whole, {"": root.whole}, root
        for index, (moment, unit) in enumerate(self._of("forward")):
            there = base + moment.activations + round(gradients * moment.gradients)
            if index == 0:
                peak.see(there + 2 * root.whole, root.name)
            if unit is not current:
                if current.name and not self._keep:
                    gathered.pop(current.name, None)
                if unit.name and unit.name not in gathered:
                    # the flat tensor of the unit before is freed when this one is copied out of its own
                    peak.see(there + sum(gathered.values()) + flat + 2 * unit.whole, unit.name)
                    gathered[unit.name] = flat = unit.whole
                current = unit
            peak.see(there + sum(gathered.values()) + flat, unit.name)
        return peak.found(base)

    def backward(self, base: int) -> PhaseMemory:
        """Return the peak of the backward beside ``base`` bytes."""
        if self._accumulates:
            return self._accumulating(base)
        root, peak = self._root, _Peak()
        moments = self._of("backward")
        gathered = {"": root.whole}
        if self._keep:
            gathered |= {name: self._units[name].whole for name in self._order}
        prefetched = 0 if self._keep else self._whole_before(len(self._order))
        reduced = parts = 0
        current = root
        own: dict[str, int] = {}
        finished = 0
        for index, (moment, unit) in enumerate(moments):
            there = base + moment.activations
            if index == 0 and not self._keep:  # gathered when the gradient of the loss is there and no other one
                peak.see(base + self._saved + 2 * root.whole, root.name)
            if unit is not current:
                if current.name:
                    after = base + min(moment.activations, moments[index - 1][0].activations)
                    gathered.pop(current.name, None)
                    own.pop(current.name, None)
                    finished += current.gradients
                    rest = sum(gathered.values()) + prefetched + sum(own.values()) + parts
                    # freed only when all of it is copied into the flat one
                    peak.see(after + rest + current.gradients + current.reduced + current.part, current.name)
                    reduced = current.reduced
                    parts += 0 if self._offloads else current.part
                if unit.name and not self._keep:
                    peak.see(
                        there + sum(gathered.values()) + 2 * unit.whole + sum(own.values()) + reduced + parts, unit.name
                    )
                    gathered[unit.name] = unit.whole
                    prefetched = self._whole_before(self._order.index(unit.name)) if unit.name in self._order else 0
                current = unit
            arrived = max(0, moment.gradients - finished - (own.get("", 0) if unit.name else 0))
            own[unit.name] = max(own.get(unit.name, 0), min(unit.gradients, arrived))
            extra = sum(gathered.values()) + prefetched + sum(own.values()) + reduced + parts
            peak.see(there + extra, unit.name)
        if moments:
            left = base + self._outputs
            if current.name:
                last = root.whole + own.get("", 0) + current.gradients + current.reduced + current.part + parts
                peak.see(left + last, current.name)
                parts += 0 if self._offloads else current.part
            peak.see(left + root.gradients + root.reduced + root.part + parts, root.name)
        return peak.found(base)

    def _accumulating(self, base: int) -> PhaseMemory:
        """Return the peak of the last microbatch's backward, beside the whole gradients of those before."""
        peak, units = _Peak(), list(self._units.values())
        gradients = sum(unit.gradients for unit in units)
        gathered = {unit.name: unit.whole for unit in units if self._keep or not unit.name}
        peak.see(base + self._saved + 2 * self._root.whole + gradients, self._root.name)
        for moment, unit in self._of("backward"):
            if moment.module == COMPARISON:  # made when all is reduced
                parts = sum(each.part for each in units)
                peak.see(base + moment.activations + self._root.whole + parts, moment.module)
                continue
            there = base + moment.activations + gradients
            if unit.name not in gathered:
                peak.see(there + sum(gathered.values()) + 2 * unit.whole, unit.name)
                gathered[unit.name] = unit.whole
            peak.see(there + sum(gathered.values()) + unit.largest, unit.name)  # a gradient that is added to another
        left = base + self._outputs + gradients + sum(gathered.values())
        for unit in units:  # each is freed, then reduced
            left -= gathered.get(unit.name, 0)
            peak.see(left + unit.reduced + unit.part, unit.name)
            left += (0 if self._offloads else unit.part) - unit.gradients
        return peak.found(base)

    def _before(self, name: str) -> list[str]:
        """Return the names of the units whose forward is over when that of ``name`` begins."""
        return self._order[: self._order.index(name)] if name in self._order else []

    def _whole_before(self, index: int) -> int:
        """Return the bytes of the unit that is gathered while the one at ``index`` of the forward's order computes."""
        return self._units[self._order[index - 1]].whole if index > 0 else 0


def sharded_phases(
    step: StepMemory,
    model: ModelMemory,
    estimate: MemoryEstimate,
    timeline: UnitTimeline,
    *,
    offloads: bool,
    setup: PhaseMemory | None = None,
) -> MemoryByPhase:
    """Return the phases of a rank that holds what ``estimate`` says between two steps.

    Args:
        step: of the whole model on one device.
        model: its sizes.
        estimate: of the rank; its ``temporary`` is left out, for ``timeline`` has it moment by moment.
        timeline: of the step.
        offloads: what the rank holds between two steps, buffers excepted, is in host memory.
        setup: while the model is prepared; see :class:`.MemoryByPhase`.
    """
    plain = phases_of(step, model, replace(estimate, temporary=0))
    whole = model.estimate()
    held = estimate.buffers + step.batch + (0 if offloads else estimate.parameters + estimate.optimizer)
    between = held + (0 if offloads else estimate.gradients) + step.outputs
    forward = timeline.forward(held, 0.0 if offloads else share(estimate.gradients, whole.gradients))
    backward = timeline.backward(held)
    largest, name = largest_parameter(model)
    return MemoryByPhase(
        forward=forward,
        backward=backward,
        optimizer=PhaseMemory(between) if offloads else plain.optimizer,
        save=PhaseMemory(between + largest, name),
        setup=setup,
        note=plain.note,
    )


class _Peak:
    """The greatest number so far, with the name of the unit that computes then."""

    def __init__(self) -> None:
        self.bytes = -1
        self.unit = ""

    def see(self, count: int, unit: str) -> None:
        if count > self.bytes:
            self.bytes, self.unit = count, unit

    def found(self, base: int) -> PhaseMemory:
        return PhaseMemory(max(self.bytes, base), self.unit)
