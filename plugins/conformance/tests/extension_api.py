"""List what authors of plugins may import from torchhal: the page docs/reference/extension-api.md."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from importlib import import_module
from types import ModuleType
from typing import Any

from torchhal_conformance._extension_api import MODULES

ABOUT = """\
What a plugin may import from torchhal, by module. Nothing else of torchhal is stable: a module or name with an
underscore may change in any release. The plugins in this repository import nothing else, which
`tests/test_extension_api.py` shows, and GEN-15 holds a plugin to.
"""


def text(made: str) -> str:
    """Return the page; ``made`` is the comment that says by what it was made."""
    parts = ["# The extension API", "", made, "", ABOUT]
    for heading, names in MODULES.items():
        parts += [f"## {heading}", ""]
        for name in names:
            module = import_module(name)
            parts += [f"### `{name}`", "", _first_line(module), "", "| name | |", "|---|---|"]
            parts += [f"| `{public}` | {_summary(module, public)} |" for public in sorted(_public(module))]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _public(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if not name.startswith("_")]


def _summary(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    documented = inspect.isroutine(value) or isinstance(value, type | ModuleType)
    return _first_line(value) if documented else _comment(module, name)


def _first_line(value: Any) -> str:
    doc = inspect.getdoc(value) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0]
    return _in_a_cell(sentence)


def _in_a_cell(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def _comment(module: ModuleType, name: str) -> str:
    """Return the string behind an assignment to ``name``, where the module has one."""
    body = ast.parse(inspect.getsource(module)).body
    for node, after in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return _in_a_cell(" ".join(str(after.value.value).split()))
    return ""
