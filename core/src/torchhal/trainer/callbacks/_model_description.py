"""Describe a model: its layers with parameters, bytes and shapes, and what one rank will hold of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.accelerators import Accelerator
from torchhal.memory_estimate import MemoryEstimate, bytes_of, format_bytes
from torchhal.trainer.callbacks._layer_shapes import layer_shapes

OWN = "(own)"
"""Name of the row of the parameters that belong to no layer."""

COLUMNS = ("name", "type", "parameters", "size", "trained", "input", "output")
"""Heads of the columns of :meth:`ModelDescription.rows`; the last two only with shapes."""

NUMBERS = ("parameters", "size")
"""Those of :data:`COLUMNS` that hold numbers."""

_UNBROKEN = "\u00a0"
"""A blank at which textwrap doesn't break a line."""


@dataclass(frozen=True)
class LayerDescription:
    """A layer, with all that is inside it.

    Args:
        name: its path in the model.
        type: its class.
        parameters: their number; None if one of them has no shape until the first batch.
        size: their bytes.
        trained: ``"trainable"``, ``"frozen"`` or ``"partly"``; empty without parameters.
        input: the shapes that its first call takes; empty if they are unknown.
        output: those that it returns.
    """

    name: str
    type: str
    parameters: int | None
    size: int
    trained: str
    input: str = ""
    output: str = ""


@dataclass(frozen=True)
class RankMemory:
    """An estimate of the memory that each rank needs.

    Args:
        strategy: the name of the strategy.
        world_size: number of ranks.
        estimate: the bytes; None if they couldn't be estimated.
        reason: why they couldn't.
    """

    strategy: str
    world_size: int
    estimate: MemoryEstimate | None
    reason: str = ""

    def lines(self) -> list[str]:
        """Return the estimate as text: a head, the parts, and what the numbers assume; no line breaks in a part."""
        ranks = "1 rank" if self.world_size == 1 else f"each of {self.world_size} ranks"
        head = f"memory of {ranks} (estimate for {self.strategy}, without activations): "
        if self.estimate is None:
            return [f"{head}unknown, as {self.reason}"]
        held = {
            "weights": self.estimate.parameters,
            "buffers": self.estimate.buffers,
            "gradients": self.estimate.gradients,
            "optimizer state": self.estimate.optimizer,
            "temporary": self.estimate.temporary,
        }
        parts = ", ".join(
            f"{name} {format_bytes(size)}".replace(" ", _UNBROKEN)
            for name, size in held.items()
            if size or name in ("weights", "gradients")
        )
        note = [f"  ({self.estimate.note})"] if self.estimate.note else []
        return [f"{head}{format_bytes(self.estimate.peak)}", f"  {parts}", *note]


@dataclass(frozen=True)
class ModelDescription:
    """A model, as a table and lines of totals.

    Args:
        layers: those down to the asked depth.
        trainable: number of trainable parameters, each counted once.
        frozen: number of the others.
        size: bytes of both.
        is_lazy: whether parameters are left out whose shapes the first batch decides.
        no_shapes: why the shapes of layers are unknown, though there is an example input; empty otherwise.
        memory: what each rank will hold; None outside of a run.
    """

    layers: tuple[LayerDescription, ...]
    trainable: int
    frozen: int
    size: int
    is_lazy: bool
    no_shapes: str = ""
    memory: RankMemory | None = None

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, with the heads; empty without layers."""
        rows = [
            (
                layer.name, layer.type, "?" if layer.parameters is None else f"{layer.parameters:,}",
                format_bytes(layer.size), layer.trained, layer.input, layer.output,
            )
            for layer in self.layers
        ]  # fmt: skip
        columns = len(COLUMNS) if any(layer.output for layer in self.layers) else len(COLUMNS) - 2
        return [row[:columns] for row in (COLUMNS, *rows)] if rows else []

    def totals(self, width: int | None = None) -> list[str]:
        """Return the lines below the table, wrapped to ``width`` characters if it is given."""
        lines = self._totals()
        if width is not None:
            lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]
        return [line.replace(_UNBROKEN, " ") for line in lines]

    def _totals(self) -> list[str]:
        total = f"{self.trainable:,} trainable parameters, {self.frozen:,} frozen, {format_bytes(self.size)}"
        lines = [total + (" (without those that the first batch will shape)" if self.is_lazy else "")]
        if self.no_shapes:
            lines.append(f"shapes of the layers: unknown, as {self.no_shapes}")
        return lines + ([] if self.memory is None else self.memory.lines())


@dataclass(frozen=True)
class Shapes:
    """The shapes of layers by name, or why there are none."""

    by_name: Mapping[str, tuple[str, str]]
    reason: str = ""


def find_shapes(
    module: nn.Module,
    max_depth: int,
    accelerator: Accelerator,
    device: torch.device,
    *,
    whole_shape: Callable[[nn.Parameter], torch.Size] = lambda parameter: parameter.shape,
) -> Shapes:
    """Return the shapes of the layers if ``module`` has an ``example_input_array``.

    Args:
        module: the whole model, not wrapped.
        max_depth: of :func:`describe_model`.
        accelerator: of ``device``.
        device: the one whose random state is kept.
        whole_shape: returns the shape of a parameter, of which a part may lie here.
    """
    try:
        if getattr(module, "example_input_array", None) is None:
            return Shapes({})
        if any(map(is_lazy, module.parameters())):
            return Shapes({}, "parameters have no shape until the first batch")
        if any(whole_shape(parameter) != parameter.shape for parameter in module.parameters()):
            return Shapes({}, "each rank has built a part of the parameters")
        return Shapes(layer_shapes(module, [name for name, _ in _layers(module, max_depth)], accelerator, device))
    except Exception as error:
        return Shapes({}, f"forward(example_input_array) raised {first_line(error)}")


def describe_model(
    module: nn.Module, max_depth: int, shapes: Shapes, memory: RankMemory | None = None
) -> ModelDescription:
    """Describe ``module``.

    Args:
        module: whole, on any device.
        max_depth: how deep to list: 1 for the model's children, 2 for theirs too, -1 for all.
        shapes: those that :func:`find_shapes` found.
        memory: what each rank will hold.
    """
    not_called = ("?", "?") if shapes.by_name else ()
    layers = [
        _describe_layer(name, layer, list(layer.parameters()), *shapes.by_name.get(name, not_called))
        for name, layer in _layers(module, max_depth)
    ]
    own = list(module.parameters(recurse=False))
    if own and layers:
        layers.append(_describe_layer(OWN, own[0], own))
    parameters = list(module.parameters())
    return ModelDescription(
        layers=tuple(layers),
        trainable=_count(parameter for parameter in parameters if parameter.requires_grad),
        frozen=_count(parameter for parameter in parameters if not parameter.requires_grad),
        size=_size(parameters),
        is_lazy=any(map(is_lazy, parameters)),
        no_shapes=shapes.reason,
        memory=memory,
    )


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _layers(module: nn.Module, max_depth: int) -> Iterable[tuple[str, nn.Module]]:
    for path, layer in module.named_modules():
        if path and (max_depth == -1 or path.count(".") < max_depth):
            yield path, layer


def _describe_layer(name: str, layer: Any, parameters: Sequence[nn.Parameter], *shapes: str) -> LayerDescription:
    trained = {parameter.requires_grad for parameter in parameters}
    return LayerDescription(
        name,
        "Parameter" if name == OWN else type(layer).__name__,
        None if any(map(is_lazy, parameters)) else _count(parameters),
        _size(parameters),
        "partly" if len(trained) > 1 else "trainable" if True in trained else "frozen" if trained else "",
        *shapes,
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters)


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(0 if is_lazy(parameter) else bytes_of(parameter) for parameter in parameters)
