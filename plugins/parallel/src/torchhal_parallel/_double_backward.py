"""Refuse a gradient of a gradient through layers that tensor parallelism divides.

torch's DTensor leaves out a part of such a second derivative, or all of it, without an error: which part depends on its
version. A penalty on gradients (WGAN-GP), forces as the gradient of an energy and a Hessian's product need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchhal.errors import ModelError


class RefusesDoubleBackward:
    """A forward hook: raises ModelError where a backward that makes a graph comes to what the layer gave.

    At any step, as a penalty may begin late, or be computed at each sixteenth step only.
    """

    def __init__(self, name: str, alias: str) -> None:
        self.name = name
        self.alias = alias

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._check)  # not run for a gradient that goes no further than this

    def _check(self, gradients: Any) -> None:
        if torch.is_grad_enabled():  # autograd's mode: whether it makes a graph of the gradient
            raise ModelError(
                f"a gradient through {self.name!r} is to be differentiated (create_graph=True), and strategy "
                f"{self.alias!r} divides this layer: a part of the second derivative would be missing. Leave the layer "
                "out of the tensor parallel plan, or use strategy='zero3' or 'ddp', under which it is right"
            )


def refuse_double_backward(module: nn.Module, names: Iterable[str], alias: str) -> None:
    """Let the layers ``names`` of ``module`` refuse it; called behind the hooks that divide what they give."""
    for name in names:
        module.get_submodule(name).register_forward_hook(RefusesDoubleBackward(name, alias))
