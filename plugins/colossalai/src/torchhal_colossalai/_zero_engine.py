"""Drive Colossal-AI's LowLevelZeroOptimizer: its shards, its reduction and its step, around one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchhal_colossalai import _sdk as sdk
from torchhal_colossalai._divided_tensors import is_divided, is_of
from torchhal_colossalai._shard_optimizer import ShardOptimizer


class ZeroEngine:
    """One optimizer of the user's, divided by Colossal-AI: of every parameter each rank steps a part of the elements.

    At stage 1, gradients are averaged in whole and stay in ``parameter.grad``. At stage 2, each rank has its part of
    them alone, in Colossal-AI's store, and ``parameter.grad`` is None after :meth:`reduce`.

    Args:
        booster: of Colossal-AI, with a LowLevelZeroPlugin.
        module: the user's, or the wrapper that an earlier engine of this run has returned as ``boosted_module``.
        optimizer: the user's.
        stage: of ZeRO.
        before: the engine of the optimizer that this one replaces.
    """

    def __init__(
        self, booster: Any, module: nn.Module, optimizer: Optimizer, stage: int, before: ZeroEngine | None = None
    ) -> None:
        self.optimizer = optimizer
        self.stage = stage
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        """The parameters of each group when it was divided."""
        self.numbered = [parameter for group in self.groups for parameter in group]
        """All of them, as a ``state_dict`` numbers them."""
        divided = [[each for each in group if is_divided(each)] for group in self.groups]
        self.parameters = [parameter for group in divided for parameter in group]
        self.shards = ShardOptimizer(optimizer, divided)
        self._strides = {each: _strides_of(each) for each in self.parameters} | (
            before._kept_strides() if before else {}
        )
        for parameter in self.parameters:
            if not parameter.data.is_contiguous():
                parameter.data = parameter.data.contiguous()
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        for parameter in frozen:  # it leaves out what is frozen now, for good
            parameter.requires_grad_(True)
        try:
            with sdk.unchecked_device():
                self.boosted_module, self.zero, *_ = booster.boost(module, self.shards)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        shards: dict[int, torch.Tensor] = self.zero.working_to_master_param
        self.shards.shard_of = {parameter: shards[id(parameter)] for parameter in self.parameters}
        # its hooks would send gradients before the ranks have compared which parameters have some
        for hook in self.zero.grad_handles:
            hook.remove()
        self.zero.grad_handles = []
        self.zero.mixed_precision_mixin = None  # the Trainer's precision scales the loss
        filled = [group for group in divided if group]  # as the groups of Colossal-AI are numbered
        self._group_of = {id(each): number for number, group in enumerate(filled) for each in group}
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._world_size, self._rank = dist.get_world_size(), dist.get_rank()

    # -- the parameters and their shards -----------------------------------------------------------------------

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a parameter, flat and padded, which shares its memory; None if undivided."""
        return self.shards.shard_of.get(parameter)

    def is_current(self) -> bool:
        """Return whether the groups have the parameters that were divided, in the memory in which they were."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.groups):
            return False
        for group, before in zip(groups, self.groups, strict=True):
            if list(map(id, group["params"])) != list(map(id, before)):
                return False
        return [parameter.data_ptr() for parameter in self.parameters] == self._addresses

    def take_gradients(self, other: ZeroEngine) -> None:
        """Continue with the gradients in store of an engine of the same optimizer that divided it before."""
        if self.stage == 1:
            return
        for parameter in self.parameters:
            for part in other._stored(parameter) if other.shard_of(parameter) is not None else ():
                self._store(parameter, part)

    def release(self, entries: dict[int, dict[str, Any]] | None) -> None:
        """Give the parameters memory of their own, without padding, and the optimizer whole state.

        Args:
            entries: what :meth:`gather_state` has returned; None without it, after a failure.
        """
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
            parameter.data = self._in_order(parameter.data, parameter)
        for number, entry in (entries or {}).items():
            parameter = self.numbered[number]
            self.optimizer.state[parameter] = {
                name: self._in_order(value.to(parameter.device), parameter) if is_of(value, name, parameter) else value
                for name, value in entry.items()
            }

    def _in_order(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in the order in memory that the parameter had, such as channels_last, without padding."""
        strides = self._strides.get(parameter, value.stride())
        is_alone = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if value.stride() == strides and is_alone:
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)

    def _kept_strides(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """Return the strides that parameters had, of those that still are in the memory of this engine."""
        pairs = zip(self.parameters, self._addresses, strict=True)
        return {each: self._strides[each] for each, address in pairs if each.data_ptr() == address}

    # -- gradients -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, parameters: list[torch.Tensor]) -> None:
        """Average the gradients of ``parameters``, which each rank has, and which are the same on all ranks."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.zero._add_to_bucket(parameter, self._group_of[id(parameter)])
        self.zero._run_reduction()
        self.zero.zero_bucket_stores()
        if self.stage == 1:
            for parameter in parameters:
                parts = self._stored(parameter)
                parameter.grad = torch.cat(parts)[: parameter.numel()].view(parameter.shape)
            self.zero.zero_grad_stores()

    def _stored(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient's parts that Colossal-AI has in store: of every rank at stage 1, this rank's at 2."""
        parts: list[torch.Tensor] = self.zero.get_partitioned_gradients_by_param_id(
            self._group_of[id(parameter)], id(parameter)
        )
        return parts

    def zero_grad(self) -> None:
        """Clear the gradients that are in store."""
        self.zero.zero_grad_stores()

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether a gradient of ``parameter`` is in store, at stage 2."""
        return bool(self._stored(parameter))

    @contextmanager
    def gradients_on_shards(self) -> Iterator[list[torch.Tensor]]:
        """Give the optimizer the shards with this rank's parts of the gradients inside, at stage 2; return them."""
        shards = []
        for parameter in self.parameters:
            if stored := self._stored(parameter):
                shard = self.shard_of(parameter)
                assert shard is not None
                shard.grad = stored[0]
                shards.append(shard)
        try:
            with self.shards.on_shards():
                yield shards
        finally:
            for shard in shards:
                shard.grad = None

    def whole_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gather each parameter's gradient that is in store, one at a time. Called on every rank."""
        for parameter in self.parameters:
            if self.has_gradient(parameter):
                yield parameter, self.zero.get_param_grad(parameter)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, run_step: Callable[[], None]) -> None:
        """Step the optimizer on this rank's shards, and gather the parameters from all ranks.

        Args:
            run_step: steps the user's optimizer, which has the shards in that moment.
        """
        if self.stage == 1:
            self._store_gradients()
        self.shards.run_step = run_step
        try:
            self.zero.step()
        finally:
            self.shards.run_step = _not_now
            if self.stage == 1:
                self.zero.zero_grad_stores()

    @torch.no_grad()
    def _store_gradients(self) -> None:
        """Put the gradients, clipped and changed by hooks as they are now, where Colossal-AI's step takes them."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            flat = parameter.grad.reshape(-1)
            if padding := self.zero.get_param_padding_size(parameter):
                flat = nn.functional.pad(flat, [0, padding])
            for part in flat.split(flat.numel() // self._world_size):
                self._store(parameter, part)  # a view, which Colossal-AI's step scales by one

    def _store(self, parameter: torch.Tensor, part: torch.Tensor) -> None:
        store = self.zero.pid_to_grad_store[id(parameter)]
        store.append_gradients_by_param_id(part, self._group_of[id(parameter)], id(parameter))


def _strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return strides of a tensor in the order in memory of ``parameter``, without gaps."""
    return torch.empty_like(parameter.detach(), device="meta").stride()


def _not_now() -> None:
    raise RuntimeError("the optimizer steps through the strategy: trainer.strategy.optimizer_step(optimizer)")
