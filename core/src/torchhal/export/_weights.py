"""Read a checkpoint and choose among the weights that it holds: saved, averaged, or those of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from torchhal.checkpoint._inspection import memory_key
from torchhal.checkpoint._map_location import read
from torchhal.checkpoint._trainer_format import check_format, check_has_weights
from torchhal.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigurationError
from torchhal.resolve._checkpoint_ios import find_io
from torchhal.suggestions import one_of

WEIGHTS: Final = ("average", "running")

_RUNNING: Final = "current_model_state"  # as WeightAveraging writes it, here and in Lightning
_SWA: Final = "average_model_state"
_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")


def check_dtype(dtype: Any) -> torch.dtype | None:
    """Return the floating-point dtype that is meant, or None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigurationError(f"'dtype' must be {one_of(_DTYPES)} (got {dtype!r})")
    found: torch.dtype = getattr(torch, name)
    return found


def read_for_export(
    path: str, weights: str | None, dtype: torch.dtype | None
) -> tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...]]:
    """Return the checkpoint, the chosen weights, where they come from, and notes.

    Of the checkpoint only the weights need have been read. Names that share memory in it do so in the weights.

    Args:
        path: of the checkpoint.
        weights: ``"average"``, ``"running"``, or None for the ``state_dict``.
        dtype: of floating-point weights; None for no change.
    """
    _, io = find_io(path)
    # what one file holds is verified as a whole; of many, each part is when it is read
    content = io.open_checkpoint(path) if "sharded" in io.features else io.load_checkpoint(path)
    check_format(content, path)
    check_has_weights(content, path)
    parts, origin, notes = _choose(content, weights, path)
    if not all(isinstance(part, Mapping) and all(isinstance(name, str) for name in part) for part in parts):
        raise CheckpointCorruptError(f"{path!r} is damaged: its weights must be a dict from names to tensors")
    state, *averaged = read([dict(part) for part in parts])  # together: what shares memory does so afterwards
    for parameters in averaged:
        state = _overlaid(state, parameters)
    return content, state if dtype is None else _converted(state, dtype), origin, notes


def _choose(content: Mapping[str, Any], weights: str | None, path: str) -> tuple[list[Any], str, tuple[str, ...]]:
    """Return a state dict, followed by parameters to put into it, if any; the origin of these weights; and notes."""
    state = content["state_dict"]
    if weights is None:
        return [state], "state_dict", ()
    if weights == "average":
        if _RUNNING in content:
            return [state], "average", ()
        averaged = _stochastic_average(content)
        if averaged is not None:
            note = "its batch norms have the statistics of the weights of training, not of the average"
            has_statistics = any(str(name).endswith("running_mean") for name in state)
            return [state, averaged], "average", (note,) if has_statistics else ()
        raise CheckpointMismatchError(
            f"{path!r} holds no average beside its weights: leave 'weights' out for its state_dict. A checkpoint of "
            "weights only, saved by a run with WeightAveraging, has the average there"
        )
    if _RUNNING in content:
        return [content[_RUNNING]], "running", ()
    if "optimizer_states" in content:
        return [state], "running", ()
    raise CheckpointMismatchError(
        f"{path!r} holds one set of weights, and not those that training continues from: leave 'weights' out"
    )


def _stochastic_average(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the parameters that StochasticWeightAveraging has averaged; None where it has not begun."""
    callbacks = content.get("callbacks")
    for saved in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if isinstance(saved, Mapping) and isinstance(saved.get(_SWA), Mapping) and saved[_SWA]:
            found: Mapping[str, Any] = saved[_SWA]
            return found
    return None


def _overlaid(state: Mapping[str, Any], averaged: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the averaged parameters, under every name of each."""
    names = {memory_key(value): name for name, value in state.items() if name in averaged}
    return {name: averaged.get(names.get(memory_key(value), name), value) for name, value in state.items()}


def _converted(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``state`` with its floating-point tensors in ``dtype``; names for one tensor stay names for one."""
    done: dict[Any, Any] = {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and memory_key(value) not in done:
            done[memory_key(value)] = value.detach().to(dtype)
    return {name: done.get(memory_key(value), value) for name, value in state.items()}
