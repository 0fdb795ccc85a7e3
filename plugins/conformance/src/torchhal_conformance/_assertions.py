"""Compare measured with expected values: each function raises CheckFailed with the measured difference."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhal_conformance._check import CheckFailed, Skipped
from torchhal_conformance._error_text import with_article


def require(condition: object, message: str) -> None:
    """Fail with ``message`` unless ``condition`` is true."""
    if not condition:
        raise CheckFailed(message)


def same(what: str, got: Any, expected: Any) -> None:
    """Fail unless both are equal: tensors in dtype, shape and every bit of value, containers in type and items."""
    if difference := _difference(got, expected):
        raise CheckFailed(f"{what}: {difference}")


def plain(what: str, state: dict[str, Any]) -> None:
    """Fail unless a ``weights_only`` load returns ``state`` as it was saved."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckFailed(f"{what} is no plain data ({type(error).__name__}: {error})") from error
    same(f"{what} that was loaded", loaded, state)


def close(what: str, got: Any, expected: Any, tolerance: float) -> None:
    """Fail unless the greatest absolute difference is at most ``tolerance`` times the greatest expected value, or 1."""
    got, expected = torch.as_tensor(got).detach().cpu().double(), torch.as_tensor(expected).detach().cpu().double()
    if got.shape != expected.shape:
        raise CheckFailed(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if not got.numel():
        return
    differences = (got - expected).abs()
    scale = max(1.0, float(expected.abs().max()))
    beyond = ~(differences <= tolerance * scale)  # a NaN is not close either
    if beyond.any():
        worst = int(differences.nan_to_num(nan=float("inf")).argmax())
        raise CheckFailed(
            f"{what}: off by {float(differences.flatten()[worst]):.3g}, allowed {tolerance * scale:.3g} "
            f"{_at(got, expected, worst, int(beyond.sum()))}"
        )


def raises(
    what: str,
    errors: type[BaseException] | tuple[type[BaseException], ...],
    call: Callable[[], Any],
    *mentions: str,
) -> BaseException:
    """Fail unless ``call()`` raises one of ``errors`` whose message contains ``mentions``; return it."""
    names = " or ".join(error.__name__ for error in (errors if isinstance(errors, tuple) else (errors,)))
    try:
        value = call()
    except errors as error:
        missing = [text for text in mentions if text not in str(error)]
        if missing:
            raise CheckFailed(
                f"{what}: the message must name {', '.join(map(repr, missing))} (got {type(error).__name__}: {error})"
            ) from error
        return error
    except Skipped:
        raise
    except BaseException as error:
        raise CheckFailed(f"{what}: must raise {names} (got {type(error).__name__}: {error})") from error
    raise CheckFailed(f"{what}: must raise {names} (it returned {_show(value)})")


def _type(value: Any) -> str:
    return with_article(type(value).__name__)


def _difference(got: Any, expected: Any) -> str:
    """Return where and how ``got`` differs from ``expected``, or an empty string."""
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(got, expected)
    if type(got) is not type(expected):
        return f"got {_type(got)} ({_show(got)}), expected {_type(expected)} ({_show(expected)})"
    if isinstance(expected, Mapping):
        if list(got) != list(expected):
            return f"keys {_show(list(got))}, expected {_show(list(expected))}"
        pairs = [(f"[{key!r}]", got[key], expected[key]) for key in expected]
        one_factory, other_factory = (getattr(value, "default_factory", None) for value in (got, expected))
        if one_factory is not other_factory:
            return f"default_factory {one_factory!r}, expected {other_factory!r}"
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        names = [field.name for field in dataclasses.fields(expected)]
        pairs = [(f".{name}", getattr(got, name), getattr(expected, name)) for name in names]
    elif isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{len(got)} items, expected {len(expected)}"
        pairs = [(f"[{index}]", a, b) for index, (a, b) in enumerate(zip(got, expected, strict=True))]
    else:
        equal = got == expected or (got != got and expected != expected)
        return "" if equal else f"got {_show(got)}, expected {_show(expected)}"
    for place, one, other in pairs:
        if difference := _difference(one, other):
            return f"at {place}: {difference}"
    return ""


def _tensor_difference(got: Any, expected: torch.Tensor) -> str:
    if not isinstance(got, torch.Tensor):
        return f"got {_type(got)}, expected a tensor"
    if isinstance(got, DTensor) and isinstance(expected, DTensor):  # this rank's part of both
        if (got.placements, got.shape) != (expected.placements, expected.shape):
            told = (f"{tuple(one.shape)} placed by {one.placements}" for one in (got, expected))
            return "got {}, expected {}".format(*told)
        got, expected = got.to_local(), expected.to_local()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"got {got.dtype} of {tuple(got.shape)}, expected {expected.dtype} of {tuple(expected.shape)}"
    one, other = got.detach().cpu(), expected.detach().cpu()
    differ = (bits(one) != bits(other)).view(-1, one.element_size()).any(1).nonzero()
    return f"values differ {_at(one, other, int(differ[0]), len(differ))}" if len(differ) else ""


def _at(got: torch.Tensor, expected: torch.Tensor, index: int, count: int) -> str:
    """Return both tensors' values if they are few, else those of the element ``index`` of the ``count`` that differ."""
    if got.numel() <= 8:
        return f"(got {_show(got)}, expected {_show(expected)})"
    place = [int(one) for one in torch.unravel_index(torch.tensor(index), got.shape)]
    one, other = got.flatten()[index].item(), expected.flatten()[index].item()
    return f"(at {place} got {one!r}, expected {other!r}; {count} of {got.numel()} elements differ)"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, so that NaN equals NaN and the sign of zero counts; 8-bit floats have no ``==``."""
    # contiguous() keeps the odd stride of a dimension of size 1, which view() refuses
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def _show(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, torch.Tensor) and value.numel() <= 64 else value)
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:160]}..."
