"""ZeRO stage 1: every rank has the whole model, and the optimizer's state of its share of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory, bytes_of
from torchhal.step_memory import MESSAGE_BYTES, MemoryByPhase, PhaseMemory, StepMemory, broadcast_memory, share
from torchhal.strategies import DDPStrategy, StepResult
from torchhal.strategies.sharded_optimizers import (
    ShardedOptimizersStrategy,
    deferred_step_hooks,
    largest_share,
    with_parameters,
)
from torchhal_parallel._gathering import on_first_rank
from torchhal_parallel._optimizer_checks import check_divisible


class ZeRO1Strategy(ShardedOptimizersStrategy, DDPStrategy):
    """``DistributedDataParallel`` with the optimizer's work and state divided among the ranks.

    Each rank steps with whole parameters of about its share of the elements, then sends them to the others
    (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1). The
    user's optimizer object stays the one that schedulers, callbacks and the loops hold: only while it steps does it
    have this rank's parameters alone.

    The step of an optimizer must be a sum of steps over its parameters, as those of all of ``torch.optim`` but LBFGS
    are. One that needs a closure, as LBFGS does, is refused, and so is one that depends on all parameters together, for
    example by the norm of all gradients: it would have those of this rank alone. A small copy of it, which steps ahead
    of it, detects that.
    """

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        for optimizer in optimizers:
            check_divisible(optimizer, self.alias or "zero1")
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._owners = [_owners(optimizer, self.world_size) for optimizer in self.optimizers]
        for optimizer, owners in zip(self.optimizers, self._owners, strict=True):
            for parameter, rank in owners.items():
                if rank != self.global_rank:  # Adagrad's has begun; another rank's counts
                    optimizer.state.pop(parameter, None)
        self._shares: dict[Optimizer, tuple[int, list[list[torch.Tensor]]]] = {}

    def owner_of(self, optimizer: Optimizer) -> dict[torch.Tensor, int]:
        """Return the rank that steps each parameter."""
        owners = self._owners[next(i for i, other in enumerate(self.optimizers) if other is optimizer)]
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(owners):  # a group was added since
            added = {parameter for group in optimizer.param_groups for parameter in group["params"]} - set(owners)
            order = [p for group in optimizer.param_groups for p in group["params"] if p in added]
            owners |= {parameter: index % self.world_size for index, parameter in enumerate(order)}
        return owners

    def only_mine(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Give the optimizer this rank's parameters alone."""
        owner, rank = self.owner_of(optimizer), self.global_rank
        own = [[each for each in group["params"] if owner[each] == rank] for group in optimizer.param_groups]
        return with_parameters(optimizer, own)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if self.world_size == 1:
            return super().optimizer_step(optimizer, closure)
        with_closure = closure is not None
        if closure is None:
            self.unscale_gradients(optimizer)  # over all parameters: every rank must come to the same decision
        else:
            closure = self._with_all_parameters(optimizer, closure)
        watched = self.before_step(optimizer, with_closure=with_closure)
        with deferred_step_hooks(optimizer):
            with self.only_mine(optimizer), watched:
                result = super().optimizer_step(optimizer, closure)
            if result.updated:
                with self.guard("sending of the updated parameters"):
                    self._share(optimizer)
        return result

    def _with_all_parameters(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure`` for the time in which the optimizer has this rank's parameters alone.

        It clears the gradients of all of them, and all are unscaled.
        """
        everything = [list(group["params"]) for group in optimizer.param_groups]

        def evaluate() -> Any:
            with with_parameters(optimizer, everything):
                result = closure()
                self.unscale_gradients(optimizer)
            return result

        return evaluate

    def _share(self, optimizer: Optimizer) -> None:
        owners = self.owner_of(optimizer)
        if self._shares.get(optimizer, (0,))[0] != len(owners):  # a group was added since, or nothing was sent yet
            by_rank: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
            for parameter, owner in owners.items():
                by_rank[owner].append(parameter)
            self._shares[optimizer] = len(owners), by_rank
        for rank, parameters in enumerate(self._shares[optimizer][1]):
            # checked in each step: a hook may unfreeze one at any, or freeze one that has a gradient for it
            if moved := [each for each in parameters if each.requires_grad or each.grad is not None]:
                collectives.broadcast_tensors(moved, src=rank)

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = super().memory_per_rank(model, world_size)
        rank_of: dict[torch.Tensor, int] = {}
        for optimizer in model.optimizers:
            check_divisible(optimizer, self.alias or "zero1")
            rank_of |= _owners(optimizer, world_size)
        return replace(whole, optimizer=largest_share(model, rank_of, world_size))

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        """Return the phases, with what a rank sends and receives of the parameters that it or another one has stepped.

        A share travels in messages of up to 64 MiB; the receiver copies one tensor at a time out of it.
        """
        found = super().memory_by_phase(step, model, world_size)
        if world_size == 1:
            return found
        rank_of: dict[torch.Tensor, int] = {}
        for optimizer in model.optimizers:
            rank_of |= _owners(optimizer, world_size)
        own: list[list[ParameterMemory]] = [[] for _ in range(world_size)]
        for entry in model.parameters:
            if entry.parameter in rank_of and entry.parameter.requires_grad:
                own[rank_of[entry.parameter]].append(entry)
        sizes = [sum(bytes_of(entry.parameter) for entry in entries) for entries in own]
        state = [sum(entry.parts()[2] for entry in entries) for entries in own]
        messages = [
            broadcast_memory((entry.parameter for entry in entries), (entry.name for entry in entries))
            for entries in own
        ]
        without = found.optimizer.bytes - round(
            share(max(state), model.estimate().optimizer) * step.optimizer_temporary
            if model.estimate().optimizer
            else step.optimizer_temporary
        )
        phases = []
        for rank in range(world_size):
            stepping = round(share(sizes[rank], sum(sizes)) * step.optimizer_temporary)
            received = [
                (count, f"{name}, sent by rank {owner}")
                for owner, (count, name) in enumerate(messages)
                if owner != rank
            ]
            extra, unit = max((stepping, ""), (min(sizes[rank], MESSAGE_BYTES), "what it sends"), *received)
            phases.append(PhaseMemory(without - max(state) + state[rank] + extra, unit))
        return replace(found, optimizer=max(phases, key=lambda phase: phase.bytes))

    # -- state -----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the whole state, as the undivided optimizer would give it, on the other ranks their part.

        It comes to rank 0 one tensor at a time. A sharded checkpoint IO takes each rank's part as it is.
        """
        state = super().optimizer_state(optimizer)
        if self.world_size == 1 or "sharded" in self.checkpoint_io.features:
            return state
        what = "gathering of the optimizer's state"
        with self.guard(what):
            parts = on_first_rank(state["state"], self.root_device, name=what) or [state["state"]]
        entries = {index: entry for part in parts for index, entry in part.items()}
        return {**state, "state": dict(sorted(entries.items()))}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.check_optimizer_state(optimizer, state)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owner = self.owner_of(optimizer)
        mine = {i: entry for i, entry in state["state"].items() if owner[parameters[i]] == self.global_rank}
        super().load_optimizer_state(optimizer, {**state, "state": mine})


def _owners(optimizer: Optimizer, world_size: int) -> dict[torch.Tensor, int]:
    """Return each parameter's rank: the largest first, each to the rank with the least so far."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    load = [0] * world_size
    owner: dict[torch.Tensor, int] = {}
    order = sorted(range(len(parameters)), key=lambda index: (-parameters[index].numel(), index))
    for index in order:
        rank = load.index(min(load))
        owner[parameters[index]] = rank
        load[rank] += parameters[index].numel()
    return {parameter: owner[parameter] for parameter in parameters}
