"""Change dtypes of a module, of a batch, of what torch creates by default. Floating-point numbers only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from torchhal.pytree import map_tensors


def parse_dtype(dtype: object, allowed: Collection[torch.dtype]) -> torch.dtype:
    """Return the member of ``allowed`` that ``dtype``, a ``torch.dtype`` or its name, means; else ValueError."""
    for candidate in allowed:
        if dtype is candidate or (isinstance(dtype, str) and dtype == dtype_name(candidate)):
            return candidate
    names = ", ".join(repr(dtype_name(candidate)) for candidate in allowed)
    raise ValueError(f"'dtype' must be one of {names}, or the torch.dtype of that name (got {dtype!r})")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def cast_tensors(batch: Any, dtype: torch.dtype) -> Any:
    """Return ``batch`` with its floating-point tensors in ``dtype``; all else is the same object.

    So is a tensor that has the dtype already.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return map_tensors(batch, cast)


def widen_tensors(output: Any, dtype: torch.dtype) -> Any:
    """Return ``output`` with floating-point tensors that are narrower than ``dtype`` in it; all else is the same."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < dtype.itemsize:
            return leaf.to(dtype)
        return leaf

    return map_tensors(output, widen)


def cast_module(
    module: nn.Module, dtype: torch.dtype, *, only: Callable[[nn.Parameter], bool] | None = None
) -> nn.Module:
    """Cast ``module``'s floating-point parameters, their gradients and its buffers in place.

    Parameters stay the objects they were, so an optimizer made earlier still holds them, and a tensor registered
    twice stays one. With ``only``, nothing but the parameters it is true for, and their gradients.

    ``Module.to(dtype)`` would not do: it casts complex tensors to real ones and splits shared buffers.
    """
    chosen: set[int] | None = None
    if only is not None:
        parameters = [parameter for parameter in module.parameters() if only(parameter)]
        chosen = {id(tensor) for p in parameters for tensor in (p, p.grad) if tensor is not None}

    def wanted(tensor: torch.Tensor) -> torch.dtype | None:
        return dtype if tensor.is_floating_point() and (chosen is None or id(tensor) in chosen) else None

    return _cast_each(module, wanted)


def cast_by_name(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """Cast, as :func:`cast_module` does, the parameters and buffers in ``dtypes`` that are there, each to its own.

    What is no floating-point or complex number, or is to become another kind of number, stays as it is.
    """
    chosen: dict[int, torch.dtype] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype = dtypes.get(name)
        if dtype is not None and _kind(dtype) == _kind(tensor.dtype) != "other":
            chosen[id(tensor)] = dtype
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                chosen[id(tensor.grad)] = dtype
    return _cast_each(module, lambda tensor: chosen.get(id(tensor)))


def _kind(dtype: torch.dtype) -> str:
    return "real" if dtype.is_floating_point else "complex" if dtype.is_complex else "other"


def _cast_each(module: nn.Module, wanted: Callable[[torch.Tensor], torch.dtype | None]) -> nn.Module:
    """Cast each parameter, gradient and buffer to the dtype that is ``wanted``; None leaves it as it is."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original too: its id must not be used again

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = wanted(tensor)
        if dtype is None or tensor.dtype is dtype:  # first, as a tied parameter that was cast is the same object
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = (tensor, tensor.to(dtype))
        return done[id(tensor)][1]

    # torch's only way to change a module in place; recurrent layers and wrappers extend it.
    result: nn.Module = module._apply(cast)  # type: ignore[no-untyped-call]
    return result


class DefaultDtype:
    """A context in which torch makes tensors in ``dtype``. May be entered again, also while it is entered."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        if self._before:  # empty when restore() came first
            torch.set_default_dtype(self._before.pop())

    @property
    def outside(self) -> torch.dtype:
        """The default dtype outside this context."""
        return self._before[0] if self._before else torch.get_default_dtype()

    def restore(self) -> None:
        """Leave every level at once."""
        if self._before:
            torch.set_default_dtype(self._before[0])
            self._before.clear()
