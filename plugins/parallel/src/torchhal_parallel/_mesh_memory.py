"""Bytes of a training step on the ranks of a mesh: stages of a pipeline, layers in parts, gradients in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchhal.memory_estimate import ModelMemory
from torchhal.step_memory import MemoryByPhase, Moment, PhaseMemory, StepMemory, largest_parameter
from torchhal_parallel._shard_sizes import RankMemory
from torchhal_parallel._unit_memory import COMPARISON, UnitTimeline


class _Places:
    """Finds the rank of a pipeline on which a module computes, called with the modules in the order of the forward.

    Args:
        ranks: in their order.
        at: the rank of what comes before any module.
    """

    def __init__(self, ranks: Sequence[RankMemory], at: int = 0) -> None:
        self._owners: dict[str, set[int]] = {}
        names = [set(rank.tensors or ()) for rank in ranks]
        everywhere = set.intersection(*names) if len(names) > 1 else set()
        for index, own in enumerate(names):
            for name in own - everywhere:
                path = name.rpartition(".")[0]
                while path:
                    self._owners.setdefault(path, set()).add(index)
                    path = path.rpartition(".")[0]
        self._at = at

    def __call__(self, module: str) -> int:
        """Return the rank; of what is on none or on several, as the model itself, that of the module before."""
        while module and module not in self._owners:
            module = module.rpartition(".")[0]
        owners = self._owners.get(module, set())
        if len(owners) == 1:
            (self._at,) = owners
        return self._at


def stage_step(
    step: StepMemory, ranks: Sequence[RankMemory], rank: RankMemory, schedule: str, microbatches: int
) -> StepMemory:
    """Return what of a step happens on one rank of a pipeline, with as many microbatches as it has under way at once.

    Args:
        step: of the whole model with a whole batch.
        ranks: all ranks, in their order.
        rank: this one.
        schedule: name of the schedule.
        microbatches: into which the batch is divided.
    """
    index, size = rank.stage, len(ranks)
    saved, place = [0] * size, _Places(ranks)
    for module, count in step.saved.items():
        saved[place(module)] += count
    waiting = under_way_at_once(schedule, microbatches, index, size)
    before, under_way = sum(saved[:index]), (waiting - 1) * saved[index] // microbatches
    last = index == size - 1
    result = step.results.get("", 0)
    # what comes in from the stage before, and the gradients of what goes out, have places for the whole batch
    passed_on = _passed_on(step, ranks)
    received = (0 if index == 0 else passed_on[index - 1]) + (result if last else passed_on[index])
    moments = []
    places = {"forward": _Places(ranks), "backward": _Places(ranks, size - 1)}
    for moment in step.moments:
        if moment.phase != "optimizer" and places[moment.phase](moment.module) == index:
            activations = max(0, moment.activations - before) // microbatches + under_way + received
            gradients = 0 if moment.phase == "forward" else rank.estimate.gradients
            moments.append(Moment(moment.phase, moment.module, activations, gradients))
    if last and microbatches > 1:
        compared = received + _compared_outputs(step, microbatches)
        moments.append(Moment("backward", COMPARISON, compared, rank.estimate.gradients))
    own = rank.estimate.parameters / step.parameters if step.parameters else 1.0
    return replace(
        step,
        moments=tuple(moments),
        saved={"": saved[index] // microbatches + under_way + received},
        outputs=received,
        optimizer_temporary=round(step.optimizer_temporary * min(1.0, own)),
    )


def under_way_at_once(schedule: str, microbatches: int, stage: int, stages: int) -> int:
    """Return how many microbatches a stage has had the forward of when the backward of the first one begins.

    1f1b starts that when the stages behind have had it.
    """
    return min(microbatches, stages - stage) if schedule == "1f1b" else microbatches


def _compared_outputs(step: StepMemory, microbatches: int) -> int:
    """Return the bytes of the outputs that lie there while :class:`.MicrobatchChecks` compares forwards.

    Those of two microbatches, alone and together, and in float64 those together, those alone, and the difference.
    """
    of_two = 2 * step.results.get("", 0) // microbatches
    return 2 * of_two + 3 * 8 * 2 * step.result_elements // microbatches


def _passed_on(step: StepMemory, ranks: Sequence[RankMemory]) -> list[int]:
    """Return the bytes that each stage passes on: what the last module in it has returned."""
    place, found = _Places(ranks), [0] * len(ranks)
    for module, count in step.results.items():
        if module:
            found[place(module)] = count
    return found


def rank_phases(
    step: StepMemory,
    model: ModelMemory,
    rank: RankMemory,
    sizes: Mapping[str, int],
    timeline: UnitTimeline | None,
    *,
    offloads: bool,
) -> MemoryByPhase:
    """Return the phases of one rank of a mesh.

    Args:
        step: what happens on it, with its part of each layer.
        model: sizes of the whole model.
        rank: what it holds.
        sizes: of the mesh dimensions.
        timeline: of the units that it gathers; None without a shard axis.
        offloads: shards are in host memory.
    """
    estimate = rank.estimate
    held = estimate.buffers + step.batch + (0 if offloads else estimate.parameters + estimate.optimizer)
    between = held + (0 if offloads else estimate.gradients) + step.outputs
    if timeline is None:
        forward, backward = PhaseMemory(held + step.peak("forward")), PhaseMemory(held + step.peak("backward"))
    else:
        forward, backward = timeline.forward(held, 0.0), timeline.backward(held)
    if sizes["data"] > 1 and sizes["shard"] == 1 and (averaging := between + estimate.gradients) > backward.bytes:
        backward = PhaseMemory(averaging, "the averaging of gradients in one piece")
    stepping = 0 if offloads else step.optimizer_temporary
    if sizes["shard"] > 1 and sizes["pipeline"] == 1:
        stepping //= sizes["shard"]
    largest, name = largest_parameter(model)
    return MemoryByPhase(
        forward,
        backward,
        PhaseMemory(between + stepping),
        PhaseMemory(between + largest, name),
        note="; ".join(dict.fromkeys(filter(None, (step.note, estimate.note)))),
    )


class _Joined(torch.autograd.Function):
    """Parts of the last dimension on all ranks, gathered as DTensor does: along the first one, then put in order."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return torch.cat(torch.cat([part] * size).chunk(size), -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.chunk(ctx.size, -1)[0].contiguous(), None


def exchange_parts(module: nn.Module, plan: Mapping[str, Any], size: int) -> None:
    """Let layers of a model, which have one rank's part of their weights, take and give whole tensors as the plan says.

    Those of the other styles leave their results in parts.

    Args:
        module: a copy of the model, which takes a fake step.
        plan: of its layers, resolved.
        size: ranks that share each layer.
    """
    for name, style in plan.items():
        layer = module.get_submodule(name)
        if style == "colwise_rep":
            layer.register_forward_hook(lambda layer, args, output: _Joined.apply(output, size))  # type: ignore[no-untyped-call]
        elif style == "rowwise_rep" and isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda layer, args: (args[0].chunk(size, -1)[0].contiguous(), *args[1:]))


def with_region_checks(
    found: MemoryByPhase, step: StepMemory, module: nn.Module, plan: Mapping[str, Any], size: int
) -> MemoryByPhase:
    """Return phases whose forward has the comparison of a divided region with one device, made in some batches.

    The layers of a region have random weights then, whole ones, and it computes with all of what they give.

    Args:
        found: without.
        step: with a rank's part of each layer.
        module: the model.
        plan: of its layers, resolved.
        size: ranks that share each layer.
    """
    held = found.forward.bytes - step.peak("forward")
    forward, seen = found.forward, set()
    for region, layers in _regions(plan).items():
        parameters = {name: module.get_submodule(name).parameters(recurse=False) for name in layers}
        shapes = [(name.removeprefix(region), each.numel()) for name, owned in parameters.items() for each in owned]
        if (kind := tuple(shapes)) in seen:  # of blocks that are alike the first one is compared
            continue
        seen.add(kind)
        inside = region and f"{region}."
        there = [
            moment.activations
            for moment in step.moments
            if moment.phase == "forward" and (moment.module == region or moment.module.startswith(inside))
        ]
        weights = 4 * sum(count for _, count in shapes)  # in float32
        compared = weights + _compared_rows(step, {name: str(plan[name]) for name in layers}, size)
        total = held + max(there, default=0) + compared
        if total > forward.bytes:
            forward = PhaseMemory(total, f"the comparison of {region or type(module).__name__} with one device")
    return replace(found, forward=forward)


def _compared_rows(step: StepMemory, styles: Mapping[str, str], size: int) -> int:
    """Return the bytes of what the row-wise layers of a region take and give with whole layers, which is kept.

    And of the largest that one takes, in three tensors that lie there at once.
    """
    kept = largest = taken = 0
    for name, count in step.results.items():  # in the order in which they compute
        if styles.get(name, "").startswith("colwise"):
            taken = max(taken, count if styles[name] == "colwise_rep" else count * size)
        elif styles.get(name, "").startswith("rowwise"):
            kept, largest, taken = kept + taken + count, max(largest, taken), 0
    return kept + 3 * largest


def _regions(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the layers of the plan by the innermost module that has column- and row-wise ones."""
    around: dict[str, list[str]] = {}
    for name in plan:
        path = name
        while path:
            path = path.rpartition(".")[0]
            around.setdefault(path, []).append(name)
    both = {
        path: layers
        for path, layers in around.items()
        if {str(plan[layer])[:7] for layer in layers} >= {"colwise", "rowwise"}
    }
    return {
        path: layers
        for path, layers in both.items()
        if not any(other != path and other.startswith(path and f"{path}.") for other in both)
    }
