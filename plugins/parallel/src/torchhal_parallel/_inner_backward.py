"""Backward passes inside a step, such as ``torch.autograd.grad(..., create_graph=True)``, under ``fully_shard``.

It frees a unit's parameters when a backward has passed it. The graph of a gradient refers to them, too, and so does the
rest of a step that is not yet done: both would compute with freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class InnerBackward:
    """Keeps ``units`` whole from such a pass on, until :meth:`release`.

    Args:
        units: what ``fully_shard`` was applied to.
        in_step: whether a step runs now, whose own backward comes after it.
        reshard_after_forward: whether the units are freed after a forward otherwise.
    """

    def __init__(self, units: Sequence[Any], in_step: Callable[[], bool], *, reshard_after_forward: bool) -> None:
        self.units = units
        self.in_step = in_step
        self.reshard_after_forward = reshard_after_forward
        self.held = False
        for unit in units:
            state = unit._get_fsdp_state()
            state._pre_backward = partial(self._pre_backward, state._pre_backward)

    def _pre_backward(self, of_unit: Callable[[Any], Any], gradient: Any) -> Any:
        if not self.held and (torch.is_grad_enabled() or self.in_step()):  # autograd makes a graph of the gradient
            self._hold(True)
        return of_unit(gradient)

    def _hold(self, held: bool) -> None:
        self.held = held
        for unit in self.units:
            unit.set_reshard_after_backward(not held, recurse=False)
            unit.set_reshard_after_forward(not held and self.reshard_after_forward, recurse=False)

    def release(self) -> None:
        """Free the units again: the backward that ends the step is over.

        It has averaged the gradients of a unit when it passed the unit's forward. What a graph of gradients has added
        later is averaged now.
        """
        if not self.held:
            return
        self._hold(False)
        for unit in self.units:
            state = unit._get_fsdp_state()
            if state._is_root:
                context = state._state_ctx  # since torch 2.15 this records, during a backward, which state ends it
                if getattr(context, "manual_backward_finalization_active", False) is None:
                    context.manual_backward_finalization_active = context.manual_backward_finalization
                state._root_post_backward_final_callback()
        for unit in self.units:
            unit.reshard()
