"""Render classes for the pages of docs/reference: docstrings as Markdown, declarations, methods and signatures."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

# -- docstrings ----------------------------------------------------------------------------------------------

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`~?([^`]+)`")
_DIRECTIVE = re.compile(r"^( *)\.\. (versionadded|deprecated):: *(\S+) *", re.MULTILINE)
_SINCE = {"versionadded": "New in", "deprecated": "Deprecated since"}
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example):$")


def markdown(docstring: str) -> str:
    """Convert a docstring of this project (Google's sections, Sphinx's roles) to Markdown."""
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", inspect.cleandoc(docstring)).replace("``", "`")
    text = _DIRECTIVE.sub(lambda match: f"{match[1]}*{_SINCE[match[2]]} {match[3]}.* ", text)
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
            lines += [f"{section}:", ""]
        elif section in ("Returns", "Yields") and line.strip() and lines[-1]:  # one text, not one item a line
            lines.append(f"  {line.strip()}")
        elif section and line.startswith("    ") and not line.startswith("     "):
            lines.append(f"- {_named(line.strip())}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = "" if line.strip() else section
            lines.append(line.replace("::", ":") if line.endswith("::") else line)
    return "\n".join(line.rstrip() for line in lines).strip()


def _named(item: str) -> str:
    name, colon, rest = item.partition(": ")
    plain = re.fullmatch(r"\**\w+(, \w+)*", name) is not None
    return f"`{name}`: {rest}" if colon and plain else item


# -- classes -------------------------------------------------------------------------------------------------


def _class_node(cls: type[Any]) -> ast.ClassDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def private_bases(cls: type[Any]) -> list[type[Any]]:
    """Return the bases from private modules among which a contract is divided, without those of a public base."""
    bases = cls.__mro__[1:]
    public = [base for base in bases if not base.__module__.rpartition(".")[2].startswith("_")]
    return [
        base
        for base in bases
        if base.__module__.startswith("torchhal.")
        and base not in public
        and not any(issubclass(other, base) for other in public)
    ]


def declarations(cls: type[Any]) -> Iterator[str]:
    """Yield the documented class attributes: name, type and default, and the string below each."""
    body = _class_node(cls).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id.startswith("_"):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        told = str(after.value.value) if documented else ""  # type: ignore[union-attr]
        kind = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(node.annotation))
        default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
        text = f"`{node.target.id}: {kind}{default}`"
        # Four spaces, and an empty line after each: every renderer of Markdown nests lists and paragraphs so.
        yield f"- {text}\n{textwrap.indent(markdown(told), '    ')}".rstrip() + "\n"


def methods(cls: type[Any]) -> Iterator[str]:
    """Yield the public methods and properties that the class itself defines, in the order of its source."""
    abstract = getattr(cls, "__abstractmethods__", frozenset())
    for node in _class_node(cls).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(one) for one in node.decorator_list}
        if any(one.endswith(".setter") for one in decorators):
            continue
        kind = "property" if "property" in decorators else "class method" if "classmethod" in decorators else ""
        notes = [note for note in (kind, "abstract" if node.name in abstract else "") if note]
        arguments = "" if kind == "property" else f"({_arguments(node)})"
        result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        yield f"### {node.name}\n"
        yield f"`{node.name}{arguments}{result}`" + (f" ({', '.join(notes)})" if notes else "") + "\n"
        if told := ast.get_docstring(node):
            yield f"{markdown(told)}\n"


def _arguments(node: ast.FunctionDef) -> str:
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            arguments.posonlyargs, arguments.args[1:], arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults,
            arguments.kwarg, arguments.defaults,
        )  # fmt: skip
    return ast.unparse(arguments)
