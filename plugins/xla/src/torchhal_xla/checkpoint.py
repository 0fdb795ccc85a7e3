"""Write checkpoints of tensors on XLA devices: host copies, made in one transfer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.pytree import map_tensors


def to_host(value: Any) -> Any:
    """Return ``value`` with every tensor of an XLA device as a CPU copy; all of them come in one transfer.

    One tensor that stands in several places is copied once. Everything else is the same object.
    """
    found: dict[int, torch.Tensor] = {}

    def collect(leaf: Any) -> Any:
        if _on_device(leaf):
            found.setdefault(id(leaf), leaf)
        return leaf

    map_tensors(value, collect)
    if not found:
        return value
    import torch_xla

    tensors = [tensor.detach() for tensor in found.values()]
    # runs what they still wait for, and no more: a cut would also move the generator on
    torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=True, sync_xla_data=False)
    copies = dict(zip(found, torch_xla._XLAC._xla_get_cpu_tensors(tensors), strict=True))
    return map_tensors(value, lambda leaf: copies[id(leaf)] if _on_device(leaf) else leaf)


def _on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


class XLACheckpointIO(TorchCheckpointIO):
    """Torch's checkpoint file, of host copies.

    It loads anywhere; a strategy's own tensors are host copies already.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().save_checkpoint(to_host(checkpoint), path, storage_options=storage_options)
