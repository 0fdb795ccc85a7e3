"""Gather the state of all stages of a pipeline on rank 0, and pick this rank's share out of a whole state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import CheckpointMismatchError
from torchhal_parallel._gathering import on_every_rank, on_first_rank


class StageState:
    """The state of a model whose stages are on the ranks of a pipeline.

    Args:
        device: of this rank.
        guard: makes ranks that are in another operation raise, with the name of this one.
        sends: this rank gives its stage's state; the ranks of one stage have the same, so one of them does.
        shapes: of the entries of the whole model's state, by name, before it was divided; None for one without.
    """

    def __init__(
        self,
        device: torch.device,
        guard: Callable[[str], AbstractContextManager[None]],
        *,
        sends: bool,
        shapes: Mapping[str, torch.Size | None],
    ) -> None:
        self._device = device
        self._guard = guard
        self._sends = sends
        self._shapes = shapes

    def gather(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all stages on rank 0, and ``mine`` on the others. Called on every rank."""
        with self._guard("gathering of the stages"):
            parts = on_first_rank(mine if self._sends else {}, self._device)
        return {key: value for part in parts or [mine] for key, value in part.items()}

    def gather_everywhere(self, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of all stages on every rank. Called on every rank."""
        parts = on_every_rank(mine if self._sends else {}, self._device)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def own_module_state(self, state: Mapping[str, Any], module: nn.Module, *, strict: bool) -> dict[str, Any]:
        """Return the entries of a whole ``state`` that the stages of this rank have in ``module``.

        Raises:
            CheckpointMismatchError: a shape is not that of the whole model, or, if ``strict``, a name.
        """
        known = self._shapes
        shapes = {name: tuple(value.shape) for name, value in state.items() if hasattr(value, "shape")}
        missing, unexpected = sorted(set(known) - set(state)), sorted(set(state) - set(known))
        wrong = [
            f"{name!r} has the shape {shapes[name]} there and {tuple(shape)} here"
            for name, shape in known.items()
            if shape is not None and name in shapes and shapes[name] != tuple(shape)
        ]
        if wrong or (strict and (missing or unexpected)):
            problems = [
                *wrong,
                *(f"{name!r} is missing" for name in missing),
                *(f"{name!r} is unknown" for name in unexpected),
            ]
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(module).__name__}: {'; '.join(problems[:6])}"
            )
        here = {name for name, value in module.state_dict().items() if not getattr(value, "is_meta", False)}
        return {name: value for name, value in state.items() if name in here}


def own_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` without the entries of other stages' parameters, by the indices among all parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = {index for index, parameter in enumerate(parameters) if parameter.is_meta}
    return {**state, "state": {index: entry for index, entry in state.get("state", {}).items() if index not in others}}
