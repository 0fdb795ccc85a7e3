"""Load, share out and resume the data of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.trainer.data._loaders import limit_length
    from torchhal.trainer.data._samplers import distribute

__all__ = ["distribute", "limit_length"]

__getattr__, __dir__ = lazy_names(__name__, {"distribute": "_samplers", "limit_length": "_loaders"})
