"""List the contents of a checkpoint, written by any component, without loading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchhal._rank_state import STATES_KEY
from torchhal.checkpoint.base import CheckpointIO
from torchhal.errors import CheckpointError


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint: its place in the nest (``state_dict/layer.weight``), its shape, its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor, or stands for one that has not been read."""
    return isinstance(value, torch.Tensor) or all(hasattr(value, name) for name in ("shape", "dtype", "read"))


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a nest of dicts, lists and tuples, by their path in it."""
    if is_tensor(value):
        yield name, value
        return
    steps: Any = ()
    if isinstance(value, Mapping):
        steps = value.items()
    elif isinstance(value, list | tuple):
        steps = enumerate(value)
    for key, item in steps:
        yield from tensors_in(item, f"{name}/{key}" if name else str(key))


def describe(io: CheckpointIO, path: str) -> dict[str, Any]:
    """Return the contents of the checkpoint at ``path``, for ``torchhal checkpoint inspect``; None if absent."""
    try:
        content = io.open_checkpoint(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"nothing is at {path!r}") from error
    found = list(tensors_in(content))
    infos = [_info(name, tensor) for name, tensor in found]
    distinct = {memory_key(tensor): info.bytes for (_, tensor), info in zip(found, infos, strict=True)}
    ranks, optimizers = content.get("ranks"), content.get("optimizer_states")
    return {
        "torchhal_version": content.get("torchhal_version"),
        "epoch": content.get("epoch"),
        "global_step": content.get("global_step"),
        "world_size": len(ranks) if isinstance(ranks, list) else None,
        "optimizers": len(optimizers) if isinstance(optimizers, list) else None,
        "contents": [str(key) for key in content],
        "bytes": sum(distinct.values()),
        "tensors": [{**info._asdict(), "shape": list(info.shape)} for info in infos],
        **_rank_states(content),
    }


def _rank_states(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return who has written per-rank state, by the kind of component; nothing where nobody has."""
    writers = content.get(STATES_KEY)
    if not isinstance(writers, Mapping) or not writers:
        return {}
    named = {kind: writer if isinstance(writer, Mapping) else {} for kind, writer in writers.items()}
    return {
        STATES_KEY: {
            str(kind): {name: writer.get(name) for name in ("class", "alias", "world_size")}
            for kind, writer in named.items()
        }
    }


def _info(name: str, tensor: Any) -> TensorInfo:
    shape = tuple(int(size) for size in tensor.shape)
    count = 1
    for size in shape:
        count *= size
    return TensorInfo(name, shape, str(tensor.dtype).removeprefix("torch."), count * int(tensor.dtype.itemsize))


def memory_key(tensor: Any) -> Any:
    """Return a value that is equal for tensors that are one in memory, as tied weights are."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor)
