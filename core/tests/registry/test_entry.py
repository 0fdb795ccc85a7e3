from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from torchhal.accelerators import Accelerator
from torchhal.errors import ComponentError
from torchhal.plugin import Component
from torchhal.registry._entry import RegistryEntry


class Board(Accelerator):
    name = "board"
    device_type = "cpu"

    def __init__(self, clock: int = 1, lanes: list[int] | None = None) -> None:
        self.clock = clock
        self.lanes = lanes


class Strict(Accelerator):
    def __init__(self, needed: int) -> None: ...


class Open(Accelerator):
    def __init__(self, **options: Any) -> None:
        self.options = options


class Opaque(Open):
    __signature__ = "none that can be read"


class Picky(Accelerator):
    def __init__(self) -> None:
        raise TypeError("from inside")


class Unfinished(Accelerator):
    __abstractmethods__ = frozenset({"warm_up", "cool_down"})


instance = Board()


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name that a target can have, whatever pytest calls it."""
    monkeypatch.setitem(sys.modules, "board_parts", sys.modules[__name__])


def entry(
    name: str = "Board", *, kind: str = "accelerator", module: str = "board_parts", **fields: Any
) -> RegistryEntry:
    return RegistryEntry(kind, Component("board", f"{module}:{name}", **fields), "maker", "torchhal-maker")


def test_loads_once() -> None:
    found = entry()
    assert found.load() is Board
    del sys.modules["board_parts"]
    assert found.load() is Board
    assert found.qualified_name == "torchhal-maker/board"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Bord", "did you mean 'Board'?"),
        ("instance", "must be a class (got a Board)"),
        ("Component", "must be a subclass of torchhal.accelerators.Accelerator (got torchhal.plugin.Component)"),
        ("Accelerator", "must be a subclass"),
        ("Unfinished", "leaves cool_down, warm_up abstract"),
    ],
)
def test_what_is_no_accelerator(name: str, words: str) -> None:
    with pytest.raises(ComponentError) as caught:
        entry(name).load()
    assert words in str(caught.value)
    assert "accelerator 'torchhal-maker/board' can't be used" in str(caught.value)


def test_each_kind_has_its_own_contract() -> None:
    with pytest.raises(ComponentError, match=r"must be a subclass of torchhal\.cluster\.ClusterEnvironment"):
        entry(kind="cluster_environment").load()


@pytest.mark.parametrize("error", [ImportError("gone"), SystemExit(3), RecursionError("deep"), OSError("libx.so")])
def test_a_target_that_cannot_be_imported(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise error

    vendor = types.ModuleType("vendor_parts")
    vendor.__getattr__ = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "vendor_parts", vendor)
    with pytest.raises(
        ComponentError, match=f"'vendor_parts:Board' can't be imported.*{type(error).__name__}"
    ) as caught:
        entry(module="vendor_parts", requires=("no_such_vendor",)).load()
    assert caught.value.__cause__ is error
    assert "'no_such_vendor' is not installed" in str(caught.value)


def test_ctrl_c_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    vendor = types.ModuleType("vendor_parts")
    vendor.__getattr__ = interrupt  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "vendor_parts", vendor)
    with pytest.raises(KeyboardInterrupt):
        entry(module="vendor_parts").load()


def test_a_failed_import_is_tried_again() -> None:
    later = entry(module="parts_to_come")
    with pytest.raises(ComponentError):
        later.load()
    sys.modules["parts_to_come"] = sys.modules[__name__]
    try:
        assert later.load() is Board
    finally:
        del sys.modules["parts_to_come"]


def test_defaults_are_copied_for_each_instance_and_overridden() -> None:
    lanes = [1]
    found = entry(defaults={"clock": 2, "lanes": lanes})
    first, second = found.create(), found.create(clock=3)
    assert (first.clock, first.lanes, second.clock) == (2, [1], 3)
    first.lanes.append(9)
    assert second.lanes == [1] and lanes == [1] and found.create().lanes == [1]
    given = [5]
    assert found.create(lanes=given).lanes is given


def test_a_wrong_argument_of_the_user() -> None:
    with pytest.raises(
        TypeError, match=r"'clok' is no argument of Board; did you mean 'clock'\?; it takes clock, lanes"
    ):
        entry().create(clok=1)
    with pytest.raises(TypeError, match="missing a required argument: 'needed' of Strict"):
        entry("Strict").create()


def test_a_wrong_default_of_the_record() -> None:
    with pytest.raises(ComponentError, match="its record's default 'speed' is no argument of Board"):
        entry(defaults={"speed": 1}).create()


def test_any_argument_where_the_constructor_takes_any() -> None:
    assert entry("Open", defaults={"a": 1}).create(b=2).options == {"a": 1, "b": 2}


def test_a_constructor_without_a_signature() -> None:
    lanes = [1]
    made = entry("Opaque", defaults={"lanes": lanes}).create(clock=2)
    assert made.options == {"lanes": [1], "clock": 2} and made.options["lanes"] is not lanes


def test_an_error_inside_the_constructor_is_left_alone() -> None:
    with pytest.raises(TypeError, match=r"^from inside$"):
        entry("Picky").create()


def test_an_unusable_record() -> None:
    unusable = RegistryEntry(
        "accelerator", Component("Bad", "board_parts:Board"), "maker", "torchhal-maker", "a bad alias"
    )
    assert unusable.availability().reason == "a bad alias"
    for use in (unusable.load, unusable.create):
        with pytest.raises(ComponentError, match="a bad alias"):
            use()


def test_availability_imports_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_vendor.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert entry(requires=("some_vendor",)).availability()
    missing = entry(requires=("some_vendor", "other_vendor")).availability()
    assert not missing and missing.reason == "the Python module 'other_vendor' is not installed"
    assert "some_vendor" not in sys.modules


def test_availability_of_modules_in_odd_states(monkeypatch: pytest.MonkeyPatch) -> None:
    handmade = types.ModuleType("handmade")  # its __spec__ is None
    monkeypatch.setitem(sys.modules, "handmade", handmade)
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert entry(requires=("handmade",)).availability()
    assert "'blocked'" in entry(requires=("blocked",)).availability().reason

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "half_installed":
                raise OSError("no driver")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert "no driver" in entry(requires=("half_installed",)).availability().reason


def test_a_record_of_nonsense_is_still_listed() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    nonsense = Component(Silent(), None, 3, requires=7, aliases=8)  # type: ignore[arg-type]
    listed = RegistryEntry("accelerator", nonsense, "maker", "torchhal-maker", "bad").to_dict()
    assert listed == {
        "kind": "accelerator",
        "alias": "<Silent>",
        "aliases": [],
        "target": "None",
        "summary": "3",
        "available": False,
        "reason": "bad",
    }
