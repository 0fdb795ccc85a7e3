"""What a terminal shows of what was written to it, with all lines that have scrolled out of it."""

import re

_CODE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m")


def screen(written):
    """Return the lines that stand after ``written``, and the row of the cursor."""
    rows, row, column = [""], 0, 0
    text = written
    while text:
        if match := _CODE.match(text):
            text = text[match.end() :]
            if match[2] == "A":
                row -= int(match[1] or 1)
                assert row >= 0, "above the first line"
            elif match[2] == "J":
                rows = [*rows[:row], rows[row][:column]]
            elif match[2] == "K":
                rows[row] = rows[row][:column]
            else:
                assert match[2] in (None, "m"), match[0]
            continue
        char, text = text[0], text[1:]
        if char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
        else:
            line = rows[row].ljust(column)
            rows[row], column = line[:column] + char + line[column + 1 :], column + 1
    return [line.rstrip() for line in rows], row
