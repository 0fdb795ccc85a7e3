"""Run the fit, evaluation and prediction loops over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal.trainer._hooks import module_hook
    from torchhal.trainer.loops._control_flow import DataPositionChanged, StopOnSignal
    from torchhal.trainer.loops._optimization import extract_loss

__all__ = ["DataPositionChanged", "StopOnSignal", "extract_loss", "module_hook"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "StopOnSignal": "_control_flow",
        "DataPositionChanged": "_control_flow",
        "extract_loss": "_optimization",
        "module_hook": "._hooks",
    },
)
