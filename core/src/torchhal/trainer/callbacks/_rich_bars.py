"""Draw progress bars by rich at the bottom of a terminal, without a thread."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from torchhal.trainer.callbacks._progress_lines import MeasuredBatches
from torchhal.trainer.callbacks._terminal_lines import ERASE, TerminalLines, at_rest

_SHORTEST_BAR = 10


class RichBars:
    """The bars that stand one below the other, and below them the values of metrics.

    Args:
        lines: those that are printed above.
    """

    def __init__(self, lines: TerminalLines) -> None:
        self._lines = lines
        stream: Any = lines.drawing
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._bars: list[RichBar] = []
        self.drawn = ""
        """What is drawn, with control codes."""

    def add(self, bar: RichBar) -> None:
        """Draw ``bar`` from now on, below the others."""
        self._bars.append(bar)
        self.draw()

    def remove(self, bar: RichBar) -> None:
        """Draw ``bar`` no longer; where it is to be left, it stays as it is now above the others."""
        self._bars.remove(bar)
        left = f"{self._rendered([bar])}\n" if bar.leave else ""
        self.draw(above=left)

    def draw(self, above: str = "") -> None:
        """Draw all bars anew, below the lines ``above``."""
        self.drawn = at_rest(self._rendered(self._bars)) if self._bars else ""
        self._lines.begin()
        self._lines.drawing.write(f"{ERASE}{above}{self.drawn}")
        self._lines.drawing.emit()

    def _rendered(self, bars: list[RichBar]) -> str:
        """Return ``bars`` as text with colours, of fewer lines than the terminal has."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right", min_width=4)
        table.add_column(ratio=1, min_width=_SHORTEST_BAR)
        for _ in range(3):
            table.add_column(no_wrap=True, justify="right")
        for bar in bars:
            table.add_row(*bar.cells())
        values = next((bar.values for bar in bars if bar.values), "")
        parts: list[RenderableType] = [table, Text(values)] if values else [table]
        with self._console.capture() as capture:
            self._console.print(Group(*parts))
        lines = capture.get().splitlines()
        return "\n".join(lines[: max(1, self._console.height - 1)])


class RichBar(MeasuredBatches):
    """A bar among those of ``bars``, with the methods of a bar of tqdm that ``ProgressBar`` calls."""

    def __init__(self, bars: RichBars, *, desc: str, total: int | None, leave: bool) -> None:
        super().__init__(desc=desc, total=total, leave=leave)
        self._bars = bars
        bars.add(self)

    def refresh(self) -> None:
        """Draw it as it is now."""
        self._bars.draw()

    def close(self) -> None:
        """End it: with ``leave`` it stays as it is, else it disappears."""
        self._bars.remove(self)

    def cells(self) -> tuple[RenderableType, ...]:
        """Return title, share, bar, position, speed and times."""
        share = f"{100 * self.n // self.total}%" if self.total else ""
        remaining = self.remaining()
        return (
            Text(self.title, style="bold"),
            Text(share),
            Bar(total=self.total, completed=self.n, pulse=not self.total),
            Text(f"{self.n:>{len(str(self.total))}}/{self.total}" if self.total else f"{self.n} batches"),
            Text(self.speed()),
            Text(f"{self.elapsed()} < {remaining}" if remaining else self.elapsed()),
        )
