"""Run the fit, evaluation and prediction loops over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal._lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.trainer.loops._fit_loop import Interrupted, Repositioned
    from torchhal.trainer.loops._hook_calls import module_hook

__all__ = ["Interrupted", "Repositioned", "module_hook"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Interrupted": "_fit_loop", "Repositioned": "_fit_loop", "module_hook": "_hook_calls"}
)
