"""Digests of the values a run continues from, by which a load detects that a checkpoint was edited."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchhal._rank_state import STATES_KEY
from torchhal.checkpoint._inspection import is_tensor
from torchhal.errors import CheckpointCorruptError

KEY = "digests"
_SMALL = 8192
"""Elements up to which a tensor's values are part of a digest. Generator states are smaller; of moments and gathered
metrics the type and the shape count, since reading gigabytes again would double the time of a save."""


def digests(checkpoint: Mapping[str, Any], *, sharded: bool) -> dict[str, str]:
    """Return a digest for each field of ``checkpoint`` but its weights, by the field's name (``"ranks/0"``).

    Args:
        checkpoint: what is saved.
        sharded: whether every rank saves its own part of gradients and of the optimizers' state, so that none can
            digest what a load returns.
    """
    found = {}
    for name, part in _parts(checkpoint, sharded=sharded):
        digest = _digest(part)
        if digest is not None:
            found[name] = digest
    return found


def check_digests(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointCorruptError for the first part of ``checkpoint``, as read, that differs from the saved one."""
    saved = checkpoint.get(KEY)
    if saved is None:
        return
    if not isinstance(saved, Mapping):
        raise CheckpointCorruptError(
            f"{path!r} is damaged: its field {KEY!r} must be a dict (got {type(saved).__name__})"
        )
    now = {name: part for sharded in (False, True) for name, part in _parts(checkpoint, sharded=sharded)}
    for name, digest in saved.items():
        if name not in now or _digest(now[name], str(digest)[:1]) not in (digest, None):
            raise CheckpointCorruptError(
                f"{path!r} was changed after it was saved: its field {name!r} holds other values than then. Continue "
                f"from an earlier checkpoint, or, if the change was meant, delete the field {KEY!r} too"
            )


def _parts(checkpoint: Mapping[str, Any], *, sharded: bool) -> Iterator[tuple[str, Any]]:
    for name in (
        "torchhal_format",
        "epoch",
        "global_step",
        "precision",
        "strategy",
        "trained_by",
        "frozen",
        STATES_KEY,
    ):
        if name in checkpoint:
            yield name, checkpoint[name]
    for name in ("loops", "callbacks"):
        yield from _items(checkpoint, name)
    for name in ("lr_schedulers", "ranks"):
        yield from _items(checkpoint, name)
    if not sharded and "gradients" in checkpoint:
        yield "gradients", checkpoint["gradients"]
    for name, state in _items(checkpoint, "optimizer_states"):
        if not sharded:
            yield name, state
        elif isinstance(state, Mapping):
            yield f"{name}/param_groups", state.get("param_groups")


def _items(checkpoint: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Return the number of a list's or dict's items, and each of them."""
    value = checkpoint.get(name)
    if isinstance(value, Mapping):
        yield name, sorted(map(str, value))
        yield from ((f"{name}/{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield name, len(value)
        yield from ((f"{name}/{index}", item) for index, item in enumerate(value))
    elif name in checkpoint:
        yield name, value


class _UnknownTensorError(Exception):
    """A tensor of a class whose values only its library can read, and which a load may return as another class."""


def _digest(value: Any, form: str | None = None) -> str | None:
    """Return a digest that is the same for a value before a save and after a load; None if unknowable.

    Args:
        value: a field of the checkpoint.
        form: that of the saved digest: "v", with the values of small tensors, or "s", with all shapes only, as
            when one was on a device, where reading each would need a transfer.
    """
    for chosen in ("v", "s") if form is None else (form,):
        try:
            text = json.dumps(value, default=_WITH_VALUES if chosen == "v" else _SHAPES_ONLY, skipkeys=True)
        except _OnDeviceError:
            continue
        except (_UnknownTensorError, RecursionError, ValueError):
            return None
        return chosen + _hash(text.encode())
    return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class _OnDeviceError(Exception):
    """A tensor whose values are not in this process's memory."""


def _as_plain(value: Any, *, values: bool) -> Any:
    if is_tensor(value):
        tensor = value if isinstance(value, torch.Tensor) else value.read()
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _UnknownTensorError
        plain: list[Any] = [str(tensor.dtype), list(tensor.shape)]
        if values and tensor.device.type != "cpu":
            raise _OnDeviceError
        if values and 0 < tensor.numel() <= _SMALL and tensor.layout is torch.strided:
            dense = tensor.detach().contiguous()
            plain.append(_hash(ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())))
        return plain
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, bytes | complex | torch.dtype):
        return repr(value)
    return type(value).__qualname__


_WITH_VALUES = functools.partial(_as_plain, values=True)
_SHAPES_ONLY = functools.partial(_as_plain, values=False)
