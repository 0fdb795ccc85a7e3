"""Provide the base of strategies whose optimizers are divided among the ranks by fairscale's OSS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.plugin import Availability
from torchhal.strategies import StepResult
from torchhal.strategies.model_checks import check_disjoint_optimizers, check_disjoint_storage, check_no_closure
from torchhal.strategies.sharded_optimizers import ShardedOptimizersStrategy, deferred_step_hooks, largest_share
from torchhal_fairscale import _sdk as sdk
from torchhal_fairscale._activation_checkpointing import ActivationCheckpointing
from torchhal_fairscale._optimizer_shards import OptimizerShards


class OSSBase(ShardedOptimizersStrategy):
    """One process per device, each of which steps the parameters that OSS gives it, and has their state alone.

    The user's optimizer object stays the one that schedulers, callbacks and the loops hold: only while it steps does it
    have this rank's parameters alone. Its step must be a sum of steps over its parameters, as those of all of
    ``torch.optim`` but LBFGS are; others are refused.

    Args:
        activation_checkpointing: classes of layers whose activations fairscale's ``checkpoint_wrapper`` computes again
            in backward instead of keeping them.
        options: as of the class beside this one.
    """

    @classmethod
    def availability(cls) -> Availability:
        return sdk.FAIRSCALE.availability()

    def __init__(self, *, activation_checkpointing: Any = (), **options: Any) -> None:
        self._checkpointing = ActivationCheckpointing(activation_checkpointing)
        super().__init__(**options)
        sdk.FAIRSCALE.check()
        self._shards: dict[int, OptimizerShards] = {}
        """By the ``id`` of the optimizer; empty in a world of one."""

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if not self.is_set_up:
            sdk.load()
        super().setup_environment()

    def setup_model(self, *, training: bool = True) -> None:
        assert self.module is not None, "connect() comes first"
        sdk.check_not_fully_sharded(self.module, self.display_name)
        if training and self.world_size > 1:
            reason = f"strategy {self.display_name!r} puts parameters into buffers of fairscale's"
            check_disjoint_storage(self.module, reason)
        if training:
            self._checkpointing.enable(self.module, self.display_name, self.root_device.type)
        super().setup_model(training=training)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        self._shards = {}
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        if self.world_size > 1:
            self._shards = {id(each): OptimizerShards(each, self.global_rank) for each in self.optimizers}
            with self.guard("sending of the optimizers' state"):
                for shards in self._shards.values():
                    shards.bring_state(self.root_device)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        assert self.module is not None
        reason = f"strategy {self.display_name!r} divides the optimizer among the ranks"
        check_disjoint_optimizers(self.module, optimizers, reason)
        for optimizer in optimizers:
            check_no_closure(optimizer, reason, "use strategy='ddp', or another optimizer", error=ConfigurationError)

    def restore_module(self) -> None:
        super().restore_module()
        self._release_shards()

    def release_model(self) -> None:
        super().release_model()
        self._release_shards()
        self._checkpointing.disable()

    def _release_shards(self) -> None:
        for each in self._shards.values():
            each.release()

    # -- steps -----------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        shards = self._shards.get(id(optimizer))
        if shards is None:
            return super().optimizer_step(optimizer, closure)
        if closure is None:
            self.unscale_gradients(optimizer)  # over all parameters: every rank must come to the same decision
        result = StepResult.of(False)
        watched = self.before_step(optimizer, with_closure=closure is not None)
        evaluate = None if closure is None else lambda: shards.evaluate(closure_unscaled)

        def closure_unscaled() -> Any:
            assert closure is not None
            value = closure()
            self.unscale_gradients(optimizer)  # as above
            return value

        def run() -> None:
            nonlocal result
            with watched:
                result = StepResult.of(super(OSSBase, self).optimizer_step(optimizer, evaluate))

        with deferred_step_hooks(optimizer), self.guard("sending of the updated parameters"):
            for parameter in shards.step(run):
                collectives.broadcast_tensors([parameter], src=shards.owner[parameter])
        return result

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = super().memory_per_rank(model, world_size)
        return replace(whole, optimizer=largest_share(model, owners_in(model, world_size), world_size))

    # -- state -----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the whole state, as the undivided optimizer would give it, on the other ranks their part.

        A sharded checkpoint IO takes each rank's part as it is.
        """
        state = super().optimizer_state(optimizer)
        shards = self._shards.get(id(optimizer))
        if shards is None or "sharded" in self.checkpoint_io.features:
            return state
        with self.guard("gathering of the optimizer's state"):
            return {**state, "state": shards.gathered_state(state["state"], self.root_device)}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        shards = self._shards.get(id(optimizer))
        if shards is None:
            super().load_optimizer_state(optimizer, state)
            return
        self.check_optimizer_state(optimizer, state)
        shards.update()
        owners = [shards.owner[parameter] for parameter in shards.parameters()]
        mine = {index: entry for index, entry in state["state"].items() if owners[index] == self.global_rank}
        super().load_optimizer_state(optimizer, {**state, "state": mine})


def owners_in(model: ModelMemory, world_size: int) -> dict[torch.Tensor, int]:
    """Return the rank of each parameter that an optimizer of the model steps."""
    return {
        parameter: rank
        for optimizer in model.optimizers
        for parameter, rank in estimated_owners(optimizer, world_size).items()
    }


def estimated_owners(optimizer: Optimizer, world_size: int) -> dict[torch.Tensor, int]:
    """Return the rank of each parameter, as OSS chooses it: the one with the least elements of that dtype so far."""
    loads: dict[torch.dtype, list[int]] = {}
    owner: dict[torch.Tensor, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            load = loads.setdefault(parameter.dtype, [0] * world_size)
            owner[parameter] = rank = load.index(min(load)) if parameter.numel() else 0
            load[rank] += parameter.numel() if parameter.requires_grad or not parameter.numel() else 1
    return owner
