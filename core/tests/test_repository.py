"""Rules about the source of core that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "torchhal"
FILES = sorted(SOURCE.rglob("*.py"))

VENDORS = (
    "amd|ascend|bagua|colossalai|cuda|cudnn|deepspeed|fairscale|gaudi|google|graphcore|habana|habana_frameworks|hccl|"
    "hivemind|horovod|hpu|inferentia|intel|ipu|mlu|mps|musa|nccl|neuron|npu|nvidia|oneccl|poptorch|rocm|torch_xla|torchft|"
    "tpu|trainium|xla|xpu"
)
# "_" is a letter to \b, yet torch_xla and cuda_stream name a vendor.
VENDOR = re.compile(rf"(?<![a-z0-9])({VENDORS})(?![a-z0-9])", re.IGNORECASE)


def ids(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_the_rules_see_the_source() -> None:
    assert {"registry/_hints.py", "registry/_registry.py", "accelerators/base.py"} <= {ids(file) for file in FILES}


@pytest.mark.parametrize("line", ["x.cuda()", "torch_xla", "for NCCL", "is_cuda", "'hpu'", "cuda_stream = 1"])
def test_the_vendor_rule_catches(line: str) -> None:
    assert VENDOR.search(line)


@pytest.mark.parametrize("line", ["the input", "examples", "relax", "compstat", "maps", "output", "samd"])
def test_the_vendor_rule_lets_pass(line: str) -> None:
    assert not VENDOR.search(line)


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "_hints.py"], ids=ids)
def test_no_vendor_word(file: Path) -> None:
    lines = enumerate(file.read_text().splitlines(), 1)
    assert [f"{ids(file)}:{number}: {line.strip()}" for number, line in lines if VENDOR.search(line)] == []


def imports(source: str, module: str) -> Iterator[str]:
    """Every module that ``source`` imports when it runs, wherever in it; not what only a type checker sees."""
    package = module.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts)  # an __init__ keeps its name: relative imports then start at its own package


def test_the_import_rule_sees_every_form() -> None:
    source = """
import a.b
from c import d
from . import e
from ..f import g
def inner():
    import h
if TYPE_CHECKING:
    import unseen
else:
    import i
"""
    assert set(imports(source, "p.q.r")) == {"a.b", "c.d", "p.q.e", "p.f.g", "h", "i"}


# Who may import what stands on the right: design, section 2. `trainer` is at the top, `plugin` at the bottom.
PARTS = ("accelerators", "precision", "checkpoint", "cluster", "launchers")
ARROWS = {
    "trainer": {"__init__", "cli", "run", "trainer", "trainer_cli", "tuning"},
    "cli": {"__main__", "cli"},
    "resolve": {"__init__", "cli", "export", "resolve", "trainer"},
    "registry": {"__init__", "cli", "registry", "resolve", "testing", "trainer"},
    "strategies": {"__init__", "cli", "resolve", "run", "strategies", "trainer", "trainer_cli"},
}


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_the_arrows_point_one_way(file: Path) -> None:
    own = file.relative_to(SOURCE).with_suffix("").parts[0]
    wrong = [
        imported
        for imported in imports(file.read_text(), module_name(file))
        for target, allowed in ARROWS.items()
        if (f"{imported}.").startswith(f"torchhal.{target}.") and own not in allowed
    ]
    assert wrong == []


WITHOUT_TORCH = ["__init__.py", "plugin.py", "errors.py", "testing.py", *map(ids, (SOURCE / "registry").glob("*.py"))]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_discovery_never_names_torch(name: str) -> None:
    imported = set(imports((SOURCE / name).read_text(), module_name(SOURCE / name)))
    assert not {module for module in imported if module.partition(".")[0] in ("torch", "numpy", "lightning")}
    assert not {
        module for module in imported if module.split(".")[1:2] and module.split(".")[1] in (*PARTS, "strategies")
    }


def test_what_is_hinted_at_exists() -> None:
    """An error tells to install distributions of this repository, and to write arguments that the Trainer has."""
    from torchhal.registry import _hints as hints

    projects = (Path(__file__).parents[2] / "plugins").glob("*/pyproject.toml")
    names = {name for file in projects for name in re.findall(r'^name = "(.*)"', file.read_text(), re.MULTILINE)}
    assert set(hints.DISTRIBUTIONS.values()) <= names
    trainer = (SOURCE / "trainer" / "trainer.py").read_text()
    arguments = set(re.findall(r"^        (\w+): ", trainer, re.MULTILINE))
    assert set(re.findall(r"Trainer\((\w+)=", "\n".join(hints._ARGUMENTS))) - arguments == set()
