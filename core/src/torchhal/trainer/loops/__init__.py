"""Run the fit, evaluation and prediction loops over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.trainer.loops._fit_loop import DataPositionChanged, StopOnSignal
    from torchhal.trainer.loops._hook_calls import module_hook

__all__ = ["DataPositionChanged", "StopOnSignal", "module_hook"]

__getattr__, __dir__ = lazy_names(
    __name__, {"StopOnSignal": "_fit_loop", "DataPositionChanged": "_fit_loop", "module_hook": "_hook_calls"}
)
