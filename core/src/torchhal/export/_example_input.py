"""Make inputs of ``forward`` at any batch size, from shapes or from an example."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from torchhal.errors import ConfigurationError, ModelError
from torchhal.pytree import map_tensors
from torchhal.suggestions import did_you_mean

EXAMPLE_SIZE: Final = 2
"""Samples in the batch that is exported: torch.export takes a size of 1 for a constant."""

COMPARED_SIZES: Final = (1, 3)
"""Samples in the batches on which a file is compared with the module."""

MOST_SAMPLES: Final = max(EXAMPLE_SIZE, *COMPARED_SIZES)

_SPEC: Final = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\]")
_DTYPES: Final = tuple(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))
_LARGEST: Final = 1 << 32
"""Elements of an example that nobody means."""


class ExampleInput:
    """Arguments of a ``forward``, and which of their dimensions is the batch.

    Args:
        arguments: in order.
        keywords: by name.
        batched: those of the tensors whose first dimension is the batch; None for fixed shapes.
    """

    def __init__(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], *, batched: list[torch.Tensor] | None
    ) -> None:
        self._given = arguments, keywords
        self._batched = batched
        if batched is not None and not batched:
            raise ConfigurationError(
                f"the example input must have a tensor with a dimension, which is then the batch (got {self}). For an "
                "input without one: dynamic_batch=False, or --fixed-shapes"
            )

    @property
    def dynamic_batch(self) -> bool:
        return self._batched is not None

    def __str__(self) -> str:
        arguments, keywords = self._given
        parts = [*map(_text, arguments), *(f"{name}={_text(value)}" for name, value in keywords.items())]
        return ", ".join(parts) or "nothing"

    @staticmethod
    def check(given: Any) -> None:
        """Raise ConfigurationError for what is no input, or for a text that is no shape."""
        if isinstance(given, list):
            if not given or not all(isinstance(each, str) for each in given):
                raise ConfigurationError(
                    f"'example_input' must be a tensor, a tuple of arguments, a dict, or texts such as "
                    f"'float32[1,3,32,32]' (got {given!r:.80})"
                )
        elif not (given is None or isinstance(given, str | torch.Tensor | tuple | Mapping)):
            raise ConfigurationError(
                f"'example_input' must be a tensor, a tuple of arguments, a dict, or texts such as "
                f"'float32[1,3,32,32]' (got {given!r:.80})"
            )
        for text in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
            _parse(text)

    @classmethod
    def of(cls, given: Any, module: nn.Module, *, dynamic_batch: bool) -> ExampleInput:
        """Return the input that is given, or that the module has as its ``example_input_array``."""
        name = type(module).__name__
        if given is None:
            given = getattr(module, "example_input_array", None)
            if given is None:
                raise ConfigurationError(
                    f"'example_input' must be given: {name} has no example_input_array. In a shell: --input "
                    "'float32[1,3,32,32]', once for each argument of forward"
                )
        batched: list[torch.Tensor] | None
        if isinstance(given, str | list):
            arguments, keywords, batched = _from_texts(
                [given] if isinstance(given, str) else given, least=MOST_SAMPLES if dynamic_batch else 1
            )
        else:
            named = isinstance(given, Mapping)
            arguments = () if named else given if isinstance(given, tuple) else (given,)
            keywords = {str(key): value for key, value in given.items()} if named else {}
            arguments, keywords = map_tensors((arguments, keywords), _detached)
            batched = _alike([tensor for tensor in tensors_in((arguments, keywords)) if tensor.dim()])
        made = cls(arguments, keywords, batched=batched if dynamic_batch else None)
        try:
            inspect.signature(module.forward).bind(*arguments, **keywords)
        except TypeError as error:
            takes = str(inspect.signature(module.forward)).partition(" -> ")[0]
            raise ConfigurationError(f"'example_input' must fit {name}.forward{takes} (got {made}: {error})") from error
        return made

    def at(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``size`` samples, those of the example in turn; as given with fixed shapes."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
            self._given, lambda leaf: leaf[torch.arange(size) % len(leaf)] if self._is_batched(leaf) else leaf
        )
        return found

    def dynamic_shapes(self, module: nn.Module, dim: Any) -> dict[str, Any] | None:
        """Return the free dimensions by argument, as ``torch.export.export`` takes them; None for none."""
        if not self.dynamic_batch:
            return None
        arguments, keywords = self._given
        bound = inspect.signature(module.forward).bind(*arguments, **keywords).arguments
        shapes: dict[str, Any] = map_tensors(dict(bound), lambda leaf: {0: dim} if self._is_batched(leaf) else None)
        return shapes

    def _is_batched(self, leaf: Any) -> bool:
        return any(leaf is tensor for tensor in self._batched or ())


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of containers, in its order."""
    found: list[torch.Tensor] = []

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_tensors(nest, keep)
    return found


def run(module: Any, inputs: ExampleInput, size: int) -> list[torch.Tensor]:
    """Return the tensors that ``module`` computes of ``size`` samples."""
    arguments, keywords = inputs.at(size)
    name = type(module).__name__
    if type(module).forward is nn.Module.forward:
        raise ModelError(f"{name} must have a forward, which is what is exported: define it, or export safetensors")
    try:
        with torch.no_grad():
            output = tensors_in(module(*arguments, **keywords))
    except Exception as error:
        raise ModelError(
            f"{name}.forward raised {type(error).__name__} for the input {inputs}: {error}. Give the input that it "
            "takes, 'example_input' or --input, in the dtype of the weights, or have these in another by 'dtype'"
        ) from error
    if not output:
        raise ModelError(f"{name}.forward must return a tensor, or a container with some, to be exported")
    return output


def _detached(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    return type(value).__name__


def _parse(text: str) -> tuple[str | None, torch.dtype, tuple[int, ...]]:
    match = _SPEC.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigurationError(
            f"'input' must be a dtype and a shape, 'float32[1,3,32,32]', and may begin with the name of an argument, "
            f"'mask=bool[1,32]' (got {text!r})"
        )
    name = match["dtype"]
    if name not in _DTYPES:
        raise ConfigurationError(
            f"'input' must begin with a dtype of torch, as in 'float32[1,3,32,32]' (got {text!r})"
            f"{did_you_mean(name, _DTYPES)}"
        )
    sizes = match["shape"].split(",") if match["shape"] else []
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise ConfigurationError(f"'input' must have sizes of at least 1 in its shape (got {text!r})")
    shape = tuple(map(int, sizes))
    if math.prod(shape) > _LARGEST:
        raise ConfigurationError(f"'input' must be an example that fits into memory (got {text!r})")
    return match["name"], getattr(torch, name), shape


def _from_texts(texts: list[str], *, least: int) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """Return arguments, keywords and the batched tensors, which have ``least`` samples at least."""
    generator = torch.Generator().manual_seed(0)
    parsed = [_parse(text) for text in texts]
    batch = next((shape[0] for _, _, shape in parsed if shape), None)
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    batched = []
    for name, dtype, shape in parsed:
        is_batched = bool(shape) and shape[0] == batch
        value = _values((max(shape[0], least), *shape[1:]) if is_batched else shape, dtype, generator)
        if name:
            keywords[name] = value
        else:
            arguments = (*arguments, value)
        if is_batched:
            batched.append(value)
    return arguments, keywords, batched


def _alike(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those whose first dimension is as long as that of the first."""
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers, or zeros and ones where the dtype has integers, which any embedding takes."""
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=kind).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
