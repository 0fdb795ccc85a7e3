"""Record which check runs which statement of the copies, in all of a check's processes.

Every statement of a function writes one byte of a file that all processes map: the row is the check's, the column the
statement's. A mutant is then given only those checks that run its statement.
"""

from __future__ import annotations

import ast
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mutation.reference import PACKAGE

HEADER: Final = 8
Statement = tuple[str, int, int]
"""File, line and column."""

_MODULE: Final = """
import mmap
with open({path!r}, "r+b") as _file:
    _map = mmap.mmap(_file.fileno(), 0)
def reach(number):
    _map[{header} + int.from_bytes(_map[:4], "little") * {width} + number] = 1
"""


def instrument(sources: Mapping[str, str]) -> tuple[dict[str, str], list[Statement]]:
    """Return ``sources`` with a call before each statement, and the statement of each number."""
    statements: list[Statement] = []
    return {file: _Instrument(file, statements).run(text) for file, text in sources.items()}, statements


class _Instrument(ast.NodeTransformer):
    def __init__(self, file: str, statements: list[Statement]) -> None:
        self.file, self.statements = file, statements
        self._depth = 0

    def run(self, text: str) -> str:
        tree = self.visit(ast.parse(text))
        place = next(index for index, one in enumerate(tree.body) if isinstance(one, (ast.Import, ast.ImportFrom)))
        if ast.unparse(tree.body[place]).startswith("from __future__"):
            place += 1
        tree.body.insert(place, ast.parse(f"from {PACKAGE}._reach import reach as _mutation_reach").body[0])
        return ast.unparse(ast.fix_missing_locations(tree))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        outer = self._depth
        if is_function:
            self._depth += 1
        elif isinstance(node, ast.ClassDef):
            self._depth = 0
        super().generic_visit(node)
        if self._depth and not isinstance(node, (ast.Lambda, ast.IfExp)):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    setattr(node, name, self._block(block))
        self._depth = outer
        return node

    def _block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for index, one in enumerate(block):
            docstring = not index and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if not docstring and not isinstance(one, (ast.Global, ast.Nonlocal)):
                made.append(ast.parse(f"_mutation_reach({len(self.statements)})").body[0])
                self.statements.append((self.file, one.lineno, one.col_offset))
            made.append(one)
        return made


class ReachMap:
    """The mapped file, for ``rows`` checks and ``width`` statements; ``module`` is the source of ``_reach``."""

    def __init__(self, path: Path, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self._path = path
        self.module = _MODULE.format(path=str(path), header=HEADER, width=width)
        path.write_bytes(b"\0" * (HEADER + rows * width))

    def row(self, number: int) -> set[int]:
        """Return the statements that the check of this number has run."""
        data = self._path.read_bytes()
        start = HEADER + number * self.width
        return {index for index, byte in enumerate(data[start : start + self.width]) if byte}


def select_row(path: str, number: int) -> None:
    """Let statements that run from now on count for the check of this number."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = number.to_bytes(4, "little")
