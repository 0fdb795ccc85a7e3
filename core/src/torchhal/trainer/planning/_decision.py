"""Decide on rank 0 which strategy a fit has: measure a step, and take the cheapest candidate that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from torchhal.composition import Composable
from torchhal.errors import TorchhalError
from torchhal.memory_estimate import bytes_of, format_bytes
from torchhal.plugin import Candidate
from torchhal.precision import needs_closure
from torchhal.resolve import Plan, check_fit, composition_of
from torchhal.resolve._options import StrategyOption, strategy_options
from torchhal.strategies import Strategy
from torchhal.trainer._auto_strategy import default_decision
from torchhal.trainer._trial import unused_copy
from torchhal.trainer.planning._batch_sizes import MOST_SAMPLES, batch_of_size, samples_of
from torchhal.trainer.planning._choice import (
    MARGIN,
    Candidacy,
    Choice,
    NoCandidateLeftError,
    candidates,
    choose,
    least,
    with_margin,
)
from torchhal.trainer.planning._measured_steps import MeasuredSteps
from torchhal.trainer.planning._remedies import remedies
from torchhal.trainer.planning._trained_model import TrainedModel, copy_for_planning
from torchhal.trainer.planning._trial_steps import OUT_OF_MEMORY
from torchhal.trainer.run_state import RunState

_TIGHT: Final = 0.7
"""Share of a device's memory from which on a candidate is tried before the fit begins."""

_MATTERS: Final = 0.1
"""The same for one whose activations are not known, by the rest."""

_SAME: Final = 0.05
"""Share by which the memory that is free on a device may differ from what a kept decision was made for."""


class Planner:
    """Chooses among the candidates of one fit.

    Args:
        run: of rank 0, before its set-up.
        base: the plan with the default strategy.
        limit: bytes that each device has.
        keeps_batch_size: the loader has the batches of the continued run, which stay.

    Raises:
        Exception: what the model, its optimizers or its data raise where they are copied.
    """

    def __init__(self, run: RunState, base: Plan, limit: int, *, keeps_batch_size: bool = False) -> None:
        assert run.auto is not None
        self._run, self._limit, self._base = run, limit, base
        self._default = unused_copy(base).build()
        plan = unused_copy(base)
        trained = copy_for_planning(run, plan.precision.value)
        self._steps = MeasuredSteps(
            trained.memory,
            trained.batch,
            accelerator=run.strategy.accelerator,
            device=run.strategy.root_device,
            precision=self._default.precision,
            make=trained.make,
            why_unknown=trained.why_unknown,
        )
        self._trained = trained
        self._keeps = keeps_batch_size
        self._samples = 0
        """Of a batch, where the planner finds its size; else 0."""
        self._most_samples = MOST_SAMPLES
        if run.auto.finds_batch_size:
            self._samples = samples_of(trained.batch)
            if keeps_batch_size:
                self._most_samples = self._samples
            elif trained.most_samples is not None:
                self._most_samples = max(self._samples, min(MOST_SAMPLES, trained.most_samples))
        if run.auto.request.is_auto_strategy:
            options = strategy_options(plan, run.auto.request)
        else:
            options = [StrategyOption(plan.strategy.alias, Candidate(0), plan)]
        self._options = [self._allowed(option) for option in options]
        self._left = candidates(self._options, self._steps, run.strategy.world_size)
        self._seen: list[Candidacy] = []
        self._made_for = made_for(run, trained)
        self._failed: set[str] = set()
        self._refusals = 0

    def decide(self, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the decision as plain data.

        Args:
            kept: that of the run that is continued; it stays where it was made for the same.
        """
        if kept is not None and (same := self._kept(kept)) is not None:
            return same
        choice = choose(self._rows(), self._limit, self._failed)
        if not choice.fits and choice.chosen.is_known and choice.peak > choice.limit and not self._is_host:
            return {"error": self._why_nothing_fits(choice)}
        step = choice.chosen.step
        matters = not self._is_default(choice.chosen) or with_margin(choice.peak) > _MATTERS * self._limit
        if step is not None and not step.is_known and matters:
            self._run.warn_once(f"strategy='auto' is {choice.chosen.name}, by what is known: {step.note}")
        if not choice.fits:
            self._run.warn_once(
                f"no strategy is sure to fit: {choice.reason()}, which is {format_bytes(choice.missing)} short of the "
                f"margin of {MARGIN:.0%}"
            )
        return self._decision(choice)

    def _largest_batch(self, choice: Choice) -> int:
        """Return the largest power of two of samples that fits, at least those of the loader's batches."""
        found, size = self._samples, 1 << self._samples.bit_length()
        if not choice.fits or not choice.chosen.is_known:
            return found
        while size <= self._most_samples:
            steps = self._steps.with_batch(batch_of_size(self._steps.batch, size))
            world_size = self._run.strategy.world_size
            measured = steps.measure(choice.chosen.strategy, world_size, fused=choice.chosen.fused)
            if not measured.step.is_known or with_margin(measured.phases.peak) > self._limit:
                break
            found, size = size, 2 * size
        return found

    def decide_again(self, decision: Mapping[str, Any], why: str) -> dict[str, Any]:
        """Return the next decision, as the candidate of ``decision`` could not take its first steps.

        Args:
            decision: the last one.
            why: what became of it on some rank.
        """
        if why == OUT_OF_MEMORY and decision["batch_size"] > self._samples:
            self._most_samples = max(self._samples, decision["batch_size"] // 2)
            return self.decide()
        self._failed.add(decision["name"])
        self._refusals += why != OUT_OF_MEMORY
        try:
            following = self.decide()
        except NoCandidateLeftError:
            following = {"error": self._why_nothing_fits(least(list(self._rows()), self._limit))}
        # what every strategy refuses may be the model's own: the fit says so, by the default strategy
        return default_decision(self._base) if "error" in following and self._refusals else following

    @property
    def _is_host(self) -> bool:
        """Whether the memory is the host's, of which there may be more than is free, by swapping."""
        return self._run.strategy.root_device.type == "cpu"

    def _rows(self) -> Iterator[Candidacy]:
        """Yield the candidates; each is measured once."""
        yield from self._seen
        for candidacy in self._left:
            self._seen.append(candidacy)
            yield candidacy

    def _batches(self, candidacy: Candidacy) -> int:
        """Return the batches of a step for each of the default strategy."""
        return batch_factor(self._default, candidacy.strategy)

    def _decision(self, choice: Choice) -> dict[str, Any]:
        size = self._largest_batch(choice) if self._samples else 0
        grown = size > self._samples
        return {
            **self._facts(choice.chosen),
            "reason": choice.reason(),
            "tried": self._is_tried(choice, grown=grown),
            "batch_size": size,
            "limit": self._limit,
        }

    def _facts(self, candidacy: Candidacy) -> dict[str, Any]:
        """Return what a decision for a candidate says of it, and what it depends on."""
        return {
            "alias": candidacy.option.alias,
            "options": dict(candidacy.option.options),
            "name": candidacy.name,
            "fused": candidacy.fused,
            "batches": self._batches(candidacy),
            "made_for": self._made_for,
        }

    def _is_tried(self, choice: Choice, *, grown: bool) -> bool:
        """Return whether two steps are taken before the fit begins."""
        if not self._trained.is_repeatable:
            return False
        if grown or not self._is_default(choice.chosen):
            return True
        if self._is_host:  # a process that takes too much is ended by the system, without an error
            return False
        return with_margin(choice.peak) > (_TIGHT if choice.chosen.is_known else _MATTERS) * self._limit

    def _is_default(self, candidacy: Candidacy) -> bool:
        return not candidacy.fused and candidacy.option.name == self._base.strategy.alias

    def _kept(self, kept: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the decision of the run that is continued, if it would be made again; it comes from a file."""
        limit = kept.get("limit")
        if kept.get("made_for") != self._made_for or type(limit) is not int:
            return None
        if abs(limit - self._limit) > _SAME * limit:
            return None
        for option in self._options:
            same = (option.alias, dict(option.options)) == (kept.get("alias"), kept.get("options"))
            if same and option.plan is not None and (kept.get("fused") is not True or self._steps.can_fuse):
                facts = self._facts(Candidacy(option, kept.get("fused") is True))
                return {
                    **facts,
                    "reason": f"{facts['name']} is that of the run which is continued",
                    "tried": False,
                    "batch_size": self._samples,
                    "limit": limit,
                }
        return None

    # -- what a candidate may not do ----------------------------------------------------------------------------

    def _allowed(self, option: StrategyOption) -> StrategyOption:
        """Return the option, refused if it would train something else than the default strategy."""
        if option.plan is None:
            return option
        reason = self._why_not(option.plan.build())
        return option if not reason else StrategyOption(option.alias, option.candidate, None, reason)

    def _why_not(self, strategy: Strategy) -> str:
        run = self._run
        composition = composition_of(strategy, run.plan.world_size)
        for kind, parts in (("logger", run.loggers), ("callback", run.callbacks)):
            for part in parts:
                if isinstance(part, Composable):
                    try:
                        check_fit(kind, part, composition)
                    except TorchhalError as error:
                        return str(error)
        if run.by_hand and strategy.needs_trainer:
            return f"it {strategy.needs_trainer}"
        if run.sync_batchnorm:
            try:
                strategy.check_sync_batchnorm(run.plan.world_size)
            except TorchhalError as error:
                return str(error)
        factor = batch_factor(self._default, strategy)
        if factor == 1:
            return ""
        if run.by_hand or not getattr(run.module, "automatic_optimization", True):
            return f"its ranks share batches, and a loop of the model's own would take {factor} of them for a step"
        if not self._trained.is_divided:
            return (
                f"its ranks share batches, so that a step takes {factor} of them, and the training data is not a "
                "DataLoader of samples by number that torchhal divides"
            )
        if any(map(needs_closure, self._trained.memory.optimizers)):
            return f"its ranks share batches, of which a step with a closure can't take {factor}"
        counted = [
            name
            for name in ("limit_train_batches", "val_check_interval", "overfit_batches")
            if isinstance(value := getattr(run, name), int) and not isinstance(value, bool) and value
        ]
        if counted or not run.use_distributed_sampler:
            what = f"{counted[0]!r} counts batches" if counted else "'use_distributed_sampler' is off"
            return f"its ranks share batches, so that a step takes {factor} of them, and {what}"
        try:
            strategy.check_accumulation(factor * run.accumulate_grad_batches)
        except TorchhalError as error:
            return str(error)
        return ""

    def _why_nothing_fits(self, choice: Choice) -> str:
        found = remedies(choice, self._options, self._steps, self._run.strategy.world_size, self._limit)
        kept = f", with the {self._samples} samples in a batch that the checkpoint has," if self._keeps else ""
        name = type(self._run.module).__name__
        return (
            f"no strategy makes a training step of {name}{kept} fit: {choice.reason()}. That is "
            f"{format_bytes(choice.missing)} too much, with the margin of {MARGIN:.0%}. {found}; `torchhal explain "
            "--model --batch --memory` shows every candidate, and a strategy that is named is not refused"
        )


def batch_factor(before: Strategy, after: Strategy) -> int:
    """Return how many batches ``after`` takes for a step of the samples that ``before`` takes in one."""
    kwargs = [strategy.distributed_sampler_kwargs or {"num_replicas": 1} for strategy in (before, after)]
    return max(1, kwargs[0]["num_replicas"] // kwargs[1]["num_replicas"])


def made_for(run: RunState, trained: TrainedModel) -> dict[str, Any]:
    """Return what a decision depends on, beside the memory of a device, as plain data."""
    batch = [list(leaf.shape) for leaf in tree_leaves(trained.batch) if isinstance(leaf, torch.Tensor)]
    parameters = trained.memory.module.parameters()
    return {
        "device": run.strategy.root_device.type,
        "world_size": run.strategy.world_size,
        "precision": run.plan.precision.alias,
        "parameters": sum(map(bytes_of, parameters)),
        "optimizers": [type(optimizer).__name__ for optimizer in trained.memory.optimizers],
        "batch": batch,
    }
