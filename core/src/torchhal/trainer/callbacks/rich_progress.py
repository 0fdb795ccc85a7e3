"""Show the progress of a run by rich, with RichProgress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._rich import require_rich
from torchhal.trainer.callbacks.progress import ProgressBar

if TYPE_CHECKING:
    from torchhal import Trainer


class RichProgress(ProgressBar):
    """Callback that draws the bars of ``ProgressBar`` in colour and over the whole width; needs the package ``rich``.

    It takes the place of the ``ProgressBar`` that a Trainer adds. Values of metrics stand on lines of their own. All
    else is as with ``ProgressBar``: in a file there are whole lines, in a notebook the bars are tqdm's widgets, and on
    a terminal of Windows they are tqdm's, too. A drawing takes about half a millisecond, and there are at most ten in
    a second (benchmarks/trainer_step.py, the row "rich").

    Args:
        refresh_rate: draw at most every so many batches; 0 draws nothing.
        leave: leave each epoch's bar standing, rather than only the last one.

    Raises:
        ModuleNotFoundError: ``rich`` is not installed.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        require_rich("RichProgress")  # here, not after the first batch
        self._bars: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": None}

    def _make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        if self._lines is None:  # a notebook, or Windows
            return super()._make_bar(title, total, leave)
        from torchhal.trainer.callbacks._rich_bars import RichBar, RichBars

        if self._bars is None:
            self._bars = RichBars(self._lines)
        return RichBar(self._bars, desc=title, total=total, leave=leave)

    def _fitting(self, bar: Any, values: list[str]) -> list[str]:
        return values if self._bars is not None else super()._fitting(bar, values)

    def _refresh(self, bar: Any) -> None:
        if self._bars is not None:
            bar.refresh()
        else:
            super()._refresh(bar)

    def _drawn(self) -> str:
        return "" if self._bars is None else str(self._bars.drawn)

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        super().teardown(trainer, module, stage)
        self._bars = None
