"""First-party plugins import from torchhal the extension API and nothing else; no release takes any of it away."""

import copy
import sys
from pathlib import Path

import pytest
from pages import blocks_of

from torchhal_conformance._extension_api import MODULES, foreign_uses, overridden_private_names, public_names

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "conformance" / "tests"))
import extension_api_record as record  # noqa: E402

SOURCES = [
    path
    for source in (*ROOT.glob("plugins/*/src"), *ROOT.glob("plugins/*/stub/src"))
    if "conformance" not in source.parts  # the kit examines core's inner parts, and is released with it
    for path in source.rglob("*.py")
]


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("from torchhal.plugin import hookimpl", []),
        ("import torchhal.errors, torch", []),
        ("from torchhal import rng\nrng.collect\nrng.__name__", []),
        ("from torchhal.strategies import DDPStrategy\nDDPStrategy.__init__", []),
        ("from .torchhal import _x", []),
        ("def f(model):\n  return model._torchhal", []),
        ("import torchhal._overrides", ["1 imports torchhal._overrides"]),
        ("def f():\n  from torchhal.rng import Any", ["2 imports torchhal.rng.Any"]),
        (
            "from torchhal.strategies.ddp import DDPStrategy",
            ["1 imports torchhal.strategies.ddp.DDPStrategy (public as torchhal.strategies.DDPStrategy)"],
        ),
        ("import torchhal.rng as r\nr.Any", ["2 uses torchhal.rng.Any"]),
        ("import torchhal.rng\ntorchhal.rng.Any.x", ["2 uses torchhal.rng.Any"]),
        (
            "from torchhal.strategies import Strategy\nStrategy._watch_ranks(1).x",
            ["2 uses torchhal.strategies.Strategy._watch_ranks"],
        ),
    ],
)
def test_foreign_uses_are_found(source: str, uses: list[str]) -> None:
    assert [f"{line} {use}" for line, use in foreign_uses(source)] == uses


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_plugin_imports_the_extension_api_only(path: Path) -> None:
    assert list(foreign_uses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("member", "found"),
    [
        ("def _release(self): ...", []),
        ("def __init__(self): ...", []),
        ("def _watch_ranks(self, store): ...", ["Strategy._watch_ranks"]),
        ("_environment_ready: bool = True", []),  # core has it in objects only
        ("_lists_precisions = True", ["CarriedPrecisions._lists_precisions"]),
    ],
)
def test_private_names_that_are_overridden_are_found(member: str, found: list[str]) -> None:
    source = f"from torchhal.strategies import Strategy\n\nclass Own(Strategy):\n  {member}"
    namespace: dict[str, object] = {}
    exec(source, namespace)
    assert [use.split(".", 3)[-1] for _, use in overridden_private_names(source, namespace)] == found


def test_the_plugins_are_looked_at() -> None:
    assert len(SOURCES) > 100


PAGES = sorted((ROOT / "docs" / "how-to").glob("write-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_for_authors_imports_the_extension_api_only(page: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    assert [use for block in blocks for use in foreign_uses("\n".join(block.text))] == []


@pytest.mark.parametrize("module", [name for names in MODULES.values() for name in names])
def test_what_is_listed_exists(module: str) -> None:
    found = __import__(module, fromlist=["any"])
    assert public_names()[module] and all(hasattr(found, name) for name in found.__all__)


def test_nothing_is_taken_away() -> None:
    """What a plugin of the last release may rely on is still there; `python extension_api_record.py` lists the rest."""
    assert list(record.breaks(record.load(record.last_release()), record.present())) == []


STRATEGY = ("torchhal.strategies", "Strategy")


def _changed(change):
    new = copy.deepcopy(record.load(record.last_release()))
    change(new[STRATEGY[0]][STRATEGY[1]])
    return list(record.breaks(record.load(record.last_release()), new))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cls: cls["members"].pop("teardown"), "teardown is gone"),
        (lambda cls: cls["members"].update(teardown={"kind": "value"}), "teardown is a value, and was a function"),
        (lambda cls: cls["abstract"].append("setup"), "setup is abstract"),
        (lambda cls: cls["members"]["setup"]["parameters"].append("run"), "setup requires a new argument 'run'"),
        (lambda cls: cls["members"]["setup"]["parameters"].remove("trainer"), "setup has no argument 'trainer'"),
        (
            lambda cls: cls["members"]["prepare"].update(parameters=["trainer", "self"]),
            "prepare takes its arguments in another order: trainer, self (before: self, trainer)",
        ),
    ],
)
def test_a_break_is_found(change, said: str) -> None:
    assert _changed(change) == [f"torchhal.strategies.Strategy{'.' if said[0] != ' ' else ''}{said}"]


@pytest.mark.parametrize(
    "change",
    [
        lambda cls: cls["members"].update(new={"kind": "function", "parameters": ["self"]}),
        lambda cls: cls["members"]["setup"]["parameters"].append("run="),
        lambda cls: cls["members"]["setup"]["parameters"].append("**options"),
    ],
)
def test_growth_is_no_break(change) -> None:
    assert _changed(change) == []


def test_a_name_that_is_gone_is_found() -> None:
    old = record.load(record.last_release())
    new = copy.deepcopy(old)
    del new["torchhal.plugin"]["Component"]
    old["torchhal.plugin"]["Part"] = {"kind": "value"}
    # Component still imports, without a warning: leaving it out of the list takes the promise away
    assert list(record.breaks(old, new)) == ["torchhal.plugin.Component is gone", "torchhal.plugin.Part is gone"]
