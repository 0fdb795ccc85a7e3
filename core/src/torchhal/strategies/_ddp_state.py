"""The state of a run under DistributedDataParallel: its buckets, its communication hook, replicas of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchhal.errors import CheckpointMismatchError
from torchhal.strategies._comm_hook_state import (
    comm_hook_state_dict,
    load_comm_hook_state,
    reshard_comm_hook_states,
)
from torchhal.strategies._ddp_buckets import read_bucket_order, set_bucket_order
from torchhal.strategies._replica_consistency import parts_differ
from torchhal.strategies.parallel import ParallelStrategy


class DDPState(ParallelStrategy):
    """The part of :class:`.DDPStrategy` that saves and restores."""

    comm_hook: Callable[..., Any] | None = None
    find_unused_parameters = False
    static_graph = False

    _bucket_order: list[str] | None = None
    """That of the present wrapper, where it was restored; else the wrapper has it."""

    _saved_order: list[str] | None = None
    """That of the run which is continued, until the first epoch begins."""

    _has_hook = False
    """True if a communication hook was registered, also by an override of ``configure_ddp``."""

    _registered_state: Any = None
    """The state of that hook."""

    @property
    def _may_leave_out(self) -> bool:
        """True if a wrapper needs no gradients of parameters that are frozen now."""
        return self.find_unused_parameters and not self.static_graph

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the wrapper's buckets.

        Without it a resumed run would round sums otherwise from three ranks on.
        """
        state = super().state_dict()
        order = self._bucket_order
        if order is None and self._orders_buckets and isinstance(self.model, DistributedDataParallel):
            with self.guard("rebuilding of the buckets"):
                order = read_bucket_order(self.model)
        return state if order is None else {**state, "ddp_bucket_order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        order = state.get("ddp_bucket_order")
        if order is not None and not (isinstance(order, list) and all(isinstance(name, str) for name in order)):
            raise CheckpointMismatchError(f"'ddp_bucket_order' must be a list of names (got {type(order).__name__})")
        self._saved_order = order
        self._restore_buckets()

    @property
    def _orders_buckets(self) -> bool:
        """True if a step depends on the order of the buckets: sums of several ranks, and memories of a hook."""
        return self.world_size > 1 or self._registered_state is not None

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the memory of the communication hook, and what this rank trains of its own where replicas differ."""
        state = super().rank_state_dict()
        if hook := comm_hook_state_dict(self._registered_state):
            state["comm_hook"] = hook
        if not self._has_hook:
            return state
        assert self.module is not None
        if self.world_size > 1:
            with self.guard("comparison of the replicas for a checkpoint"):
                differ = parts_differ(self.module.named_parameters())
            if differ:
                state["module"] = dict(self.module.state_dict())
                state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        return state

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_rank_state_dict(state)
        if "module" in state:
            super().load_module_state_dict(state["module"])
            for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
                super().load_optimizer_state(optimizer, own)
        if "comm_hook" in state:
            same = self._bucket_order is not None or self._may_leave_out  # the latter never changes its buckets
            left_out = load_comm_hook_state(
                self._registered_state, state["comm_hook"], self.root_device, same_buckets=same
            )
            if left_out and self.is_global_zero:
                warnings.warn(
                    f"per-rank state of strategy {self.alias or 'ddp'!r} is left out: {left_out}", stacklevel=2
                )

    def reshard_rank_state(
        self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int
    ) -> Mapping[str, Any]:
        """Return the mean of PowerSGD's errors, with which the next step sends what it would have sent.

        Weights of each rank's own, and the memory of other hooks, are refused.
        """
        if all(set(state) == {"comm_hook"} for state in states):
            hook = reshard_comm_hook_states([state["comm_hook"] for state in states])
            if hook is not None:
                return {"comm_hook": hook}
        return super().reshard_rank_state(states, rank=rank, world_size=world_size)

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """Return averaged copies: this rank keeps its own, averaged with the rest of the accumulation."""
        assert self.module is not None
        parameters = list(self.module.parameters())
        own = [
            None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True) for parameter in parameters
        ]
        averaged = {name: gradient.clone() for name, gradient in super().accumulated_gradients().items()}
        for parameter, gradient in zip(parameters, own, strict=True):
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad.layout is torch.strided and not gradient.is_sparse:
                parameter.grad.copy_(gradient)  # in its place, which may be a bucket
            else:
                parameter.grad = gradient.to(parameter.device)
        return averaged

    def restore_module(self) -> None:
        self._bucket_order = self.state_dict().get("ddp_bucket_order")  # for a checkpoint that is saved after the run
        super().restore_module()

    def _restore_buckets(self) -> None:
        wraps = isinstance(self.model, DistributedDataParallel)
        if self._saved_order is None or not self._orders_buckets or not wraps:
            return
        with self.guard("rebuilding of the buckets"):
            if set_bucket_order(self.model, self._saved_order):
                self._bucket_order = self._saved_order
