"""The blocks of a page of the documentation, as docs/README.md says that they are marked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\s*$")
MARKER = re.compile(r"^<!-- (?:test: (?P<test>.+?)|no-run: (?P<reason>.+?)) -->$")


@dataclass
class Block:
    language: str
    line: int
    """Of the opening fence, from 1."""
    text: list[str]
    marker: list[str]
    """The words of ``test: ...``; ``["no-run"]`` for a block that is left out."""

    @property
    def verb(self) -> str:
        return self.marker[0] if self.marker else ""

    @property
    def exit_code(self) -> int:
        return int(self.marker[self.marker.index("exits") + 1]) if "exits" in self.marker else 0


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    marker: list[str] = []
    open_block: Block | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if open_block is not None:
            if line.strip() == "```":
                found.append(open_block)
                open_block = None
            else:
                open_block.text.append(line)
        elif match := FENCE.match(line):
            open_block = Block(match[1], number, [], marker)
            marker = []
        elif match := MARKER.match(line):
            marker = ["no-run"] if match["reason"] else match["test"].split()
        elif line.strip():
            assert not marker, f"{page.name}:{number}: a marker must stand right before a block"
    assert open_block is None, f"{page.name}: a block is not closed"
    return found


def padded(blocks: list[Block]) -> str:
    """The blocks at the lines they have in the page; an expected error is caught by a ``with`` on the fence's line."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        if block.verb == "raises":
            lines.append(f"with __import__('pytest').raises({block.marker[1]}):")
            lines += [f"    {line}" if line.strip() else line for line in block.text]
        else:
            lines += ["", *block.text]
    return "\n".join(lines) + "\n"


def write_files(blocks: list[Block], folder: Path) -> None:
    for block in blocks:
        if block.verb in ("file", "script"):
            target = folder / block.marker[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(padded([block]) if block.language == "python" else "\n".join(block.text) + "\n")
