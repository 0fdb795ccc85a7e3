"""A stand-in for Intel's transformer engine, which isn't public: what docs.habana.ai says of ``Linear``,
``fp8_autocast`` and ``recipe``, with scales from the tensor at hand."""

from contextlib import contextmanager

import torch
from torch import nn

from . import recipe as recipe

_recipes = []


@contextmanager
def fp8_autocast(enabled=False, fp8_recipe=None):
    _recipes.append(fp8_recipe or recipe.DelayedScaling()) if enabled else None
    try:
        yield
    finally:
        if enabled:
            _recipes.pop()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, margin):
        scale = 448.0 / 2**margin / tensor.abs().amax().float().clamp(min=1e-12)
        return ((tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(tensor.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Linear(nn.Linear):
    used = []

    def forward(self, inp):
        if not _recipes:
            return super().forward(inp)
        Linear.used.append(_recipes[-1].margin)
        margin = _recipes[-1].margin
        return nn.functional.linear(_Rounded.apply(inp, margin), _Rounded.apply(self.weight, margin), self.bias)
