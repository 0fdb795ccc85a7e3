"""Stand in for a tensor in a sharded checkpoint: it has shape and dtype, and is read once the part is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class StoredTensor:
    """A stand-in for a tensor in what ``open_checkpoint`` returns.

    Attributes:
        name: of the tensor in the folder.
        shape: its own shape.
        dtype: its dtype.
        read_into: fills a tensor, plain or sharded, from what is saved as ``name``.
        saved: the shape of what is saved as ``name``.
        strides: stride and offset in what is saved, of a view of it; None for the whole.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    read_into: Callable[[str, torch.Tensor], None]
    saved: torch.Size
    strides: tuple[tuple[int, ...], int] | None = None

    def read(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor in the layout and on the device of ``target``, which has its shape; else whole, on the CPU.

        Only the part that this rank needs is read, of a view the tensor that it lies in; nothing is sent.
        """
        if self.strides is not None:
            return self._part(target)
        if target is None:
            return self._memory()
        tensor = torch.empty_like(target.detach(), dtype=self.dtype)
        self.read_into(self.name, tensor)
        return tensor

    def read_shared(self, memories: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor on the CPU, in the memory of those that were read with the same ``memories``."""
        if (memory := memories.get(self.name)) is None:
            memory = memories[self.name] = self._memory()
        return memory if self.strides is None else self._view_of(memory)

    def _view_of(self, memory: torch.Tensor) -> torch.Tensor:
        assert self.strides is not None
        stride, offset = self.strides
        return memory.as_strided(self.shape, stride, offset)

    def _part(self, target: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of a view, whose memory is read whole."""
        part = self._view_of(self._memory())
        if target is None:
            return part.clone()
        if isinstance(target, DTensor):
            return distribute_tensor(part, target.device_mesh, target.placements, src_data_rank=None)
        return torch.empty_like(target.detach(), dtype=self.dtype).copy_(part)

    def _memory(self) -> torch.Tensor:
        memory = torch.empty(self.saved, dtype=self.dtype)
        self.read_into(self.name, memory)
        return memory
