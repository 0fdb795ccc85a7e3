"""Generate the pages of docs/reference from docstrings: ``python plugins/conformance/tests/reference_pages.py``.

There is one page per contract: its declarations, its methods, and the checks of its components.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import extension_api

import torchhal_conformance.checks  # noqa: F401  registers them
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO, CheckpointLocation
from torchhal.cluster import ClusterEnvironment
from torchhal.launchers import Launcher
from torchhal.plugin import Availability, Component, Hookspecs
from torchhal.precision import Precision
from torchhal.strategies import ParallelStrategy, Strategy
from torchhal_conformance._check import CHECKS, Check

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
MADE = "<!-- made by plugins/conformance/tests/reference_pages.py: change the docstrings, not this page -->"


@dataclass(frozen=True)
class Page:
    file: str
    family: str
    title: str
    classes: tuple[type[Any], ...]
    about: str


PAGES = (
    Page(
        "plugin.md", "GEN", "Plugins", (Hookspecs, Component, Availability),
        "What a manifest implements and returns. [Write a plugin](../how-to/write-a-plugin.md) makes one.",
    ),
    Page(
        "accelerator.md", "ACC", "Accelerators", (Accelerator,),
        "`torchhal.accelerators.Accelerator`. [Write an accelerator](../how-to/write-an-accelerator.md) shows one.",
    ),
    Page(
        "precision.md", "PRE", "Precisions", (Precision,),
        "`torchhal.precision.Precision`. [Write a precision](../how-to/write-a-precision.md) shows one.",
    ),
    Page(
        "checkpoint-io.md", "CIO", "Checkpoint IOs", (CheckpointIO, CheckpointLocation),
        "`torchhal.checkpoint.CheckpointIO`. [Write a checkpoint IO](../how-to/write-a-checkpoint-io.md) shows one.",
    ),
    Page(
        "cluster-environment.md", "ENV", "Cluster environments", (ClusterEnvironment,),
        "`torchhal.cluster.ClusterEnvironment`. [Write a cluster environment](../how-to/write-an-environment.md) shows "
        "one.",
    ),
    Page(
        "strategy.md", "STR", "Strategies", (Strategy, ParallelStrategy, Launcher),
        "`torchhal.strategies`. [Write a strategy](../how-to/write-a-strategy.md) and "
        "[Write an engine](../how-to/write-an-engine.md) show one.",
    ),
    Page(
        "trainer-checks.md", "SYS", "Through the Trainer", (),
        "Checks of components of any kind that train with the component as a user does, by its alias if it has one.",
    ),
)  # fmt: skip


# -- docstrings ----------------------------------------------------------------------------------------------

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`~?([^`]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example):$")


def markdown(docstring: str) -> str:
    """Convert a docstring of this project (Google's sections, Sphinx's roles) to Markdown."""
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", inspect.cleandoc(docstring)).replace("``", "`")
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
    return "\n".join(lines).strip()


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
        yield f"- {text}\n{textwrap.indent(markdown(told), '  ')}".rstrip()


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


# -- checks --------------------------------------------------------------------------------------------------


def of_family(family: str) -> list[Check]:
    return sorted((one for one in CHECKS.values() if one.id.startswith(family)), key=lambda one: one.id)


def checks(family: str) -> Iterator[str]:
    for one in of_family(family):
        notes = [one.level]
        if one.features:
            notes = [f"feature {', '.join(f'`{name}`' for name in sorted(one.features))}"]
        if one.world_sizes:
            notes.append(
                f"in {' and '.join(map(str, one.world_sizes))} process{'es' if max(one.world_sizes) > 1 else ''}"
            )
        yield f"### {one.id}\n"
        yield f"{one.contract}\n"
        yield f"- level: {', '.join(notes)}; since {one.since}\n- why: {one.why}\n- fix: {one.fix}\n"


def text(page: Page) -> str:
    parts = [f"# {page.title}\n", f"{MADE}\n", f"{page.about}\n"]
    for cls in page.classes:
        parts.append(f"## {cls.__name__}\n")
        parts.append(f"{markdown(cls.__doc__ or '')}\n")
        parts_of_class = [cls, *private_bases(cls)]
        if declared := [text for base in parts_of_class for text in declarations(base)]:
            parts += ["Declarations:\n", *declared, ""]
        for base in parts_of_class:
            parts += methods(base)
    parts += ["## Checks\n", "See [the conformance kit](conformance.md) for how they are made.\n", *checks(page.family)]
    return "\n".join(parts).rstrip() + "\n"


def index() -> str:
    """Return the table in conformance.md that links the pages."""
    rows = ["| checks | of | how many | features |", "|---|---|---|---|"]
    for page in PAGES:
        found = of_family(page.family)
        features = ", ".join(sorted({f"`{name}`" for one in found for name in one.features})) or "none"
        rows.append(
            f"| {page.family} | [{page.title[0].lower()}{page.title[1:]}]({page.file}) | {len(found)} | {features} |"
        )
    return "\n".join(rows) + "\n"


START, END = "<!-- checks: made by plugins/conformance/tests/reference_pages.py -->\n", "<!-- end of checks -->\n"
KIT = FOLDER / "conformance.md"


def pages() -> dict[Path, str]:
    before, rest = KIT.read_text(encoding="utf-8").split(START)
    kit = f"{before}{START}\n{index()}\n{END}{rest.split(END)[1]}"
    extension = {FOLDER / "extension-api.md": extension_api.text(MADE)}
    return {KIT: kit, **{FOLDER / page.file: text(page) for page in PAGES}, **extension}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
