"""First-party plugins import from torchhal what docs/reference/extension-api.md lists, and nothing else."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "conformance" / "tests"))
import extension_api  # noqa: E402

SOURCES = [
    path
    for source in (*ROOT.glob("plugins/*/src"), *ROOT.glob("plugins/*/stub/src"))
    if "conformance" not in source.parts  # the kit examines core's inner parts, and is released with it
    for path in source.rglob("*.py")
]
ALLOWED = extension_api.public_names()


def imported(source: str):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchhal":
            yield from ((node.module, name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names if name.name.split(".")[0] == "torchhal")


def test_the_rule_sees_imports() -> None:
    source = "from torchhal.plugin import hookimpl\nimport torchhal.errors, torch\ndef f():\n  from torchhal import rng"
    assert set(imported(source)) == {("torchhal.plugin", "hookimpl"), ("torchhal.errors", ""), ("torchhal", "rng")}
    assert len(SOURCES) > 100


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_plugin_imports_the_extension_api_only(path: Path) -> None:
    wrong = [
        f"{module}.{name}"
        for module, name in imported(path.read_text())
        if module not in ALLOWED or (name and name not in ALLOWED[module])
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [name for names in extension_api.MODULES.values() for name in names])
def test_what_is_listed_exists(module: str) -> None:
    found = __import__(module, fromlist=["any"])
    assert found.__all__ and all(hasattr(found, name) for name in found.__all__)
