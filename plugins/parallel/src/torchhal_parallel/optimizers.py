"""Which optimizers can't work on parameters of which each rank has other ones, or other parts."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError
from torchhal.precision.base import needs_closure
from torchhal.trainer import rng

STEPS = 3
"""How often an optimizer is tried: some look at all parameters from their second step on."""


def check_divisible(optimizer: Optimizer, alias: str) -> None:
    """Refuse an optimizer whose step takes a closure only, as one does that looks at all parameters together."""
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"strategy {alias!r} divides the optimizer among the ranks, and {type(optimizer).__name__}, whose step "
            "needs a closure, looks at all parameters together: use strategy='ddp', or another optimizer"
        )


def check_separable(optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device) -> None:
    """Refuse an optimizer whose step on one parameter depends on the gradients of others, as by a global norm.

    A copy of it is tried on tensors of a few elements, as nothing else tells. Those of torch are known: all but LBFGS
    treat each parameter by itself.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return
    name = type(optimizer).__name__
    state = rng.collect(accelerator, device)
    try:
        quiet, loud = (_steps(optimizer, scale, device) for scale in (1.0, None))
    except Exception as error:
        warnings.warn(
            f"whether {name} treats each parameter by itself could not be tried ({type(error).__name__}: {error}): if "
            f"it looks at all of them together, by the norm of all gradients, say, strategy {alias!r} steps otherwise "
            "than one process",
            stacklevel=2,
        )
        return
    finally:
        rng.restore(state, accelerator, device)
    if any(not torch.equal(one, other) for one, other in zip(quiet[::2], loud[::2], strict=True)):
        raise ConfigurationError(
            f"strategy {alias!r} divides the parameters among the ranks, and {name} looks at all of them together: the "
            "gradient of one changes its step on others, as by the norm of all gradients. Use another optimizer, with "
            "Trainer(gradient_clip_val=...) if it is to clip, or strategy='ddp'"
        )


def _steps(optimizer: Optimizer, scale: float | None, device: torch.device) -> list[torch.Tensor]:
    """The parameters of a small copy after some steps, every second one's gradients being ``scale`` times as large.

    None: as many as their dtype can have without an overflow of their squares.
    """
    torch.manual_seed(0)
    stand_ins = {
        parameter: _stand_in(parameter, device) for group in optimizer.param_groups for parameter in group["params"]
    }
    twin = _twin(optimizer, stand_ins, {id(parameter): stand_in for parameter, stand_in in stand_ins.items()})
    parameters = list(stand_ins.values())
    for _ in range(STEPS):
        for index, parameter in enumerate(parameters):
            large = scale or (1e2 if parameter.dtype is torch.float16 else 1e6)
            gradient = torch.randn(parameter.shape, dtype=parameter.dtype) * (large if index % 2 else 1.0)
            parameter.grad = gradient.to(device)
        type(optimizer).step(twin)
    return [parameter.detach().nan_to_num() for parameter in parameters]


def _stand_in(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = torch.randn([min(size, 3) for size in parameter.shape], dtype=parameter.dtype)
    stand_in = torch.nn.Parameter(values.to(device), requires_grad=parameter.requires_grad)
    vars(stand_in).update(vars(parameter))  # what users mark their parameters with
    return stand_in


def _twin(optimizer: Optimizer, stand_ins: dict[torch.Tensor, torch.Tensor], memo: dict[int, Any]) -> Optimizer:
    """A copy with ``stand_ins`` for its parameters, and without hooks, which may change what isn't copied."""
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for value in vars(optimizer).values():  # of one that wraps another: deepcopy would forget what torch's state lacks
        if isinstance(value, Optimizer) and id(value) not in memo:
            _twin(value, stand_ins, memo)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            twin.__dict__[name] = OrderedDict()
        elif name not in ("state", "step"):  # a scheduler puts its own step on the object
            twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    for key, entry in optimizer.state.items():
        stand_in = stand_ins.get(key) if isinstance(key, torch.Tensor) else None
        if stand_in is None:
            twin.state[key] = copy.deepcopy(entry, memo)
        else:
            twin.state[stand_in] = {name: _small(value, key, stand_in, memo) for name, value in entry.items()}
    return twin


def _small(value: Any, parameter: torch.Tensor, stand_in: torch.Tensor, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
        return torch.full_like(stand_in, 0.1, dtype=value.dtype)
    return copy.deepcopy(value, memo)


@contextmanager
def with_parameters(optimizer: Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """``optimizer`` with these in its groups."""
    everything = [group["params"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = own
    try:
        yield
    finally:
        for group, whole in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = whole


def one_by_one(optimizers: Sequence[Optimizer], what: str) -> None:
    """Let the optimizers take their parameters one by one, as torch's fast ways can't mix sharded and whole ones.

    Raises:
        ConfigurationError: an optimizer was told otherwise.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("fused"):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} must not have foreach=True or fused=True under {what}, where some "
                    "parameters are sharded and others whole: leave them out"
                )
            if "foreach" in group:
                group["foreach"] = False  # None lets torch choose it on some devices
