"""The blocks of a page of the documentation, as docs/README.md says that they are marked, and how they are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
    reason: str = ""
    """Why it is left out."""

    @property
    def verb(self) -> str:
        return self.marker[0] if self.marker else ""

    @property
    def exit_code(self) -> int:
        return int(self.marker[self.marker.index("exits") + 1]) if "exits" in self.marker else 0


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    marker: list[str] = []
    reason = ""
    open_block: Block | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if open_block is not None:
            if line.strip() == "```":
                found.append(open_block)
                open_block = None
            else:
                open_block.text.append(line)
        elif match := FENCE.match(line):
            open_block = Block(match[1], number, [], marker, reason)
            marker, reason = [], ""
        elif match := MARKER.match(line):
            marker, reason = (["no-run"], match["reason"]) if match["reason"] else (match["test"].split(), "")
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


def blocks_that_need(package: str) -> list[tuple[str, str]]:
    """Return the Python blocks that are left out because of ``package``, each with the path of its page.

    ``tests/test_docs.py`` leaves out what is marked ``<!-- no-run: PACKAGE -->``; the tests of the plugin run it, where
    the package is. The code keeps its line numbers, so that a traceback names the line of the page.
    """
    pages = [*sorted((ROOT / "docs" / "how-to").glob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]
    return [
        (str(page.relative_to(ROOT)), padded([block]))
        for page in pages
        for block in blocks_of(page)
        if block.language == "python" and block.reason == package
    ]


def run_alone(code: str, folder: Path, *, timeout: float = 150, **environ: str) -> None:
    """Run ``code`` as the program of an empty folder, with these variables too; fail unless it ends well."""
    (folder / "block.py").write_text(code, encoding="utf-8")
    done = run_command([sys.executable, "block.py"], folder, {**os.environ, **environ}, timeout)
    assert done.returncode == 0, done.stderr


def run_command(
    command: list[str], folder: Path, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``; fail if it still runs after ``timeout`` seconds."""
    # A group of its own, so that whatever a hung example has started ends with it.
    with subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} still ran after {timeout:g} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)
