"""Estimate the bytes that a model needs on each rank, before anything is allocated.

The model is built on the meta device, where tensors have shapes and no memory, and its optimizers take one step there.
How a strategy divides what that takes is its own knowledge: ``Strategy.memory_per_rank``. Activations, which depend on
the batch, and what the libraries need for themselves are not in it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError

__all__ = [
    "MemoryEstimate",
    "ModelMemory",
    "ParameterMemory",
    "bytes_of",
    "format_bytes",
]

STATE_FACTORS: Final = {"ASGD": 1.0, "LBFGS": 203.0, "Adafactor": 0.1}
"""Size of the state, in sizes of the parameters, of optimizers that can't step on the meta device: LBFGS with its
default history of 100, Adafactor for matrices of a few dozen rows. Of any other one 2 is assumed, as of Adam."""

_ASSUMED: Final = 2.0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that needs most.

    Args:
        parameters: what it holds of the model's parameters when the optimizer steps.
        buffers: what it holds of the model's buffers.
        gradients: what it holds of the gradients then.
        optimizer: what it holds of the optimizer's state.
        temporary: what is added to that while it computes: gathered parameters, buffers for messages. No activations.
        note: what the numbers assume.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    temporary: int = 0
    note: str = ""

    @property
    def total(self) -> int:
        """Bytes between two steps, with gradients."""
        return self.parameters + self.buffers + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The greatest number of bytes at once, without activations."""
        return self.total + self.temporary

    def plus(self, temporary: int, note: str = "") -> MemoryEstimate:
        """Return the same estimate with more ``temporary`` bytes."""
        notes = "; ".join(filter(None, (self.note, note)))
        return replace(self, temporary=self.temporary + temporary, note=notes)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "peak": self.peak}


class ParameterMemory(NamedTuple):
    """A parameter and its optimizer state, all on the meta device.

    Args:
        name: in the module; the first one of a parameter with several.
        parameter: shape and dtype.
        state: the tensors of its state that are no mere counters.
    """

    name: str
    parameter: nn.Parameter
    state: tuple[torch.Tensor, ...]

    def parts(self, shape: Sequence[int] | None = None) -> tuple[int, int, int]:
        """Return (parameter, gradient, state) in bytes, for a rank whose part has ``shape``; None for all of it.

        State of the parameter's shape is divided as the parameter is; any other is whole.
        """
        whole = self.parameter.shape
        count = math.prod(whole if shape is None else shape)
        own = count * self.parameter.element_size()
        state = sum(
            (count if tensor.shape == whole else tensor.numel()) * tensor.element_size() for tensor in self.state
        )
        return own, own if self.parameter.requires_grad else 0, state


@dataclass(frozen=True)
class ModelMemory:
    """A model on the meta device with what each parameter needs."""

    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    parameters: tuple[ParameterMemory, ...]
    note: str = ""

    @property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return sum(bytes_of(buffer) for buffer in self.module.buffers())

    def estimate(
        self,
        shape_of: Callable[[ParameterMemory], Sequence[int] | None] = lambda parameter: None,
        *,
        parameters: Iterable[ParameterMemory] | None = None,
        buffers: int | None = None,
    ) -> MemoryEstimate:
        """Estimate a rank that holds ``parameters`` (all), of each a part of shape ``shape_of(parameter)`` (whole)."""
        held = self.parameters if parameters is None else parameters
        rows = [parameter.parts(shape_of(parameter)) for parameter in held]
        own, gradients, state = (sum(row[column] for row in rows) for column in range(3))
        return MemoryEstimate(own, self.buffers if buffers is None else buffers, gradients, state, note=self.note)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def format_bytes(count: int) -> str:
    """Format a number of bytes, such as ``"1.5 GiB"``; below one KiB ``"12 bytes"``."""
    value, units = float(count), iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and (larger := next(units, None)):
        value, unit = value / 1024, larger
    return f"{value:.{0 if unit == 'bytes' else 1}f} {unit}"


def build_model(
    make: Callable[..., Any], arguments: Any = None, *, trainer: Any = None, device: str = "meta"
) -> nn.Module:
    """Return what ``make`` builds on ``device``; ``arguments`` are a dict of keywords, or a list of positions.

    ``trainer`` is its ``self.trainer`` in ``configure_model``, where the class has one.

    Raises:
        ModelError: it returned no module, or can't be called so; with the reason.
    """
    name = getattr(make, "__qualname__", repr(make))
    given = {} if arguments is None else arguments
    if not isinstance(given, dict | list):
        raise ConfigurationError(f"the model's arguments must be a JSON object or array (got {given!r})")
    positions, keywords = ([], given) if isinstance(given, dict) else (given, {})
    try:
        inspect.signature(make).bind(*positions, **keywords)
    except TypeError as error:
        takes = str(inspect.signature(make)).partition(" -> ")[0]
        raise ModelError(
            f"{name}{takes} can't be called with {given!r} ({error}): give its arguments as JSON, --model-args"
        ) from error
    except ValueError:  # a function of an extension has no signature to look at
        pass
    try:
        with torch.device(device):
            module = make(*positions, **keywords)
            if trainer is not None and hasattr(type(module), "trainer"):
                module.trainer = trainer
            configure = getattr(module, "configure_model", None)
            if configure is not None:
                configure()
    except Exception as error:
        raise ModelError(
            f"{name} can't be built on the {device} device ({type(error).__name__}: {error}). Values can be set in "
            "reset_parameters() or a hook instead"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} must be, or return, an nn.Module (got {module!r})")
    return module.to(device)


def model_memory(module: nn.Module, optimizers: Sequence[Optimizer]) -> ModelMemory:
    """Return what each parameter of ``module``, on the meta device, needs under these optimizers, after a step."""
    assumed: list[str] = []
    state: dict[int, tuple[torch.Tensor, ...]] = {}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
        except Exception:
            name = type(optimizer).__name__
            factor = STATE_FACTORS.get(name, _ASSUMED)
            assumed.append(f"{name} can't step without data: {factor:g} times the parameters are assumed for its state")
            for parameter in parameters:
                count = round(factor * parameter.numel())
                state[id(parameter)] = (torch.empty(count, dtype=parameter.dtype, device="meta"),)
            continue
        finally:
            for parameter in parameters:
                parameter.grad = None
        for parameter in parameters:
            values = optimizer.state.get(parameter, {}).values()
            state[id(parameter)] = tuple(v for v in values if isinstance(v, torch.Tensor) and v.dim())
    return ModelMemory(
        module,
        tuple(optimizers),
        tuple(
            ParameterMemory(name, parameter, state.get(id(parameter), ()))
            for name, parameter in module.named_parameters()
        ),
        "; ".join(assumed),
    )
