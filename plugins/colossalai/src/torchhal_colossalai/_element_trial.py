"""Try on small copies of an optimizer whether its step treats each element of a parameter by itself."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from torchhal.strategies.sharded_optimizers import copy_optimizer, step_copy
from torchhal_colossalai._divided_tensors import is_divided, is_of

_STEPS = 3
_ELEMENTS = 8


def steps_elements(optimizer: Optimizer) -> bool:
    """Return whether a step of ``optimizer`` on the halves of each parameter is that on the whole.

    The caller keeps the states of random-number generators: a step may draw.
    """
    whole, *halves = (_SmallCopy(optimizer, part) for part in (slice(None), slice(0, 4), slice(4, 8)))
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0] * 4 + [1e3] * 4)
    for _ in range(_STEPS):
        gradients = [torch.randn(_ELEMENTS, generator=generator) * scale for _ in whole.parameters]
        for each in (whole, *halves):
            each.step(gradients)
    for number, parameter in enumerate(whole.parameters):
        joined = torch.cat([half.parameters[number].detach().flatten() for half in halves])
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        tolerances = {"rtol": 2e-2, "atol": 1e-2} if is_half else {"rtol": 1e-4, "atol": 1e-6}
        if not torch.allclose(parameter.detach().flatten(), joined, equal_nan=True, **tolerances):
            return False
    return True


class _SmallCopy:
    """An optimizer of the same class and settings over a few elements of each parameter.

    Args:
        optimizer: the user's.
        part: which of the elements it has; a part is flat, as a rank's shard is.
    """

    def __init__(self, optimizer: Optimizer, part: slice) -> None:
        self.part = part
        small = {
            parameter: _small_parameter(parameter, part)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.parameters = [each for parameter, each in small.items() if _is_tried(parameter)]
        self.optimizer = copy_optimizer(optimizer, small, is_of)

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient[self.part].to(parameter).view(parameter.shape)
        step_copy(self.optimizer)


def _is_tried(parameter: torch.Tensor) -> bool:
    return is_divided(parameter) and parameter.dim() > 0


def _small_parameter(parameter: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a parameter of eight elements and as many dimensions, or a flat one of a part of them."""
    if not _is_tried(parameter):  # left without a gradient
        values = torch.zeros([min(size, 1) for size in parameter.shape], dtype=parameter.dtype)
    else:
        values = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(1))[part].to(parameter.dtype)
        if part == slice(None):
            values = values.view({1: (8,), 2: (2, 4)}.get(parameter.dim(), (2, 2, 2, *[1] * (parameter.dim() - 3))))
    trained = parameter.requires_grad or _is_tried(parameter)
    small = torch.nn.Parameter(values.to(parameter.device), requires_grad=trained and values.is_floating_point())
    vars(small).update(vars(parameter))  # what users mark their parameters with
    return small
