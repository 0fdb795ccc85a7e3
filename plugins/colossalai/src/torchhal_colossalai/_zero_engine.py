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
from torchhal_colossalai._shard_optimizer import ShardOptimizer

_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Names of what torch's optimizers keep of a parameter in a tensor without a dimension."""


class ZeroEngine:
    """One optimizer of the user's, divided by Colossal-AI: of every parameter each rank steps a part of the elements.

    At stage 1, gradients are averaged in whole and stay in ``parameter.grad``. At stage 2, each rank has its part of
    them alone, in Colossal-AI's store, and ``parameter.grad`` is None after :meth:`reduce`.

    Args:
        booster: of Colossal-AI, with a LowLevelZeroPlugin.
        module: the user's, or the wrapper that an earlier engine of this run has returned as ``boosted_module``.
        optimizer: the user's.
        stage: of ZeRO.
    """

    def __init__(self, booster: Any, module: nn.Module, optimizer: Optimizer, stage: int) -> None:
        self.optimizer = optimizer
        self.stage = stage
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        """The parameters of each group when it was divided."""
        divided = [[each for each in group if is_divided(each)] for group in self.groups]
        self.parameters = [parameter for group in divided for parameter in group]
        self.shards = ShardOptimizer(optimizer, divided)
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
        numbered = [parameter for group in self.groups for parameter in group]
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
            if parameter.untyped_storage().nbytes() > parameter.numel() * parameter.element_size():
                parameter.data = parameter.data.clone()
        for number, entry in (entries or {}).items():
            parameter = numbered[number]
            self.optimizer.state[parameter] = {
                name: value.to(parameter.device) if _is_of(value, name, parameter) else value
                for name, value in entry.items()
            }

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

    # -- the optimizer's state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_state(self, *, keep: bool) -> dict[int, dict[str, Any]]:
        """Return the state of every parameter by its number, whole and on the CPU. Called on every rank.

        Colossal-AI's own takes every tensor but ``step`` for a shard; some optimizers have numbers in others, too.

        Args:
            keep: False on a rank that only helps.
        """
        entries: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(each for group in self.groups for each in group):
            shard = self.shard_of(parameter)
            entry = self.optimizer.state.get(parameter)
            if not entry:
                continue
            whole = {name: self._gathered(value, shard, parameter) for name, value in entry.items()}
            if keep:
                entries[number] = whole
        return entries

    def _gathered(self, value: Any, shard: torch.Tensor | None, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if shard is None or value.shape != shard.shape:
            return value.detach().cpu().clone()
        flat = value.new_empty(value.numel() * self._world_size)
        dist.all_gather_into_tensor(flat, value.contiguous())
        return flat[: parameter.numel()].view(parameter.shape).cpu()

    def part_of_state(self, parameter: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's whole state."""
        shard = self.shard_of(parameter)
        if shard is None:
            return entry
        return {name: self._part(name, value, shard, parameter) for name, value in entry.items()}

    def _part(self, name: str, value: Any, shard: torch.Tensor, parameter: torch.Tensor) -> Any:
        if not _is_of(value, name, parameter):
            return value
        flat = value.detach().reshape(-1)
        flat = nn.functional.pad(flat, [0, shard.numel() * self._world_size - flat.numel()])
        return torch.split(flat, shard.numel())[self._rank].clone()


def is_divided(parameter: torch.Tensor) -> bool:
    """Return whether Colossal-AI can divide a parameter: one without an element, or of integers, it can't."""
    return parameter.numel() > 0 and parameter.is_floating_point()


def _is_of(value: Any, name: str, parameter: torch.Tensor) -> bool:
    """Return whether a value of a parameter's state has a number for each element.

    Where the parameter has no dimension, the name tells.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return parameter.dim() > 0 or name not in _NUMBERS


def _not_now() -> None:
    raise RuntimeError("the optimizer steps through the strategy: trainer.strategy.optimizer_step(optimizer)")
