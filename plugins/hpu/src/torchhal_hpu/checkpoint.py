"""Write checkpoints that load on any machine, by moving tensors to the host first."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.pytree import map_tensors


class HPUCheckpointIO(TorchCheckpointIO):
    """Torch's checkpoint file, of copies on the host.

    A lazy tensor has no memory that could be written, and a file that names the device ``hpu`` would want the bridge
    to be read. Tensors that are one stay one: tied weights are copied, and written, once.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().save_checkpoint(to_host(checkpoint), path, storage_options=storage_options)


def to_host(value: Any) -> Any:
    """Return ``value`` with a CPU copy for every tensor on ``hpu``; the same copy where it is the same tensor."""
    copies: dict[Hashable, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "hpu":
            return leaf
        key = _identity(leaf)
        if key not in copies:
            copies[key] = leaf.detach().cpu()
        return copies[key]

    return map_tensors(value, copy)


def _identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two views of the same elements."""
    try:
        memory = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # lazy tensors have none
        return id(tensor)
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
