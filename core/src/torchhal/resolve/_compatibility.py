"""Verify that the chosen components fit each other. Every refusal names both sides."""

from __future__ import annotations

from torchhal._overrides import overrides
from torchhal.accelerators import Accelerator
from torchhal.distributed.process import launched_by
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import Precision
from torchhal.resolve._capability_match import check_needs, check_precision, listed
from torchhal.resolve._plan import ResolvedComponent
from torchhal.strategies import ParallelStrategy, Strategy


def check_parts(
    accelerator: ResolvedComponent,
    strategy: ResolvedComponent,
    precision: ResolvedComponent,
    environment: ResolvedComponent,
    devices: int,
    nodes: int,
) -> None:
    """Raise UnsupportedCombinationError unless the parts can work together."""
    hardware: Accelerator = accelerator.value
    chosen: Strategy = strategy.value
    if not chosen.multi_device and (devices > 1 or nodes > 1):
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} uses one device, but {devices} device(s) on {nodes} node(s) were asked for: "
            f"use devices=1, or a strategy for several such as {hardware.default_parallel_strategy!r}"
        )
    if not chosen.multi_device and environment.value.creates_processes_externally:
        started = environment.value.world_size()
        if started > 1:
            raise UnsupportedCombinationError(
                f"strategy {strategy.alias!r} uses one process, but {environment.alias} started {started}, each of "
                f"which would train by itself: use a strategy for several such as "
                f"{hardware.default_parallel_strategy!r}, or, for runs that have nothing to do with each other, "
                "plugins='local'"
            )
    if not chosen.multi_device and "owns_launch" in environment.value.features:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} trains in this process, but {environment.alias} starts others for it: use a "
            f"strategy for several processes such as {hardware.default_parallel_strategy!r}, which works with one, too"
        )
    if "owns_launch" in environment.value.features and not _launches_each(chosen, devices):
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} doesn't start one process per device, as {environment.alias} does: use one "
            f"that does, such as {hardware.default_parallel_strategy!r}"
        )
    if not chosen.multi_device and launched_by() is not None:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} uses one process, but this is one of several that an earlier Trainer of this "
            "script started, and each would run it by itself: keep to that Trainer's devices and strategy, or guard "
            "with 'if trainer.is_global_zero:'"
        )
    check_accelerator(accelerator, strategy)
    _check_backend(accelerator, strategy)
    check_needs(accelerator, strategy)
    check_precision(accelerator, strategy, precision)
    _check_optimizer_state(strategy, precision)


def _launches_each(strategy: Strategy, devices: int) -> bool:
    return type(strategy).make_launcher is not Strategy.make_launcher and (
        strategy.num_local_processes(devices) == devices
    )


def check_accelerator(accelerator: ResolvedComponent, strategy: ResolvedComponent) -> None:
    """Raise UnsupportedCombinationError for a strategy that is not made for this hardware."""
    hardware: Accelerator = accelerator.value
    works_on = strategy.value.accelerators
    if works_on is not None and not works_on & {accelerator.alias, hardware.name}:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} works on accelerator {listed(works_on)} (got {accelerator.alias!r})"
        )
    if works_on is None and hardware.own_strategies:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} is not made for accelerator {accelerator.alias!r}, which torch's operators "
            f"alone don't drive: use {hardware.default_strategy!r} for one device and "
            f"{hardware.default_parallel_strategy!r} for several, or a strategy with {hardware.name!r} in its "
            "'accelerators'"
        )


def _check_backend(accelerator: ResolvedComponent, strategy: ResolvedComponent) -> None:
    hardware: Accelerator = accelerator.value
    if hardware.backend or not isinstance(strategy.value, ParallelStrategy) or strategy.value.process_group_backend:
        return
    raise UnsupportedCombinationError(
        f"strategy {strategy.alias!r} joins its processes in a process group, and torch has no backend for one that "
        f"carries tensors of accelerator {accelerator.alias!r}: use {hardware.default_strategy!r}, or give the "
        "strategy's class process_group_backend=, where you have a backend of your own"
    )


def _check_optimizer_state(strategy: ResolvedComponent, precision: ResolvedComponent) -> None:
    value = precision.value
    if "owns_optimizer_state" in strategy.value.features and overrides(value, Precision, "optimizer_state_dtype"):
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} stores the optimizer's state by rules of its own, and precision "
            f"{precision.alias!r} ({type(value).__name__}) chooses its dtypes by optimizer_state_dtype: use another "
            "strategy, such as 'ddp', or a precision that leaves them to it"
        )
