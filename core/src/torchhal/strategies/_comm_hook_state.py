"""Save and restore what a DDP communication hook remembers from step to step: errors, low-rank factors, counters.

``register_comm_hook`` takes any object as the state of a hook. torch's own have no ``state_dict``; those whose memory
training depends on are known here by the names of their attributes. Options, such as a rank or a process group, come
from the script that continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchhal._rank_state import class_name
from torchhal.errors import CheckpointMismatchError
from torchhal.pytree import map_tensors

_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
"""Attributes of ``PowerSGDState`` with a tensor per bucket, whose layout they belong to."""

_ATTRIBUTES = {
    "PowerSGDState": (
        "iter", "rng", *_BY_BUCKET, "total_numel_before_compression", "total_numel_after_compression",
        "next_stats_report",
    ),
    "PostLocalSGDState": ("iter",),
}  # fmt: skip
_FACTOR_RANK = "matrix_approximation_rank"


def registered_state(wrapper: DistributedDataParallel, default: Any) -> Any:
    """Return the state of the hook that ``wrapper`` calls; ``default`` where this torch doesn't record it."""
    hooks = getattr(wrapper, "_comm_hooks", None)
    return hooks[-1][1] if hooks else default


def comm_hook_state_dict(state: Any) -> dict[str, Any]:
    """Return the memory of a hook's state as tensors and plain data; empty for a state without one.

    An object with ``state_dict`` and ``load_state_dict`` gives its own; a dict is saved as it is. Of another object a
    warning says that it isn't saved.
    """
    if state is None or isinstance(state, dist.ProcessGroup):
        return {}
    if callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None)):
        saved = state.state_dict()
    elif isinstance(state, dict):
        saved = dict(state)
    elif names := _attributes(state):
        saved = {name: _as_plain(getattr(state, name)) for name in names if hasattr(state, name)}
        if hasattr(state, _FACTOR_RANK):
            saved[_FACTOR_RANK] = getattr(state, _FACTOR_RANK)
    else:
        warnings.warn(
            f"the state of the communication hook, a {type(state).__name__}, isn't saved in checkpoints: a resumed run "
            "begins with a new one. Give it the methods state_dict and load_state_dict",
            stacklevel=2,
        )
        return {}
    return {"class": class_name(state), "state": saved}


def load_comm_hook_state(state: Any, saved: Mapping[str, Any], device: torch.device, *, same_buckets: bool) -> str:
    """Restore into ``state`` what :func:`comm_hook_state_dict` returned; return what was left out, "" for nothing.

    Args:
        state: the state of this run's hook, or None without a hook.
        saved: another class's is left out.
        device: where the gradients are.
        same_buckets: whether the wrapper's buckets are those of the saved run, of which each memory belongs to one.

    Raises:
        CheckpointMismatchError: a value has another type than this state's.
    """
    own = None if state is None else class_name(state)
    if saved["class"] != own:
        return f"that of the communication hook's {saved['class']}, as the hook's state is {own} here"
    values = map_tensors(saved["state"], lambda leaf: _copied(leaf, device))
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(values)
        return ""
    if isinstance(state, dict):
        state.clear()
        state.update(values)
        return ""
    left_out = ""
    if any(values.get(name) for name in _BY_BUCKET) and not same_buckets:
        left_out = "the communication hook's memory of each bucket, as the gradients are in other buckets here"
        values = {name: value for name, value in values.items() if name not in _BY_BUCKET}
    elif values.get(_FACTOR_RANK) != getattr(state, _FACTOR_RANK, None):
        values = {name: value for name, value in values.items() if name not in _BY_BUCKET[1:]}  # of another shape
    for name in _attributes(state):
        if name in values:
            setattr(state, name, _restored(name, values[name], getattr(state, name)))
    return left_out


def reshard_comm_hook_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the state for each of any number of ranks from those of all former ones; None where there is no rule.

    PowerSGD sends the mean of gradient and error over the ranks. With the mean of the former errors on each rank, the
    next step sends the same, however many there are. Everything else in it is the same on every rank.
    """
    first = states[0]
    if any(state.get("class") != first.get("class") for state in states) or "class" not in first:
        return None
    whole = dict(first["state"])
    if first["class"] != "torch.PowerSGDState":
        return None
    errors = [state["state"]["error_dict"] for state in states]
    whole["error_dict"] = {bucket: torch.stack([each[bucket] for each in errors]).mean(0) for bucket in errors[0]}
    return {"class": first["class"], "state": whole}


def _attributes(state: Any) -> tuple[str, ...]:
    known = (_ATTRIBUTES[kind.__name__] for kind in type(state).__mro__ if _is_torchs(kind))
    return next(known, ())


def _is_torchs(kind: type) -> bool:
    return kind.__name__ in _ATTRIBUTES and kind.__module__.startswith("torch.")


def _as_plain(value: Any) -> Any:
    """Return a copy; of NumPy's generator its state as lists and numbers."""
    if hasattr(value, "get_state"):
        name, keys, position, has_gauss, cached = value.get_state()
        return [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return dict(value) if isinstance(value, dict) else value


def _restored(name: str, value: Any, own: Any) -> Any:
    """Return ``value`` in the type of ``own``, the attribute of that name."""
    if hasattr(own, "set_state"):
        import numpy

        kind, keys, position, has_gauss, cached = value
        if len(keys) != 624 or not 0 <= position <= 624:  # NumPy would take it, and read out of bounds
            raise CheckpointMismatchError(f"{name!r} is no state of NumPy's generator")
        own.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
        return own
    alike = isinstance(value, dict) and all(isinstance(each, torch.Tensor) for each in value.values())
    if not (alike if isinstance(own, dict) else type(value) is type(own)):
        raise CheckpointMismatchError(f"{name!r} of the communication hook is {value!r}, and {own!r} here")
    return value


def _copied(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf
