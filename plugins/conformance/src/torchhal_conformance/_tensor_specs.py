"""Describe tensors and nests of containers: small readable values that build the inputs of generated checks."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import nn

from torchhal_conformance._assertions import bits

FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX: Final = (torch.complex64, torch.complex128)
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
EIGHT_BITS: Final = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
"""Floating-point dtypes of 8 bits, where this torch has them: storage without arithmetic."""
ALL_DTYPES: Final = (*FLOATS, *COMPLEX, *INTEGERS, *EIGHT_BITS)

PLAIN: Final = ("contiguous", "transposed", "stepped", "middle", "expanded")
"""Layouts that every dtype has; ``middle`` is a view that begins behind its storage's first element."""
LAZY: Final = ("conjugated", "negated", "requires_grad", "parameter")
"""Layouts of some dtypes: bits that torch applies later, and leaves of autograd."""
LAYOUTS: Final = (*PLAIN, *LAZY)


def layouts_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the layouts that a tensor of ``dtype`` may have."""
    if dtype.is_complex:
        return LAYOUTS
    if dtype in (torch.float32, torch.float64):
        return tuple(name for name in LAYOUTS if name != "conjugated")
    return (*PLAIN, "requires_grad", "parameter") if dtype in FLOATS else PLAIN


def stored_dtypes(device: torch.device, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return those of ``dtypes`` of which torch's own copies to the device, there and back keep every digit.

    Some hardware stores an int64 in 32 bits, and no complex128.
    """
    stored = []
    for dtype in dtypes:
        # one element of another tensor is for a lazy backend a Python number, which may be of fewer dtypes
        plain, element = TensorSpec(dtype), TensorSpec(dtype, (), "middle")
        if _is_stored(plain, device) and _is_stored(element, device):
            stored.append(dtype)
    return stored


def _is_stored(spec: TensorSpec, device: torch.device) -> bool:
    given = spec.build()
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        # a lazy backend returns what it was given, until it had to compute with it
        return torch.equal(bits(given), bits(given.to(device).clone().cpu()))
    return False


@dataclass(frozen=True)
class TensorSpec:
    """Description of one tensor on the CPU, whatever the default dtype and device are.

    Attributes:
        dtype: any but a quantised one.
        shape: its sizes; ``()`` for a 0-d tensor.
        layout: one of :func:`layouts_of` its dtype; ``expanded`` and ``transposed`` mean nothing for a 0-d tensor.
    """

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (2, 3)
    layout: str = "contiguous"

    def __repr__(self) -> str:
        return f"<{self.layout} {str(self.dtype).removeprefix('torch.')} {self.shape}>"

    def build(self, number: int = 0) -> torch.Tensor:
        """Return the tensor; its values are exact in each dtype, and depend on ``number``."""
        shape, layout = self.shape, self.layout
        if layout == "expanded" and shape:
            return self._values((1, *shape[1:]), number).expand(shape)
        if layout == "transposed" and len(shape) > 1:
            return self._values((*shape[:-2], shape[-1], shape[-2]), number).transpose(-1, -2)
        if layout == "stepped" and shape:
            return self._values((*shape[:-1], 2 * shape[-1]), number)[..., ::2]
        if layout == "middle":
            count = math.prod(shape)
            return self._values((count + 3,), number)[2 : 2 + count].view(shape)
        if layout == "negated":
            values = self._values(shape, number)
            if not values.is_complex():
                return torch.complex(torch.zeros_like(values), -values).conj().imag
            return torch._neg_view(-values)
        values = self._values(shape, number)
        if layout == "conjugated":
            return values.conj()
        if layout == "requires_grad":
            return values.requires_grad_()
        return nn.Parameter(values) if layout == "parameter" else values

    def _values(self, shape: tuple[int, ...], number: int) -> torch.Tensor:
        count = math.prod(shape)
        steps = torch.arange(count, dtype=torch.int64, device="cpu") * 3 + 5 * number + 1
        if self.dtype is torch.bool:
            values = steps % 2 == 0
        elif self.dtype.is_complex:
            fine = 2.0**-30 if self.dtype is torch.complex128 else 0.0  # complex64 has no room for it
            real, imag = (steps % 7 - 2).double() + fine, (steps % 5).double() + 0.5 + fine
            values = torch.complex(real, imag).to(self.dtype)
        elif self.dtype in (torch.int64, torch.float64):
            # narrower dtypes have none of these: int32 and float64, or float32
            wide = (1 << 54) + 1 if self.dtype is torch.int64 else 2.0**-30
            values = (steps % 7 - 2).to(self.dtype) + wide
        elif self.dtype in EIGHT_BITS or self.dtype in FLOATS:
            values = (steps % 7 - 2).float().to(self.dtype)
        else:
            values = (steps % 7).to(self.dtype)
        return values.reshape(shape)


Pair = namedtuple("Pair", "first second")


@dataclass
class Sample:
    """Dataclass with a tensor among its fields."""

    image: Any
    label: Any = None


@dataclass(frozen=True)
class FrozenSample:
    """Dataclass whose fields can't be set."""

    image: Any
    label: Any = None


class Batch(UserDict):  # type: ignore[type-arg]
    """Mapping that is no dict."""


class Bag(list):  # type: ignore[type-arg]
    """Subclass of list."""


class MovesItself:
    """Object with a method ``to`` of its own, which returns a new object and knows none of torch's keywords."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def to(self, device: torch.device) -> MovesItself:
        return MovesItself(self.content.to(device) if isinstance(self.content, torch.Tensor) else self.content)


def _named(values: list[Any]) -> dict[Any, Any]:
    return {("a", "b", 3)[index % 3] if index < 3 else f"k{index}": value for index, value in enumerate(values)}


def _two(values: list[Any]) -> tuple[Any, Any]:
    return (*values[:2], *[None] * (2 - len(values[:2])))


CONTAINERS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "dict": _named,
    "OrderedDict": lambda values: OrderedDict(_named(values)),
    "Pair": lambda values: Pair(*_two(values)),
    "Sample": lambda values: Sample(*_two(values)),
    "FrozenSample": lambda values: FrozenSample(*_two(values)),
    "defaultdict": lambda values: defaultdict(list, _named(values)),
    "UserDict": lambda values: Batch(_named(values)),
    "list subclass": Bag,
}
"""Name -> a function that makes the container of these values; those of two fields take the first two."""


@dataclass(frozen=True)
class NestSpec:
    """Description of a container, and of what is in it."""

    container: str
    items: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.container}({', '.join(map(repr, self.items))})"

    def build(self, number: int = 0) -> Any:
        """Return the container with each tensor built; ``number`` as of :meth:`TensorSpec.build`."""
        return CONTAINERS[self.container]([build(item, number) for item in self.items])


def build(spec: Any, number: int = 0) -> Any:
    """Return what ``spec`` describes; anything but a description is itself."""
    return spec.build(number) if isinstance(spec, TensorSpec | NestSpec) else spec


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, container or leaf) of a nest, containers before what is in them."""
    yield path, value
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from parts(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from parts(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from parts(getattr(value, field.name), f"{path}.{field.name}")


def deepest(leaf: Any) -> list[Any]:
    """Return one description of each container inside of each of three others, with ``leaf`` at the bottom."""
    alone = [NestSpec(name, (leaf, "text")) for name in CONTAINERS]
    inside = [
        NestSpec(outer, (NestSpec(middle, (NestSpec(name, (leaf, None)),)), 7))
        for number, name in enumerate(CONTAINERS)
        for outer, middle in [(("dict", "list"), ("list", "tuple"), ("tuple", "dict"))[number % 3]]
    ]
    return [*alone, *inside, *(NestSpec(name) for name in CONTAINERS if name not in ("Pair", "Sample", "FrozenSample"))]
