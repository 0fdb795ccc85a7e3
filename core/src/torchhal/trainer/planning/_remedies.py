"""Find what would make a training step fit where no strategy does: more devices, a smaller batch, a smaller dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchhal.errors import TorchhalError
from torchhal.resolve._options import StrategyOption
from torchhal.step_memory import StepMemory
from torchhal.trainer.planning._choice import Choice, with_margin
from torchhal.trainer.planning._measured_steps import MeasuredSteps


def remedies(
    choice: Choice, options: Sequence[StrategyOption], steps: MeasuredSteps, world_size: int, limit: int
) -> str:
    """Return one sentence without a full stop.

    Args:
        choice: the candidate that needs least.
        options: all candidates.
        steps: by which they are measured.
        world_size: number of processes.
        limit: bytes of each device.
    """
    found = list(filter(None, (_devices(options, steps, world_size, limit), _batch(choice, steps, world_size, limit))))
    dtypes = {parameter.dtype.itemsize for parameter in steps.memory.module.parameters()}
    if dtypes == {4} and with_margin(choice.peak) // 2 <= limit:
        found.append("precision='bf16-true', which halves everything")
    if choice.chosen.phases is not None and choice.chosen.phases.phase == "setup":
        found.append("layers that are built in configure_model(), so that no device has all of them at once")
    if not found:
        return "Neither 64 times the devices nor a batch of a 64th would bring it"
    return f"What would bring it: {', or '.join(found)}"


def _devices(options: Sequence[StrategyOption], steps: MeasuredSteps, world_size: int, limit: int) -> str:
    for factor in (2, 4, 8, 16, 32, 64):
        for option in options:
            if option.plan is None or option.candidate.multiple_of > 1:
                continue
            strategy = option.plan.strategy.value
            if not strategy.multi_device:
                continue
            try:
                peak = steps.measure(strategy, world_size * factor).phases.peak
            except TorchhalError:
                continue
            if with_margin(peak) <= limit:
                return f"{world_size * factor} devices, with {option.name}"
    return ""


def _batch(choice: Choice, steps: MeasuredSteps, world_size: int, limit: int) -> str:
    """Return the largest batch with which it would fit, if activations grow with the batch."""
    step = choice.chosen.step
    if step is None or not step.is_known:
        return ""
    for part, name in ((2, "half"), (4, "a quarter"), (8, "an eighth"), (16, "a 16th"), (32, "a 32nd"), (64, "a 64th")):
        phases = choice.chosen.strategy.memory_by_phase(_with_part_of_batch(step, part), steps.memory, world_size)
        if with_margin(phases.peak) <= limit:
            return f"about {name} of the batch"
    return ""


def _with_part_of_batch(step: StepMemory, part: int) -> StepMemory:
    return replace(
        step,
        batch=step.batch // part,
        moments=tuple(
            moment if moment.phase == "optimizer" else moment._replace(activations=moment.activations // part)
            for moment in step.moments
        ),
        saved={name: count // part for name, count in step.saved.items()},
        results={name: count // part for name, count in step.results.items()},
        outputs=step.outputs // part,
    )
