"""Print the layers of the model as a table of rich, with RichSummary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._model_description import NUMBERS, ModelDescription
from torchhal.trainer.callbacks._rich import require_rich
from torchhal.trainer.callbacks._terminal_lines import is_terminal
from torchhal.trainer.callbacks.summary import ModelSummary

if TYPE_CHECKING:
    from torchhal import Trainer

_WIDTH_IN_FILE = 200


class RichSummary(ModelSummary):
    """Callback that prints what ``ModelSummary`` does as a table in colour; needs the package ``rich``.

    Args:
        max_depth: how deep to list: 1 for the model's children, 2 for theirs too, -1 for all, 0 for no table.

    Raises:
        ModuleNotFoundError: ``rich`` is not installed.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, max_depth: int = 1) -> None:
        super().__init__(max_depth)
        require_rich("RichSummary")  # here, not when the fit begins

    def _show(self, trainer: Trainer, description: ModelDescription) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False, width=None if is_terminal(sys.stdout) else _WIDTH_IN_FILE)
        with console.capture() as capture:
            if rows := description.rows():
                table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
                for title in rows[0]:
                    table.add_column(
                        title,
                        justify="right" if title in NUMBERS else "left",
                        style="cyan" if title == "name" else "",
                        overflow="fold",
                        no_wrap=title in (*NUMBERS, "type", "trained"),
                    )
                for row in rows[1:]:
                    table.add_row(*map(Text, row), style="bright_black" if "frozen" in row else "")
                console.print(table)
            for line in description.totals(console.width):
                console.print(Text(line))
        trainer.print(capture.get(), end="")
