"""Choose the cheapest strategy with which a training step fits into the memory of each device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchhal.errors import message_of
from torchhal.memory_estimate import format_bytes
from torchhal.resolve._options import StrategyOption
from torchhal.step_memory import MemoryByPhase, StepMemory
from torchhal.strategies import Strategy
from torchhal.trainer.planning._measured_steps import MeasuredSteps

MARGIN: Final = 0.12
"""Share of the predicted peak that has to be free beside it: workspaces of kernels, fragments, libraries."""


class NoCandidateLeftError(Exception):
    """Every candidate is refused, or has failed."""


def with_margin(peak: int) -> int:
    """Return the bytes that a device must have for a predicted ``peak``."""
    return round(peak * (1 + MARGIN))


@dataclass(frozen=True)
class Candidacy:
    """A candidate and what became of it.

    Attributes:
        option: the strategy and its options.
        fused: its optimizers step by fused kernels.
        phases: what it needs on each device; None where it was not measured.
        step: that they follow from.
        reason: why it was not measured; "" where it was.
    """

    option: StrategyOption
    fused: bool = False
    phases: MemoryByPhase | None = None
    step: StepMemory | None = None
    reason: str = ""

    @property
    def strategy(self) -> Strategy:
        """The strategy itself, which no run uses."""
        assert self.option.plan is not None
        strategy: Strategy = self.option.plan.strategy.value
        return strategy

    @property
    def is_known(self) -> bool:
        """Whether activations are in ``phases``."""
        return self.step is not None and self.step.is_known

    @property
    def name(self) -> str:
        return f"{self.option.name}, fused optimizer" if self.fused else self.option.name

    def fits(self, limit: int) -> bool:
        """Return whether it fits with the margin, as far as is known."""
        return self.phases is not None and with_margin(self.phases.peak) <= limit

    def decided_by(self) -> str:
        """Return the phase that needs most, and the part of the model that decides in it."""
        assert self.phases is not None
        return f"{self.phases.phase} of {self.phases.unit!r}" if self.phases.unit else self.phases.phase


@dataclass(frozen=True)
class Choice:
    """The strategy of a run, and the candidates before it.

    Attributes:
        chosen: the first that fits; where none does, the one that needs least.
        rows: all that were looked at, in their order.
        limit: bytes of each device.
        fits: whether ``chosen`` fits with the margin.
    """

    chosen: Candidacy
    rows: tuple[Candidacy, ...] = field(repr=False)
    limit: int
    fits: bool

    @property
    def peak(self) -> int:
        """Bytes that each device needs for what was chosen."""
        assert self.chosen.phases is not None
        return self.chosen.phases.peak

    @property
    def missing(self) -> int:
        """Bytes that each device lacks for it, and for the margin; 0 where it fits."""
        return max(0, with_margin(self.peak) - self.limit)

    def reason(self) -> str:
        """Return in one sentence why it was chosen."""
        assert self.chosen.phases is not None
        needed = f"{format_bytes(self.chosen.phases.peak)} of {format_bytes(self.limit)} on each device"
        if not self.chosen.is_known:
            needed += ", without activations, which are unknown"
        said = f"{self.chosen.name} needs {needed} ({self.chosen.decided_by()})"
        measured = [row for row in self.rows if row.phases is not None and row is not self.chosen]
        if measured:
            before = measured[0]
            assert before.phases is not None
            said += f"; {before.name} would need {format_bytes(before.phases.peak)} ({before.decided_by()})"
        return said


def candidates(options: Sequence[StrategyOption], steps: MeasuredSteps, world_size: int) -> Iterator[Candidacy]:
    """Yield each option, measured, and with a fused optimizer where that steps at the peak; the cheapest first.

    An option that can't help is left out: several processes of which there is one, and what needs the same as the
    option before.
    """
    seen: list[MemoryByPhase] = []
    latest: dict[str, MemoryByPhase] = {}
    normed = _has_batch_norm(steps.memory.module)
    for option in options:
        if option.plan is None:
            yield Candidacy(option, reason=option.refusal)
            continue
        strategy = option.plan.strategy.value
        if world_size == 1 and strategy.multi_device and seen and not option.options:
            continue
        if option.candidate.splits_batches and normed:
            yield Candidacy(option, reason="batch norms would see parts of a batch")
            continue
        plain = latest.get(option.alias)
        if option.candidate.recomputes and plain is not None and plain.phase not in ("forward", "backward"):
            yield Candidacy(option, reason=f"activations don't decide, but the phase {plain.phase}")
            continue
        try:
            found = steps.measure(strategy, world_size)
        except Exception as error:  # of a plugin's strategy: one of many
            yield Candidacy(option, reason=" ".join(message_of(error).split()))
            continue
        phases = found.phases
        latest.setdefault(option.alias, phases)
        if any(_same(phases, other) for other in seen):
            continue
        seen.append(phases)
        yield Candidacy(option, False, phases, found.step)
        if phases.phase == "optimizer" and steps.can_fuse:
            try:
                fused = steps.measure(strategy, world_size, fused=True)
            except Exception:  # as above, and without it there is the plain one
                continue
            if fused.phases.peak < phases.peak and fused.step.is_known:
                yield Candidacy(option, True, fused.phases, fused.step)


def _same(first: MemoryByPhase, second: MemoryByPhase) -> bool:
    return [phase.bytes for phase in first.phases.values()] == [phase.bytes for phase in second.phases.values()]


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def choose(found: Iterable[Candidacy], limit: int, excluded: Collection[str] = ()) -> Choice:
    """Return the first candidate that fits with the margin, or the one that needs least.

    Args:
        found: see :func:`candidates`; read until one fits.
        limit: bytes of each device.
        excluded: the names of those that have run out of memory.

    Raises:
        NoCandidateLeftError: nothing is left.
    """
    rows: list[Candidacy] = []
    for candidacy in found:
        rows.append(candidacy)
        if candidacy.name not in excluded and candidacy.fits(limit):
            return Choice(candidacy, tuple(rows), limit, True)
    return least(rows, limit, excluded)


def least(rows: Sequence[Candidacy], limit: int, excluded: Collection[str] = ()) -> Choice:
    """Return the choice where no candidate fits: the one that needs least."""
    left = [row for row in rows if row.phases is not None and row.name not in excluded]
    if not left:
        raise NoCandidateLeftError("no candidate is left")
    best = min(left, key=lambda row: row.phases.peak if row.phases else 0)
    return Choice(best, tuple(rows), limit, False)
