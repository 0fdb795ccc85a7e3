"""Stand in for a tensor in a sharded checkpoint: it has shape and dtype, and is read once the part is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StoredTensor:
    """A stand-in for a tensor in what ``open_checkpoint`` returns."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    read_into: Callable[[str, torch.Tensor], None]

    def read(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor in the layout and on the device of ``target``, which has its shape; else whole, on the CPU.

        Only the part that this rank needs is read, and nothing is sent.
        """
        if target is None:
            tensor = torch.empty(self.shape, dtype=self.dtype)
        else:
            tensor = torch.empty_like(target.detach(), dtype=self.dtype)
        self.read_into(self.name, tensor)
        return tensor
