"""Verify, before it is loaded, that a saved state can be this optimizer's or scheduler's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.checkpoint._inspection import is_tensor
from torchhal.errors import CheckpointMismatchError
from torchhal.pytree import map_tensors

_IMPLEMENTATIONS = ("capturable", "differentiable", "foreach", "fused")
"""Options that choose how a step is computed, which depend on devices and not on each other's values."""


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError for another number of groups or parameters, or for values of other types or shapes.

    Left to torch, these are raised in the first ``step``, as KeyErrors and shapes that can't be broadcast. Tensors that
    have not been read are taken by their shapes. What the optimizer's ``load_state_dict`` pre-hooks make of the state
    is what is checked; of one with a ``load_state_dict`` of its own, only the number of groups and parameters.
    """
    if lacks := [name for name in ("state", "param_groups") if name not in state]:
        raise _mismatch(optimizer, f"it has no {' and no '.join(map(repr, lacks))}")
    state = _after_hooks(optimizer, map_tensors(state, _outline, is_leaf=is_tensor))
    saved, own = state["param_groups"], optimizer.param_groups
    sizes, own_sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes != own_sizes:
        raise _mismatch(optimizer, f"its groups hold {sizes} parameters, and those here {own_sizes}")
    if getattr(optimizer.load_state_dict, "__func__", None) is not Optimizer.load_state_dict:
        return
    for number, (before, here) in enumerate(zip(saved, own, strict=True)):
        for name, value in here.items():
            if name != "params" and name in before and not _alike(before[name], value, grows=not _is_torchs(optimizer)):
                raise _mismatch(optimizer, f"group {number} has {name}={before[name]!r}, and here {value!r}")
        if not _refusal(optimizer, here) and (problem := _refusal(optimizer, before)):
            raise _mismatch(optimizer, f"group {number} has options that it doesn't take: {problem}")
    _check_names(optimizer, _completed(optimizer, saved), [frozenset(group) for group in own])
    parameters = dict(
        zip(
            (index for group in saved for index in group["params"]),
            (parameter for group in own for parameter in group["params"]),
            strict=True,
        )
    )
    for index, entry in state["state"].items():
        if isinstance(index, int) and index not in parameters:
            raise _mismatch(optimizer, f"it has parameter {index}, and there are {len(parameters)} here")
        if not isinstance(entry, Mapping):
            raise _mismatch(optimizer, f"that of parameter {index} is a {type(entry).__name__}, not a dict")
    for group in saved:
        examples: dict[int, dict[str, Any]] = {}
        for index in group["params"]:
            if entry := state["state"].get(index):
                shape = parameters[index].shape
                if len(shape) not in examples:
                    examples[len(shape)] = _example(optimizer, group, len(shape))
                _check_entry(optimizer, index, entry, shape, examples[len(shape)])


def check_scheduler_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError where a value of ``state`` can't be this scheduler's.

    Additional attributes of a class that isn't torch's may grow, and may change from None to a value.
    """
    counts = _counts(type(scheduler))
    for name, value in scheduler.state_dict().items():
        if name not in state:
            continue
        grows = not _is_torchs(scheduler) and name not in ("base_lrs", "_last_lr")
        saved = state[name]
        if not _alike(saved, value, grows=grows) or (
            name in counts and _is_fraction(saved) and not _is_fraction(value)
        ):
            raise CheckpointMismatchError(
                f"the state doesn't belong to this {type(scheduler).__name__}: it has {name}={saved!r}, and here it is "
                f"{value!r}"
            )


def _counts(kind: Any) -> set[str]:
    """Return the attributes of a scheduler class that are whole numbers: those from arguments annotated as such."""
    parameters = inspect.signature(kind).parameters.values()
    return {"last_epoch", "_step_count", *(each.name for each in parameters if each.annotation in (int, "int"))}


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and not value.is_integer()


def _is_torchs(owner: Any) -> bool:
    return type(owner).__module__.startswith("torch.optim")


def _outline(leaf: Any) -> Any:
    """Return one tensor of the shape of another that has not been read: with its value where it is a number."""
    if not is_tensor(leaf) or isinstance(leaf, torch.Tensor):
        return leaf
    device = "cpu" if math.prod(leaf.shape) == 1 else "meta"
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)


def _after_hooks(optimizer: Optimizer, state: dict[str, Any]) -> Mapping[str, Any]:
    """Return the state as ``load_state_dict`` starts with it; the hooks get a copy, which they may change."""
    # torch has public ways to add such hooks, and none to run them without a load
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if not hooks:
        return state
    entries = {key: dict(entry) if isinstance(entry, Mapping) else entry for key, entry in state["state"].items()}
    state = {**state, "state": entries, "param_groups": [dict(group) for group in state["param_groups"]]}
    for hook in hooks.values():
        try:
            changed = hook(optimizer, state)
        except Exception as error:
            raise _mismatch(optimizer, f"its hook {hook!r} raised {type(error).__name__}: {error}") from error
        state = state if changed is None else changed
    return state


def _completed(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return ``groups`` with what the optimizer's ``__setstate__`` adds to those of older releases.

    Where that can't be tried, the groups are returned as they are, complete.
    """
    try:
        trial: Any = object.__new__(type(optimizer))
        trial.__setstate__(
            {"defaults": dict(optimizer.defaults), "state": {}, "param_groups": [dict(group) for group in groups]}
        )
        return list(trial.param_groups)
    except Exception:
        return optimizer.param_groups


def _refusal(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Return the error of the constructor of one of torch's classes for the options in ``group``; "" for none.

    The learning rate is left out: schedulers may move it out of its domain.
    """
    if not _is_torchs(optimizer):
        return ""
    make: Any = type(optimizer)
    names = inspect.signature(make).parameters.keys() & group.keys() - {"params", "lr", *_IMPLEMENTATIONS}
    try:
        make([torch.nn.Parameter(torch.zeros(1))], **{name: group[name] for name in names})
    except ValueError as error:
        return str(error)
    return ""


def parameters_without_state(optimizer: Optimizer, state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of trained parameters that ``state``, in torch's form, lacks while it has others.

    They had no gradient before the save, or their state was removed.
    """
    if "param_groups" not in state or not state["state"]:
        return []
    numbers = (number for group in state["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [
        number
        for number, parameter in zip(numbers, parameters, strict=False)
        if parameter.requires_grad and number not in state["state"]
    ]


def _example(optimizer: Optimizer, group: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """Return the state that an optimizer of this class, one of torch's, keeps of a parameter of shape (2, 3, ...).

    With the options in ``group``; empty for one that isn't torch's, or can't be tried (LBFGS needs a closure).
    """
    if not _is_torchs(optimizer):
        return {}
    make: Any = type(optimizer)
    plain = {name: False for name in _IMPLEMENTATIONS if name in group}
    for layout in (torch.strided, torch.sparse_coo):  # SparseAdam takes the latter only
        parameter = torch.nn.Parameter(torch.zeros(_example_shape(dimensions)))
        parameter.grad = torch.zeros(parameter.shape, layout=layout)
        try:
            made = make([{**group, **plain, "params": [parameter]}])
            made.step()
        except Exception:
            continue
        return dict(made.state[parameter])
    return {}


def _example_shape(dimensions: int) -> torch.Size:
    return torch.Size(range(2, 2 + dimensions))


def _check_entry(
    optimizer: Optimizer, index: int, entry: Mapping[str, Any], shape: torch.Size, example: Mapping[str, Any]
) -> None:
    """Verify the state of one parameter by the ``example`` of one with as many dimensions."""
    if lost := sorted(example.keys() - entry.keys()):
        raise _mismatch(optimizer, f"that of parameter {index} lacks {', '.join(map(repr, lost))}")
    for key, kept in example.items():
        value = entry[key]
        if _is_number(kept):
            if not _is_number(value) or not math.isfinite(value) or (key == "step" and value < 0):
                raise _mismatch(optimizer, f"{key!r} of parameter {index} is {value!r}, not a number it could have")
        elif isinstance(kept, torch.Tensor) and not isinstance(value, torch.Tensor):
            raise _mismatch(optimizer, f"{key!r} of parameter {index} is {value!r}, not a tensor")
        elif isinstance(kept, torch.Tensor) and kept.shape == _example_shape(len(shape)) and value.shape != shape:
            raise _mismatch(
                optimizer,
                f"{key!r} of parameter {index} has the shape {tuple(value.shape)}, and that one {tuple(shape)}",
            )


def check_groups(optimizer: Optimizer, names: Sequence[frozenset[str]]) -> None:
    """Raise CheckpointMismatchError if a group has lost some of ``names``, those of its values before a load."""
    _check_names(optimizer, optimizer.param_groups, names)


def _check_names(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], names: Sequence[frozenset[str]]) -> None:
    for number, (group, before) in enumerate(zip(groups, names, strict=True)):
        if lost := sorted(before - group.keys()):
            raise _mismatch(optimizer, f"group {number} lacks {', '.join(map(repr, lost))}")


def _mismatch(optimizer: Optimizer, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(f"the optimizer state doesn't belong to this {type(optimizer).__name__}: {why}")


def _alike(saved: Any, own: Any, *, grows: bool = False) -> bool:
    """Return whether a value of a state, by its type, may take the place of one that is there.

    Args:
        saved: the value from the state.
        own: the value that is there.
        grows: whether it may be None, replace None with any type, and be a sequence of another length.
    """
    if grows and (own is None or saved is None):
        return True
    if grows and isinstance(own, tuple | list):
        return isinstance(saved, tuple | list)
    if own is None:
        return saved is None or isinstance(saved, bool | int | float | torch.Tensor)
    if isinstance(own, bool):
        return saved is None or isinstance(saved, bool)  # torch's switches are True, False or None
    if _is_number(own):
        return not isinstance(saved, bool) and _is_number(saved) and float(saved) == float(saved)
    if isinstance(own, tuple | list):
        return (
            isinstance(saved, tuple | list)
            and len(saved) == len(own)
            and all(_alike(*pair) for pair in zip(saved, own, strict=True))
        )
    if isinstance(own, str):
        return isinstance(saved, str)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move the tensors of the optimizer's state to ``device``, in place."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device)
