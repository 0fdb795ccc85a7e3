"""Try on small copies of an optimizer whether its step treats each element of a parameter by itself.

A copy shares nothing with the user's optimizer: neither weights, gradients and state nor what it keeps beside them,
another optimizer that it wraps included.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchhal_colossalai._divided_tensors import is_divided, is_of

_STEPS = 3
_ELEMENTS = 8
_LEAST_RATE = 1e-2
"""A warm-up begins with a learning rate of zero, with which no two steps would differ."""


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
        memo = {id(parameter): each for parameter, each in small.items()}
        self.optimizer = _copy_of(optimizer, small, memo)
        for group in self.optimizer.param_groups:
            if "lr" in group and abs(float(group["lr"])) < _LEAST_RATE:
                is_tensor = isinstance(group["lr"], torch.Tensor)
                group["lr"] = torch.full_like(group["lr"], _LEAST_RATE) if is_tensor else _LEAST_RATE
        self._step = type(optimizer).step  # a scheduler puts its own on the object

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient[self.part].to(parameter).view(parameter.shape)
        with _without_global_hooks():
            self._step(self.optimizer)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Step inside without the hooks that are registered for all optimizers, however often a step was wrapped."""
    registered: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in registered]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


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


def _copy_of(optimizer: Optimizer, small: dict[torch.Tensor, torch.Tensor], memo: dict[int, Any]) -> Optimizer:
    """Return a copy with ``small`` ones for its parameters, without hooks, which may change what isn't copied."""
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    for value in vars(optimizer).values():
        for wrapped in _optimizers_in(value):  # of one, deepcopy would omit what torch's state lacks
            if id(wrapped) not in memo:
                _copy_of(wrapped, small, memo)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            copied.__dict__[name] = OrderedDict()
        elif name == "state" and isinstance(value, dict):
            copied.__dict__[name] = _copy_of_state(value, small, memo)
        elif name not in ("step", "zero_grad"):  # a scheduler and others put their own on the object
            copied.__dict__[name] = copy.deepcopy(value, memo)
    return copied


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, list | tuple | set):
        yield from (each for each in value if isinstance(each, Optimizer))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Optimizer))


def _copy_of_state(
    state: dict[Any, Any], small: dict[torch.Tensor, torch.Tensor], memo: dict[int, Any]
) -> dict[Any, Any]:
    if id(state) in memo:  # of one that shares it with an optimizer that it wraps
        found: dict[Any, Any] = memo[id(state)]
        return found
    copied: dict[Any, Any] = defaultdict(dict)
    memo[id(state)] = copied
    for key, entry in state.items():
        parameter = small.get(key) if isinstance(key, torch.Tensor) else None
        if parameter is None or not isinstance(entry, dict):
            copied[copy.deepcopy(key, memo)] = copy.deepcopy(entry, memo)
            continue
        copied[parameter] = {
            name: torch.full_like(parameter, 0.1, dtype=value.dtype, requires_grad=False)
            if is_of(value, name, key)
            else copy.deepcopy(value, memo)
            for name, value in entry.items()
        }
    return copied
