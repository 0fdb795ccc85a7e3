"""Try on small copies of an optimizer whether its step treats each element of a parameter by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError
from torchhal.strategies.sharded_optimizers import copy_optimizer, step_copy, steps_due
from torchhal_colossalai._divided_tensors import is_divided, is_of

_ELEMENTS = 12
"""Of a parameter in a trial: no dimension of the whole is as long as one of its halves."""
_HALF = _ELEMENTS // 2

DDP = "use strategy='ddp' or 'colossalai'"


class ElementTrial:
    """Copies of an optimizer over a few elements of each parameter: as a whole, and as two flat halves.

    Args:
        optimizer: the user's.
        alias: of the strategy.
        accelerator: of this rank, whose random numbers a step may draw.
        device: of this rank.
    """

    def __init__(self, optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device) -> None:
        self._name = type(optimizer).__name__
        self._alias = alias
        self._accelerator, self._device = accelerator, device
        self._tried = self._done = 0
        self._has_failed = False
        self._generator = torch.Generator().manual_seed(0)
        with self._explained():
            parts = (slice(None), slice(0, _HALF), slice(_HALF, _ELEMENTS))
            self._whole, *self._halves = (_SmallCopy(optimizer, part) for part in parts)
        self._run(steps_due(0, 0))

    def before_step(self) -> None:
        """Try further steps where they are due.

        Raises:
            ConfigurationError: a step on the halves of a parameter isn't that on the whole.
        """
        self._done += 1
        if (steps := steps_due(self._done, self._tried)) and not self._has_failed:
            try:
                self._run(steps)
            except ConfigurationError as error:
                if error.__cause__ is None:
                    raise
                self._has_failed = True  # of the copy: the optimizer itself trains
                warnings.warn(f"{error}", stacklevel=2)

    def _run(self, steps: int) -> None:
        with self._explained():
            for _ in range(steps):
                # over some orders of magnitude, as a norm may matter from a threshold on
                size = float(torch.rand((), generator=self._generator))
                gradients = [self._gradient(each.dtype, size) for each in self._whole.parameters]
                for each in (self._whole, *self._halves):
                    each.step(gradients)
        self._tried += steps
        if not self._are_alike():
            raise looks_at_whole_parameters(self._name, self._alias)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Keep the random numbers of the run, and say what an error of the optimizer's means."""
        generators = rng.collect(self._accelerator, self._device)
        try:
            yield
        except Exception as error:
            raise ConfigurationError(
                f"{self._name} failed when it was tried on a part of a parameter ({type(error).__name__}: {error}), "
                f"and strategy {self._alias!r} divides the elements of each among the ranks: use another optimizer, or "
                f"{DDP}"
            ) from error
        finally:
            rng.restore(generators, self._accelerator, self._device)

    def _gradient(self, dtype: torch.dtype, size: float) -> torch.Tensor:
        is_float16 = dtype is torch.float16
        halves = torch.tensor([1.0] * _HALF + [10.0 if is_float16 else 1e3] * _HALF)
        scale = 10 ** (size - 1 if is_float16 else 5 * size - 4)
        return torch.randn(_ELEMENTS, generator=self._generator) * halves * scale

    def _are_alike(self) -> bool:
        for number, parameter in enumerate(self._whole.parameters):
            joined = torch.cat([half.parameters[number].detach().flatten() for half in self._halves])
            is_half = parameter.dtype in (torch.float16, torch.bfloat16)
            # of float32 a few units in the last place for each step, as vectors and their rest may be rounded apart
            tolerances = (
                {"rtol": 2e-2, "atol": 1e-2} if is_half else {"rtol": self._tried * 2e-7, "atol": self._tried * 1e-8}
            )
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
    """Return a parameter of twelve elements and as many dimensions, or a flat one of a part of them."""
    if not _is_tried(parameter):  # left without a gradient
        values = torch.zeros([min(size, 1) for size in parameter.shape], dtype=parameter.dtype)
    else:
        values = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(1))[part].to(parameter.dtype)
        if part == slice(None):
            values = values.view({1: (12,), 2: (3, 4)}.get(parameter.dim(), (2, 3, 2, *[1] * (parameter.dim() - 3))))
    trained = parameter.requires_grad or _is_tried(parameter)
    small = torch.nn.Parameter(values.to(parameter.device), requires_grad=trained and values.is_floating_point())
    vars(small).update(vars(parameter))  # what users mark their parameters with
    return small


def looks_at_whole_parameters(name: str, alias: str) -> ConfigurationError:
    """Return the error for an optimizer that looks at all elements of a parameter together."""
    return ConfigurationError(
        f"strategy {alias!r} divides the elements of each parameter among the ranks, and {name} looks at all elements "
        f"of a parameter together, as by their norm: use another optimizer, strategy='zero1', or {DDP}"
    )
