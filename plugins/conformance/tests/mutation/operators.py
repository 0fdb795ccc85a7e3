"""Generate mutants of a Python source: one small change of the text each, found by walking its syntax tree."""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

OPERATORS: Final = (
    "arithmetic", "boolean", "compare", "constant", "delete", "dtype", "drop_argument", "negate", "no_context", "rank",
    "return_input", "return_none", "strip_call", "swallow", "swap_arguments", "uncaught",
)  # fmt: skip

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPPOSITES: Final = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose swap is their negation."""
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_DTYPES: Final = {
    "float32": "float64", "float64": "float32", "float16": "bfloat16", "bfloat16": "float16", "int64": "int32",
    "int32": "int64", "uint8": "int8", "bool": "uint8", "float": "double", "double": "float", "long": "int",
}  # fmt: skip
_RANKS: Final = frozenset(
    {"global_rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes", "rank", "src"}
)
_STRIPPED_METHODS: Final = frozenset({"clone", "detach", "contiguous", "cpu", "copy"})
_STRIPPED_FUNCTIONS: Final = frozenset({"list", "dict", "tuple", "sorted", "reversed", "deepcopy", "copy"})
_NO_CONTEXT: Final = '__import__("contextlib").nullcontext()'
_WORDING: Final = ("_log.", "warnings.", "write_stderr")
"""Beginnings of calls that only choose words."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        id: stable while the changed line and its function's name stay: ``file:function:operator:digest``.
        file: path below the package's root, such as ``precision/mixed.py``.
        function: qualified name; ``<module>`` or the class's name outside of functions.
        line: number of the first changed line.
        operator: one of :data:`OPERATORS`.
        start: offset of the replaced text.
        end: offset behind it.
        text: what replaces it.
        statement: line and column of the innermost statement of a function that holds it; None outside of functions.
    """

    id: str
    file: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    statement: tuple[int, int] | None

    def apply(self, source: str) -> str:
        """Return ``source`` with the change."""
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        """Return the change as a unified diff with three lines of context."""
        lines = difflib.unified_diff(
            source.splitlines(), self.apply(source).splitlines(), f"a/{self.file}", f"b/{self.file}", lineterm=""
        )
        return "\n".join(lines)


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Return every mutant of ``source``, in the order of its text."""
    walk = _Walk(source, file)
    walk.visit(ast.parse(source))
    return sorted(walk.found, key=lambda one: (one.start, one.operator, one.text))


class _Walk(ast.NodeVisitor):
    """Collect the mutants of one file, with the names of the scopes around each node."""

    def __init__(self, source: str, file: str) -> None:
        self.source, self.file = source, file
        self.found: list[Mutant] = []
        self._scopes: list[str] = []
        self._parameters: list[str] = []
        self._statements: list[tuple[int, int]] = []
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)

    # -- scopes and what is skipped ----------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._visit_statement(node)
        elif isinstance(node, (ast.JoinedStr, ast.arg)):
            return  # wording, annotations
        else:
            if isinstance(node, ast.expr):
                self._mutate_expression(node)
            self.generic_visit(node)

    def _visit_statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)):
            return  # an assert narrows a type here
        if isinstance(node, ast.ClassDef):
            self._visit_scope(node, [])
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._visit_function(node)
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if self._is_wording(node):
            return
        in_function = bool(self._statements)
        if in_function:
            self._statements.append((node.lineno, node.col_offset))
        self._mutate_statement(node, in_function)
        if isinstance(node, ast.Raise):
            pass  # arguments of an error are its wording
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
        elif not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            self.generic_visit(node)
        if in_function:
            self._statements.pop()

    def _is_wording(self, node: ast.stmt) -> bool:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            return False
        return ast.unparse(node.value.func).startswith(_WORDING)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name == "__repr__":
            return
        given = [one.arg for one in (*node.args.posonlyargs, *node.args.args) if one.arg not in ("self", "cls")]
        before, self._parameters = self._parameters, given
        body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        if body:
            self._statements.append((body[0].lineno, body[0].col_offset))
        self._visit_scope(node, [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)])
        if body:
            self._statements.pop()
        self._parameters = before

    def _visit_scope(self, node: Any, others: Sequence[ast.expr]) -> None:
        self._scopes.append(node.name)
        statements = self._statements
        if isinstance(node, ast.ClassDef):
            if any(ast.unparse(base).endswith(("Error", "Protocol")) for base in node.bases):
                self._scopes.pop()
                return  # the copy takes these from the core itself
            self._statements = []
        for one in (*others, *node.body):
            self.visit(one)
        self._statements = statements
        self._scopes.pop()

    # -- a mutant ----------------------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        characters = len(text.encode()[:column].decode()) if not text.isascii() else column
        return self._line_starts[line - 1] + characters

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, operator: str, node: Any, text: str) -> None:
        self._add_span(operator, node.lineno, *self._span(node), text)

    def _add_span(self, operator: str, line: int, start: int, end: int, text: str) -> None:
        before = self.source[start:end]
        if before == text:
            return
        function = ".".join(self._scopes) or "<module>"
        key = (function, operator, self._lines[line - 1].strip(), before, text)
        number = self._counts[key]
        self._counts[key] += 1
        digest = hashlib.sha256("\0".join([*key, str(number)]).encode()).hexdigest()[:6]
        made = Mutant(
            f"{self.file}:{function}:{operator}:{digest}", self.file, function, line, operator, start, end, text,
            self._statements[-1] if self._statements else None,
        )  # fmt: skip
        self.found.append(made)

    # -- statements --------------------------------------------------------------------------------------------

    def _mutate_statement(self, node: ast.stmt, in_function: bool) -> None:
        if in_function and self._is_deletable(node):
            self._add("delete", node, "pass")
        if isinstance(node, ast.Return) and node.value is not None:
            self._mutate_return(node, node.value)
        elif isinstance(node, ast.With):
            for item in node.items:
                if item.optional_vars is None:
                    self._add("no_context", item.context_expr, _NO_CONTEXT)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                self._mutate_handler(handler)
        elif isinstance(node, (ast.If, ast.While)):
            self._negate(node.test)

    @staticmethod
    def _is_deletable(node: ast.stmt) -> bool:
        """Return whether the statement acts at once: without a binding of a local name a NameError would follow."""
        if isinstance(node, (ast.Raise, ast.Delete, ast.AugAssign, ast.Continue, ast.Break)):
            return True
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        return bool(targets) and not any(isinstance(one, ast.Name) for target in targets for one in _bound(target))

    def _mutate_return(self, node: ast.Return, value: ast.expr) -> None:
        if not (isinstance(value, ast.Constant) and value.value is None):
            self._add("return_none", value, "None")
        if self._parameters and ast.unparse(value) != self._parameters[0]:
            self._add("return_input", value, self._parameters[0])

    def _mutate_handler(self, handler: ast.ExceptHandler) -> None:
        first, last = handler.body[0], handler.body[-1]
        if not isinstance(first, ast.Pass):
            start, end = self._span(first)[0], self._span(last)[1]
            outer = list(self._statements)
            if self._statements:
                self._statements.append((first.lineno, first.col_offset))
            self._add_span("swallow", first.lineno, start, end, "pass")
            self._statements = outer
        if handler.type is not None:
            outer = list(self._statements)
            if self._statements:
                self._statements.append((first.lineno, first.col_offset))
            self._add("uncaught", handler.type, "()")
            self._statements = outer

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._add("negate", test, f"({ast.unparse(test.operand)})")
        elif not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _OPPOSITES)):
            self._add("negate", test, f"(not ({ast.unparse(test)}))")

    # -- expressions -------------------------------------------------------------------------------------------

    def _mutate_expression(self, node: ast.expr) -> None:
        for kind, mutate in self._by_type():
            if isinstance(node, kind):
                mutate(node)

    def _by_type(self) -> Iterator[tuple[type[ast.expr], Callable[[Any], None]]]:
        yield ast.Compare, self._compare
        yield ast.BoolOp, self._boolean
        yield ast.BinOp, self._arithmetic
        yield ast.Constant, self._constant
        yield ast.Attribute, self._dtype
        yield ast.IfExp, lambda node: self._negate(node.test)
        yield ast.Call, self._call
        yield (ast.Name, lambda node: self._rank(node, node.id))  # type: ignore[misc]
        for comprehension in (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp):
            yield comprehension, self._filters

    def _filters(self, node: Any) -> None:
        for generator in node.generators:
            for test in generator.ifs:
                self._negate(test)

    def _compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = _COMPARISONS[type(operator)]()
            self._add("compare", node, f"({ast.unparse(changed)})")

    def _boolean(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("boolean", node, f"({ast.unparse(changed)})")

    def _arithmetic(self, node: ast.BinOp) -> None:
        text = any(isinstance(one, (ast.JoinedStr, ast.Constant)) and isinstance(getattr(one, "value", ""), str)
                   for one in (node.left, node.right))  # fmt: skip
        if type(node.op) in _ARITHMETIC and not text:
            changed = copy.deepcopy(node)
            changed.op = _ARITHMETIC[type(node.op)]()
            self._add("arithmetic", node, f"({ast.unparse(changed)})")

    def _constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, (int, float)):
            self._add("constant", node, repr(value + 1))
            self._add("constant", node, f"({value - 1!r})")
        elif isinstance(value, str) and value in ("float16", "bfloat16", "float32", "float64"):
            self._add("dtype", node, repr(_DTYPES[value]))

    def _dtype(self, node: ast.Attribute) -> None:
        if node.attr in _DTYPES and isinstance(node.value, ast.Name) and node.value.id == "torch":
            self._add("dtype", node, f"torch.{_DTYPES[node.attr]}")
        self._rank(node, node.attr)

    def _rank(self, node: Any, name: str) -> None:
        called = self.source[self._span(node)[1] :].startswith("(")
        if name in _RANKS and isinstance(node.ctx, ast.Load) and not called:
            self._add("rank", node, f"({ast.unparse(node)} + 1)")

    def _call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _RANKS and not node.args:
            self._add("rank", node, f"({ast.unparse(node)} + 1)")
        if isinstance(node.func, ast.Attribute):
            if name in _STRIPPED_METHODS and not node.args:
                self._add("strip_call", node, f"({ast.unparse(node.func.value)})")
            if name in _DTYPES and not node.args and not isinstance(node.func.value, ast.Name):
                self._add("dtype", node, f"({ast.unparse(node.func.value)}).{_DTYPES[name]}()")
        if name in _STRIPPED_FUNCTIONS and len(node.args) == 1:
            self._add("strip_call", node, f"({ast.unparse(node.args[0])})")
        if len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            changed = copy.deepcopy(node)
            changed.args[:2] = reversed(changed.args[:2])
            self._add("swap_arguments", node, ast.unparse(changed))
        for index in range(len(node.keywords)):
            changed = copy.deepcopy(node)
            del changed.keywords[index]
            self._add("drop_argument", node, ast.unparse(changed))


def _bound(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for one in target.elts:
            yield from _bound(one)
    else:
        yield target
