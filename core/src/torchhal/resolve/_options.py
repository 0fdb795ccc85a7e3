"""List the strategies that may replace the one of ``strategy="auto"`` in a Plan, in the order of their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchhal import registry
from torchhal.composition import Composition
from torchhal.errors import TorchhalError, UnsupportedCombinationError
from torchhal.plugin import Candidate
from torchhal.registry import RegistryEntry
from torchhal.registry._discovery import describe
from torchhal.resolve._alias_options import read_alias
from torchhal.resolve._compatibility import check_parts
from torchhal.resolve._launcher_choice import launcher
from torchhal.resolve._plan import Plan, Request, ResolvedComponent
from torchhal.resolve._refusals import check_fits
from torchhal.resolve._user_arguments import (
    apply_accelerator_default,
    from_alias,
    from_entry,
    group_by_kind,
)
from torchhal.strategies import ParallelStrategy


@dataclass(frozen=True)
class StrategyOption:
    """A strategy that a run may have, on the processes and devices that its Plan has anyhow.

    Attributes:
        alias: of the strategy.
        candidate: its options, and what they cost.
        plan: with this strategy; None where it can't be.
        refusal: why it can't be; empty where it can.
    """

    alias: str
    candidate: Candidate
    plan: Plan | None
    refusal: str = ""

    @property
    def options(self) -> Mapping[str, Any]:
        return self.candidate.options

    @property
    def argument(self) -> str | dict[str, dict[str, Any]]:
        """What ``Trainer(strategy=...)`` takes for it."""
        return {self.alias: dict(self.options)} if self.options else self.alias

    @property
    def name(self) -> str:
        """The alias, with the options in brackets."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.alias} ({options})" if options else self.alias


def strategy_options(plan: Plan, request: Request) -> list[StrategyOption]:
    """Return the strategy of ``plan``, and each that declares itself a candidate, the cheapest first.

    Args:
        plan: to which ``request`` was resolved, with ``strategy="auto"``.
        request: the Trainer's hardware arguments.
    """
    own = StrategyOption(plan.strategy.alias, Candidate(0), plan)
    found: list[StrategyOption] = []
    local = plan.strategy.value.num_local_processes(len(plan.device_indices))
    for entry in registry.entries("strategy"):
        if not entry.component.candidates or entry.problem:
            continue
        alias = entry.component.alias
        if apply_accelerator_default("strategy", alias, plan.accelerator.value) != alias:
            continue  # this hardware has one of its own in its place
        is_own = _makes(entry, plan.strategy)
        for candidate in entry.component.candidates:
            ranks = local if candidate.within_node and plan.world_size > local else plan.world_size
            if ranks % candidate.multiple_of:
                continue
            if is_own and not candidate.options:
                own = replace(own, candidate=candidate)
            else:
                found.append(_option(plan, request, entry, candidate))
    return sorted([own, *found], key=lambda option: option.candidate.cost)


def _makes(entry: RegistryEntry, strategy: ResolvedComponent) -> bool:
    """Return whether ``entry`` makes the strategy, apart from how its processes are started."""
    if strategy.alias == entry.component.alias:
        return True
    try:
        return type(strategy.value) is entry.load() and not entry.component.defaults
    except TorchhalError:
        return False


def _option(plan: Plan, request: Request, entry: RegistryEntry, candidate: Candidate) -> StrategyOption:
    alias = entry.component.alias
    try:
        return StrategyOption(alias, candidate, replan(plan, request, entry, candidate.options))
    except Exception as error:  # one of many, whose reason is shown where it is asked for
        reason = str(error) if isinstance(error, TorchhalError) else describe(error)
        return StrategyOption(alias, candidate, None, " ".join(reason.split()))


def replan(
    plan: Plan,
    request: Request,
    entry: RegistryEntry,
    options: Mapping[str, Any],
    *,
    reason: str = "a candidate of strategy='auto'",
) -> Plan:
    """Return ``plan`` with another strategy; all other components and the processes stay.

    Raises:
        TorchhalError: the strategy can't be used here, doesn't fit the other parts, or has other processes.
    """
    before, alias = plan.strategy.value, entry.component.alias
    strategy = _create(entry, options, before, reason)
    chosen = strategy.value
    environment = plan.cluster_environment
    if environment is None:
        local = apply_accelerator_default("cluster_environment", "local", plan.accelerator.value)
        environment = from_alias("cluster_environment", local, "one process")
    given = group_by_kind(request.plugins).get("checkpoint_io") is not None
    if not given and chosen.default_checkpoint_io != before.default_checkpoint_io:
        raise UnsupportedCombinationError(
            f"strategy {alias!r} saves by checkpoint IO {chosen.default_checkpoint_io!r}, and a run that is continued "
            f"with another strategy could not read that: name both, or plugins={chosen.default_checkpoint_io!r}"
        )
    count, nodes = len(plan.device_indices), plan.num_nodes or 1
    check_parts(plan.accelerator, strategy, plan.precision, environment, count, nodes)
    processes, needed = before.num_local_processes(count), chosen.num_local_processes(count)
    how = launcher(strategy, environment, plan.accelerator, needed, nodes)[0]
    if (needed, how) != (processes, plan.launcher):
        raise UnsupportedCombinationError(
            f"strategy {alias!r} has {needed} process(es) on a node, started by {how!r}, and not {processes} by "
            f"{plan.launcher!r} as {plan.strategy.alias!r}"
        )
    check_fits(
        Composition(
            accelerator=plan.accelerator.value,
            precision=plan.precision.value,
            checkpoint_io=plan.checkpoint_io.value,
            cluster_environment=environment.value,
            strategy=chosen,
            devices=plan.devices,
            num_nodes=plan.num_nodes,
            world_size=plan.world_size,
        )
    )
    return replace(
        plan,
        strategy=strategy,
        cluster_environment=environment if chosen.multi_device else plan.cluster_environment,
    )


def _create(entry: RegistryEntry, options: Mapping[str, Any], before: Any, reason: str) -> ResolvedComponent:
    """Return the strategy, whose processes start as those of the strategy ``before`` it."""
    given = dict(options)
    start = getattr(before, "start_method", None)
    if start is not None and issubclass(entry.load(), ParallelStrategy):
        given.setdefault("start_method", start)
    return from_entry(entry, read_alias("strategy", {entry.component.alias: given}), reason)
