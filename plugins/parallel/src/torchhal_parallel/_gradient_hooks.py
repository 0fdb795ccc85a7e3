"""Hooks that users register on parameters, run on the gradients of what trains in the parameters' places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from torchhal.errors import ModelError
from torchhal_parallel._dtensor_layout import full_tensor, shard_like


class CarriedHooks:
    """A hook that runs all of ``hooks``, those that come later included, as ``Tensor.register_hook`` would.

    They see the gradient whole: one of which each rank has a part is gathered, and divided again afterwards. As under
    ``ddp`` it is this rank's own, before it is averaged over the ranks with other data.
    """

    def __init__(self, hooks: Mapping[int, Any]) -> None:
        self.hooks = hooks

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        result = full_tensor(gradient)
        for hook in tuple(self.hooks.values()):
            changed = hook(result)
            result = result if changed is None else changed
        if not isinstance(gradient, DTensor):
            return result
        if any(placement.is_partial() for placement in gradient.placements):
            placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
            gradient = gradient.redistribute(placements=placements)
        return shard_like(result, gradient)


class HooksOfBatch:
    """The hooks of ``parameters``, which get the gradient of a batch and not those of the parts it is computed in."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Disable them in this block, so that backward runs none."""
        found = [
            hooks
            for parameter in self.parameters
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
            if hooks
        ]
        kept = [dict(hooks) for hooks in found]
        for hooks in found:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, before in zip(found, kept, strict=True):
                hooks.update(before)

    def on_gradients(self) -> None:
        """Let those of ``Tensor.register_hook`` run on ``.grad``, which is that of the batch alone."""
        for parameter in self.parameters:
            if parameter.grad is not None and (hooks := parameter._backward_hooks):
                parameter.grad = CarriedHooks(hooks)(parameter.grad)

    def after_accumulation(self) -> None:
        """Let those of ``register_post_accumulate_grad_hook`` run."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)


class CarriedHandles:
    """The handles that a run has registered to let the user's hooks run elsewhere, until :meth:`remove`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def carry(self, hooks: Mapping[int, Any], leaf: torch.Tensor) -> None:
        """Let ``hooks`` run on the gradient of ``leaf``."""
        trained = leaf.requires_grad
        self.add(leaf.requires_grad_(True).register_hook(CarriedHooks(hooks)))  # type: ignore[no-untyped-call]
        leaf.requires_grad_(trained)

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def give_back(now: torch.Tensor, parameter: torch.Tensor) -> None:
    """Move hooks that a user has registered on ``now``, which trained in its place, to ``parameter``.

    The user's handles refer to the hooks of ``now``: one that is removed there is removed here too.
    """
    if now._backward_hooks:
        parameter.register_hook(CarriedHooks(now._backward_hooks))  # type: ignore[no-untyped-call]


def check_accumulation_hooks(replaced: Iterable[tuple[str, nn.Parameter]], alias: str) -> None:
    """Raise ModelError for a hook that is called with a parameter, of which each rank would have a part."""
    for name, parameter in replaced:
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name!r} has a hook of register_post_accumulate_grad_hook, which is called with the parameter and "
                f"its gradient, and strategy {alias!r} divides both among the ranks: use register_hook, which sees the "
                "whole gradient, on_before_optimizer_step, or strategy='ddp'"
            )
