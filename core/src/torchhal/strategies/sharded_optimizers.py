"""Divide optimizers among the ranks: the base of strategies that do so, checks, and steps on a share.

For strategies whose ranks step each a share of the parameters, or of the elements, as ZeRO does.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.errors import CheckpointMismatchError, DistributedError
from torchhal.memory_estimate import ModelMemory
from torchhal.strategies._optimizer_settings import find_differing_settings
from torchhal.strategies._optimizer_trials import (
    STEP_HOOKS,
    OptimizerTrial,
    OptimizerTrials,
    check_separable,
    copy_optimizer,
    step_copy,
    steps_due,
)
from torchhal.strategies._replica_consistency import find_difference
from torchhal.strategies.model_checks import check_none_ignored
from torchhal.strategies.parallel import ParallelStrategy

__all__ = [
    "OptimizerTrial",
    "OptimizerTrials",
    "ShardedOptimizersStrategy",
    "check_separable",
    "copy_optimizer",
    "deferred_step_hooks",
    "find_differing_settings",
    "largest_share",
    "step_copy",
    "steps_due",
    "with_parameters",
]

_POST_HOOKS = "_optimizer_step_post_hooks"


class ShardedOptimizersStrategy(ParallelStrategy):
    """Base of strategies in which each rank steps a share of the parameters, or of their elements, for all ranks.

    Whatever differs on some rank would be sent over what the others have. So settings of the optimizers are compared
    when an epoch begins and a checkpoint is saved, replicas and gradients before the steps 1, 2, 4, 8, ..., and an
    optimizer whose step depends on what a rank hasn't got is refused: it is tried on small copies.

    A subclass calls :meth:`before_step` in its ``optimizer_step``.
    """

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._trials = OptimizerTrials()
        self._steps: Counter[int] = Counter()
        """Of each optimizer, by its ``id``."""
        if self.world_size == 1:
            return
        assert self.module is not None
        reason = f"strategy {self.display_name!r} divides the optimizer among the ranks"
        check_none_ignored(self.module, self.optimizers, self.parameters_to_ignore(), reason)
        self.check_optimizers(self.optimizers)
        for optimizer in self.optimizers:
            self._trials.add(optimizer, self.display_name, self.accelerator, self.root_device)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise an error for optimizers that can't be divided; called on every rank of several, before any is tried.

        Args:
            optimizers: those of the module, as the precision has connected them.
        """

    def release_model(self) -> None:
        super().release_model()
        self._trials = OptimizerTrials()  # without the copies of the optimizers

    # -- the ranks compare -----------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        self._check_settings()
        super().on_train_epoch_start()

    def check_replicas(self) -> None:
        self._check_settings()
        super().check_replicas()

    def module_state_dict(self) -> dict[str, Any]:
        self._check_settings()
        return super().module_state_dict()

    def _check_settings(self) -> None:
        """Raise DistributedError, on every rank alike, where optimizers step by other numbers than on other ranks."""
        if self.world_size == 1 or not self.is_set_up or not self.optimizers:
            return
        with self.guard("comparison of the optimizers' settings"):
            error = find_differing_settings(self.optimizers, self.display_name)
        if error is not None:
            raise error

    @property
    def has_all_gradients(self) -> bool:
        """True if every rank has the averaged gradients of all parameters before a step."""
        return True

    def before_step(self, optimizer: Optimizer, *, with_closure: bool = False) -> AbstractContextManager[None]:
        """Compare and try what is due before a step, on every rank; return a context for the optimizer's own step.

        Args:
            optimizer: the one that is about to step, with all parameters in its groups.
            with_closure: its step runs a training step.

        Raises:
            DistributedError: replicas of a parameter or its gradient differ: on every rank alike.
            ConfigurationError: the optimizer can't be divided, or draws random numbers in its step.
        """
        self._steps[id(optimizer)] = step = self._steps[id(optimizer)] + 1
        if step & (step - 1) == 0:  # a power of two
            self._check_alike(optimizer, step)
        return self._trials.before_step(optimizer, with_closure=with_closure)

    def _check_alike(self, optimizer: Optimizer, step: int) -> None:
        """Raise DistributedError where something has written to replicas by what is in a rank's batch."""
        assert self.module is not None
        own, ignored = _parameters_of(optimizer), set(self.parameters_to_ignore())
        parts: list[tuple[str, Any, torch.Tensor]] = []
        for name, each in self.module.named_parameters():
            if each in own and name not in ignored:
                parts.append((name, None, each))
                if self.has_all_gradients and each.grad is not None and each.grad.layout is torch.strided:
                    parts.append((f"the gradient of {name}", None, each.grad))
        with self.guard("comparison of the replicas"):
            difference = find_difference(parts, f"before step {step} of its optimizer")
        if difference:
            raise DistributedError(difference)

    # -- state -----------------------------------------------------------------------------------------------

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, state)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if unknown := [index for index in state["state"] if not isinstance(index, int) or index >= count]:
            raise CheckpointMismatchError(
                f"the optimizer state belongs to another {type(optimizer).__name__}: it has parameter {unknown[0]}, "
                f"and there are {count} here"
            )


def largest_share(
    model: ModelMemory, owner: Mapping[torch.Tensor, int], world_size: int, *, gradients: bool = False
) -> int:
    """Return the bytes of optimizer state of the rank that has most, where each parameter's is on one rank.

    Args:
        model: of which the memory is estimated.
        owner: the rank that steps each parameter.
        world_size: number of ranks.
        gradients: count these in the state's place.
    """
    load = [0] * world_size
    for entry in model.parameters:
        if entry.parameter in owner:
            _, gradient, state = entry.parts()
            load[owner[entry.parameter]] += gradient if gradients else state
    return max(load)


def _parameters_of(optimizer: Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


@contextmanager
def with_parameters(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """Give ``optimizer`` these parameters in its groups; the hooks of its step see all, as code elsewhere does."""
    everything = [group["params"] for group in optimizer.param_groups]
    hooks = {name: (found, set(found)) for name in STEP_HOOKS if (found := getattr(optimizer, name, None))}

    def seeing_all(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _groups_of(optimizer, everything):
                return hook(*args)

        return call

    for name, (own, _) in hooks.items():
        setattr(optimizer, name, OrderedDict((number, seeing_all(hook)) for number, hook in own.items()))
    try:
        with _groups_of(optimizer, parameters):
            yield
    finally:
        for name, (own, before) in hooks.items():  # of which some may be gone, and others new
            own.update((number, hook) for number, hook in getattr(optimizer, name).items() if number not in before)
            setattr(optimizer, name, own)


@contextmanager
def deferred_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run the post hooks of the optimizer's steps inside this context when it is left, not in the step.

    Around a step and what sends the updated parameters to the other ranks: hooks see, and may change, whole and equal
    weights. Where the context is left by an error they don't run. Hooks of all optimizers
    (``register_optimizer_step_post_hook``) run in the step.

    .. versionadded:: 0.2
    """
    hooks: OrderedDict[int, Callable[..., Any]] | None = getattr(optimizer, _POST_HOOKS, None)
    if not hooks:
        yield
        return
    calls: list[tuple[Any, ...]] = []
    setattr(optimizer, _POST_HOOKS, OrderedDict({-1: lambda _, *given: calls.append(given)}))
    try:
        yield
    finally:
        hooks.update((number, hook) for number, hook in getattr(optimizer, _POST_HOOKS).items() if number >= 0)
        setattr(optimizer, _POST_HOOKS, hooks)
    for given in calls:
        for hook in list(hooks.values()):
            hook(optimizer, *given)


@contextmanager
def _groups_of(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    before = [group["params"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=False):  # a hook may have added a group
            group["params"] = own
