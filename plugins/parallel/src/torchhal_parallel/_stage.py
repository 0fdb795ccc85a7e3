"""One stage of a pipeline as a module, and a forward in stages as it was recorded for some shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._attribute_reads import AttributeReads
from torchhal_parallel._graph_capture import ResultIndex
from torchhal_parallel._pipeline_split import Stage
from torchhal_parallel._recorded_calls import is_mutable


class StageGraph(nn.Module):
    """The call of a stage's graph, which hooks can be put around."""

    def __init__(self, graph_module: Any) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.compute: Callable[..., Any] = type(graph_module).forward

    def forward(self, *values: Any) -> Any:
        return self.compute(self.graph_module, *values)


class StageRoot(nn.Module):
    """One stage as a module: its parameters are those of the user's submodules, under their names.

    Which graph runs changes with the shapes, the training mode and the arguments; what it holds does not.
    """

    def __init__(self, module: nn.Module, stage: Stage, *, is_last: bool) -> None:
        super().__init__()
        self.module = (module,)  # in a tuple: no submodule
        self.is_last = is_last
        self.graph_module: Any = fx.GraphModule(module, stage.graph)
        self.graphs = (StageGraph(self.graph_module),)  # in a tuple, as above
        self.compute: Callable[..., Any] = self._run
        self.dtypes: tuple[torch.dtype, ...] = ()
        self._stage: Stage | None = None
        self._changes_values = False
        self._forwards: WeakKeyDictionary[fx.Graph, Callable[..., Any]] = WeakKeyDictionary()
        self._buffers_read: list[tuple[nn.Module, nn.Module, str]] = []
        for path, _, name in (used.rpartition(".") for used in stage.modules):
            owner, holder = module.get_submodule(path), self.graph_module.get_submodule(path)
            if holder is not owner and name in holder._buffers:
                self._buffers_read.append((owner, holder, name))

    def use(self, stage: Stage, constants: Mapping[str, torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> None:
        """Run the graph of ``stage`` from now on; what goes out has ``dtypes``, which the next stage expects."""
        if self._stage is stage:
            return
        self._stage, self.dtypes = stage, dtypes
        if stage.graph not in self._forwards:
            for name in stage.modules:  # one without parameters, which may be in any stage
                if not _has(self.graph_module, name):
                    self.graph_module.add_submodule(name, self.module[0].get_submodule(name))
            for name in stage.constants:
                setattr(self.graph_module, name, constants[name])
            # not another module: a wrapper may have replaced the parameters in this one, and does so in each step
            self.graph_module.graph = stage.graph
            self._forwards[stage.graph] = type(self.graph_module).forward
        self.graphs[0].compute = self._forwards[stage.graph]
        self._changes_values = any(is_mutable(node) for node in stage.graph.nodes)

    def follow_buffers(self) -> None:
        """Read the tensors that the model has as its buffers now, which another may have been assigned to.

        Raises:
            ModelError: one of another shape or dtype.
        """
        for owner, holder, name in self._buffers_read:
            now, before = owner._buffers.get(name), holder._buffers[name]
            if now is before:
                continue
            if now is None or before is None or (now.shape, now.dtype) != (before.shape, before.dtype):
                raise ModelError(
                    f"the buffer {name!r} of {type(owner).__name__} has become {_kind(now)}, and a pipeline was cut "
                    f"with {_kind(before)}: change it in place, or before fit"
                )
            holder._buffers[name] = now

    def _run(self, *values: Any) -> Any:
        if self._changes_values:  # which those of the stage before don't allow, as its gradients end in them
            values = tuple(value.clone() if value.requires_grad else value for value in values)
        result = self.graphs[0](*values)
        # pieces of a batch are put together along their first dimension
        return [value[None] if not value.dim() else value for value in result] if self.is_last else result

    def forward(self, *values: Any) -> Any:
        result = self.compute(*values)
        return tuple(value.to(dtype).contiguous() for value, dtype in zip(result, self.dtypes, strict=True))


@dataclass(frozen=True)
class StagedForward:
    """The forward for some shapes and arguments, in stages.

    Args:
        stages: what runs.
        boundaries: what goes in and out of each, as tensors on the meta device.
        returned: what the forward returns, with :class:`~torchhal_parallel._graph_capture.ResultIndex` for each tensor.
        constants: tensors of the graphs' own.
        reads: the attributes by whose values the forward is this one.
    """

    stages: list[Stage]
    boundaries: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
    returned: Any
    constants: Mapping[str, torch.Tensor]
    reads: AttributeReads
    scalars: frozenset[int]
    """Which results have no dimension; the last stage gives them one."""

    def output(self, values: Sequence[torch.Tensor]) -> Any:
        """Return what the forward returns, from what the last stage gives."""

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, ResultIndex):
                return leaf
            value = values[leaf.index]
            return value.reshape(()) if leaf.index in self.scalars else value

        return map_tensors(self.returned, fill, is_leaf=lambda item: isinstance(item, ResultIndex))


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"one of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _has(module: nn.Module, name: str) -> bool:
    for attribute in name.split("."):
        if not hasattr(module, attribute):
            return False
        module = getattr(module, attribute)
    return True


def boundary_tensors(values: Sequence[torch.Tensor], trained: bool) -> tuple[torch.Tensor, ...]:
    """Return the tensors on the meta device that describe ``values`` between two stages to a schedule."""
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(trained and value.is_floating_point())
        for value in values
    )
