"""Align the columns of a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[object]], align: str = "", max_width: int | None = None) -> list[str]:
    """Return one line per row, with columns as wide as their longest cells and two blanks between them.

    Args:
        rows: cells, printed by ``str``. The last cell of a row with fewer cells than the longest one spans the
            columns that it lacks, and widens none.
        align: ``<`` or ``>`` for each column; without it integers are aligned to the right and all else to the left.
        max_width: greatest width of a column in characters; a longer cell is printed whole and shifts its row.
    """
    columns = max(map(len, rows), default=0)
    widths = [0] * columns
    for row in rows:
        for column, cell in enumerate(row if len(row) == columns else row[:-1]):
            widths[column] = max(widths[column], len(str(cell)))
    if max_width is not None:
        widths = [min(width, max_width) for width in widths]

    def aligned(column: int, cell: object) -> str:
        side = align[column] if align else ">" if isinstance(cell, int) else "<"
        return f"{cell!s:{side}{widths[column]}}"

    return [
        "  ".join(
            str(cell) if column == len(row) - 1 < columns - 1 else aligned(column, cell)
            for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
