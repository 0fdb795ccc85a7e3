"""Record the forward of a model for each shape of batch, and split it into the graphs of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal_parallel._fake_modules import modules_around
from torchhal_parallel._graph_capture import GraphCapture
from torchhal_parallel._lru_cache import LRUCache
from torchhal_parallel._pipeline_split import Stage, stage_owns, stages_of
from torchhal_parallel._stage import StagedForward, StageRoot, boundary_tensors
from torchhal_parallel._warn_once import WarnOnce

KEPT_FORWARDS = 256
"""Shapes of batches for which the stages' graphs are kept."""

RECORDED_IN_A_ROW = 10
"""After so many batches in a row for each of which the forward was recorded anew, there is a warning."""


class StageGraphs:
    """The graphs of all stages for the shapes of batches that there were, and which ones run now.

    Made while every rank has the whole model.

    Args:
        module: the user's model.
        split_points: modules at which a new stage begins.
        stages: which modules each stage has.
        roots: this rank's stages, by their indices.
        device: where the run computes.
        trainer: what the forward may read the epoch of, for example; None without one.
        warn: gives the warnings.
    """

    def __init__(
        self,
        module: nn.Module,
        split_points: Sequence[str],
        stages: Sequence[Stage],
        roots: Mapping[int, StageRoot],
        *,
        device: torch.device,
        trainer: Any,
        warn: WarnOnce,
    ) -> None:
        self._module = module
        self._split_points = split_points
        self._stages = stages
        self._roots = roots
        self._warn = warn
        around = modules_around(split_points)
        self._split_modules = {name: module.get_submodule(name) for name in (*around, *split_points)}
        self._capture = GraphCapture(module, around, device, trainer)
        self._forwards = LRUCache(KEPT_FORWARDS)
        self._recorded_in_a_row = 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what is recorded inside out of the batches in a row for which a forward was recorded."""
        before = self._recorded_in_a_row
        try:
            yield
        finally:
            self._recorded_in_a_row = before

    def select(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> StagedForward:
        """Return the forward for ``rows`` samples of such tensors, which this rank's stages compute from now on."""
        shapes = tuple((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items())
        given = tuple((name, type(value), value) for name, value in constants.items())
        key = (shapes, given, rows, self._module.training, torch.is_grad_enabled())
        changed: str | None = None

        def is_valid(made: StagedForward) -> bool:
            nonlocal changed
            changed = made.reads.differing()
            return changed is None

        forward: StagedForward = self._forwards.get_or_make(
            key, lambda: self._record(tensors, constants, rows), is_valid=is_valid
        )
        self._recorded_in_a_row = 0 if changed is None else self._recorded_in_a_row + 1
        if self._recorded_in_a_row == RECORDED_IN_A_ROW:
            self._warn(
                "attributes",
                f"the forward of {type(self._module).__name__} reads {changed!r}, which is another in each batch: a "
                "pipeline follows it anew each time, which may take longer than the step. Make it a buffer, a tensor "
                "that is changed in place, or an argument of self(...) that is a tensor of one value per sample",
            )
        for index, root in self._roots.items():
            dtypes = tuple(each.dtype for each in forward.boundaries[index][1])
            root.use(forward.stages[index], forward.constants, dtypes)
            root.follow_buffers()
        return forward

    def _record(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> StagedForward:
        model = type(self._module).__name__
        self._check_split_modules()
        found = self._capture(tensors, rows, constants)
        if found.recomputes:
            self._warn(
                "recomputation",
                f"the forward of {model} calls torch.utils.checkpoint, or another that keeps activations elsewhere, "
                "between its modules: a pipeline follows what is computed there, and keeps the activations. Use "
                "HybridStrategy(pipeline=..., activation_checkpointing=...), or do it inside of the layers",
            )
        stages = stages_of(found.graph, self._split_points, model, found.constants.keys())
        for index, (ours, now) in enumerate(zip(self._stages, stages, strict=True)):
            for name in now.modules:
                if not stage_owns(ours, name) and not self._is_without_state(name):
                    raise ModelError(
                        f"called with {', '.join((*tensors, *constants))}, {model} uses {name!r} in stage {index}, and "
                        "it was taken for a part of another stage: let its forward call its modules in the order in "
                        "which they are registered, with or without these arguments"
                    )
        results = [found.values[node] for node in found.results]
        boundaries = [
            (
                boundary_tensors([found.values[node] for node in stage.inputs], index > 0),
                boundary_tensors([found.values[node] for node in stage.outputs], True),
            )
            for index, stage in enumerate(stages)
        ]
        boundaries[-1] = (
            boundaries[-1][0],
            boundary_tensors([value if value.dim() else value[None] for value in results], True),
        )
        scalars = frozenset(index for index, value in enumerate(results) if not value.dim())
        return StagedForward(stages, boundaries, found.returned, found.constants, found.reads, scalars)

    def _check_split_modules(self) -> None:
        """Raise ModelError if another module stands where a stage begins, or around that."""
        now = dict(self._module.named_modules(remove_duplicate=False))
        for name, before in self._split_modules.items():
            if (found := now.get(name)) is before:
                continue
            model, what = type(self._module).__name__, f"a {type(before).__name__}"
            become = "is gone" if found is None else f"has become another object, of {type(found).__name__}"
            raise ModelError(
                f"{name!r} of {model} was {what} when the model was cut into the stages of a pipeline there, and "
                f"{become}: change modules before the fit, in configure_model say, let the forward of {model} choose "
                "between modules that it has from the start, cut elsewhere by HybridStrategy(split_points=[...]), or "
                "use a strategy under which each rank has the model, such as 'zero1'"
            )

    def _is_without_state(self, name: str) -> bool:
        try:
            used = self._module.get_submodule(name)
        except AttributeError:  # a parameter
            return False
        return next(used.parameters(), None) is None and next(used.buffers(), None) is None
