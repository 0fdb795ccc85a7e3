"""Show the progress of a run by rich, with RichProgress."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._rich import require_rich
from torchhal.trainer.callbacks._terminal_lines import ERASE, TerminalLines, is_terminal
from torchhal.trainer.callbacks.progress import ProgressBar

if TYPE_CHECKING:
    from torchhal import Trainer


class RichProgress(ProgressBar):
    """Callback that draws the bars of ``ProgressBar`` in colour and over the whole width; needs the package ``rich``.

    It takes the place of the ``ProgressBar`` that a Trainer adds. Rank 0 draws, from its main thread. While it does,
    what any rank prints, warns or logs by Python goes above the bars, whole line by whole line; what C code writes to
    the terminal doesn't. In a notebook the bars are tqdm's widgets, in a file whole lines, as those of ``ProgressBar``.

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
        self._lines: TerminalLines | None = None

    @property
    def line_break(self) -> str:
        return ERASE if self._bars is not None and self.is_drawn else super().line_break

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: Any = None) -> None:
        """Print ``values`` above the bars, with the arguments of the builtin ``print``."""
        if self._bars is None:
            super().print(*values, sep=sep, end=end, file=file)
        else:
            print(*values, sep=sep, end=end, file=file)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": None, "_lines": None}

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._restore_streams()
        if self.is_enabled and not trainer.is_global_zero and is_terminal(sys.stderr):
            self._lines = TerminalLines(str)  # above what rank 0 draws

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        super().teardown(trainer, module, stage)
        self._restore_streams()

    def _restore_streams(self) -> None:
        if self._lines is not None:
            self._lines.restore()
        if self._bars is not None:
            self._bars.close()
        self._lines = self._bars = None

    def _make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        if not is_terminal(sys.stderr):  # a notebook
            return super()._make_bar(title, total, leave)
        from torchhal.trainer.callbacks._rich_bars import RichBar, RichBars

        if self._bars is None:
            self._bars = RichBars()
        return RichBar(self._bars, desc=title, total=total, leave=leave)
