"""Run one compiled step: an executor, and what goes in and comes out of it for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_ipu._config import sizes
from torchhal_ipu._step_tracing import TENSOR, Returned, Step, TracedIndex

_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max,
}  # fmt: skip


def flatten(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a batch, and its structure.

    Raises:
        ModelError: an array of another library is in it.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if getattr(leaf, "ndim", 0):
                raise ModelError(
                    f"a batch has a {type(leaf).__name__} of shape {tuple(leaf.shape)} in it, and a compiled step, "
                    "which takes tensors, would keep that of the first batch for ever: make a tensor of it in the "
                    "dataset, or leave it out"
                )
            return leaf
        tensors.append(leaf.detach())
        return TENSOR

    return tensors, map_tensors(batch, take)


def shapes(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


class CompiledStep:
    """A step that was made for batches like ``batch``.

    Args:
        module: the user's.
        step: see :class:`Step`.
        name: of the step.
        batch: the first.
        indices: after the batch: its index, and that of its loader.
        results: see :class:`Step`.
        options: poptorch's.
        optimizer: for training; None without.
        random_state: of an earlier run, to go on from.

    Raises:
        ModelError: the batch can't be dealt out.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Any],
        name: str,
        batch: Any,
        indices: tuple[Any, ...],
        results: Any,
        options: Any,
        *,
        optimizer: Any = None,
        random_state: list[int] | None = None,
    ) -> None:
        import poptorch

        tensors, self.structure = flatten(batch)
        self.shapes = shapes(tensors)
        self.name = name
        self._results = results
        self._parts = sizes(options).parts
        self._check(tensors, sizes(options))
        known = tuple(TracedIndex("batch_idx", name) if place == 0 else index for place, index in enumerate(indices))
        self._graph = Step(module, step, name, self.structure, known, results, training=optimizer is not None)
        self._classes = [(tensor, type(tensor)) for tensor in (*module.parameters(), *module.buffers())]
        if optimizer is not None:
            self.executor = poptorch.trainingModel(self._graph, options=options, optimizer=optimizer)
        else:
            self.executor = poptorch.inferenceModel(self._graph, options=options)
        self._first = tensors
        self._random_state = random_state

    def _check(self, tensors: list[torch.Tensor], need: Any) -> None:
        if not tensors:
            raise ModelError(f"a batch for {self.name} has no tensor (got {self.structure!r})")
        for tensor in tensors:
            size = tensor.shape[0] if tensor.dim() else 1
            if size % need.parts:
                raise ModelError(
                    f"the first dimension of each tensor in a batch for {self.name} must be a multiple of {need.parts} "
                    f"= {need} (got shape {tuple(tensor.shape)}): give the Trainer torch's DataLoader, which is made "
                    "anew for that, or batches of this size"
                )

    def compile(self) -> None:
        """Record and compile the step, and take the IPUs; without this the first call does."""
        self.executor.compile(*self._first)
        if self._random_state is not None:
            self.executor.rng_state = self._random_state

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        return shapes(tensors) == self.shapes

    def __call__(self, tensors: list[torch.Tensor], structure: Any) -> Any:
        """Run the step; return what it returned, and log as the step called ``self.log``.

        Raises:
            ModelError: the batch has other things in it than tensors, and not those of the first one.
        """
        if structure != self.structure:
            raise ModelError(
                f"the batches for {self.name} differ in something else than their tensors, and a compiled step knows "
                f"that of the first one for ever: make tensors of it, or leave it out (first {self.structure!r}, then "
                f"{structure!r})"
            )
        returned = self.executor(*tensors)
        values = list(returned) if isinstance(returned, tuple | list) else [] if returned is None else [returned]
        record = self._graph.record
        for entry, value in zip(record.logged, values[record.outputs :], strict=True):
            reduce = _REDUCED.get(entry.reduction, torch.mean)
            self._results.log(name=entry.name, value=reduce(value.float()), **entry.arguments(self._parts))
        outputs = iter(values[: record.outputs])
        return map_tensors(
            record.output, lambda leaf: leaf.of_call(next(outputs)) if isinstance(leaf, Returned) else leaf
        )

    def release(self) -> None:
        """Give the IPUs back; weights and optimizer state come to the host."""
        if self.executor.isCompiled() and self.executor.isAttachedToDevice():
            self.executor.detachFromDevice()

    def destroy(self) -> None:
        """Give the weights back to the module, and its tensors their classes from before."""
        self.executor.destroy()
        for tensor, cls in self._classes:  # a module that failed to compile keeps poptorch's otherwise
            if tensor.__class__ is not cls:
                tensor.__class__ = cls
