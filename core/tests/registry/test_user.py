"""What user code registers without a package, and the registry that tests put in the place of the process's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchhal
from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.cluster import ClusterEnvironment
from torchhal.errors import ConfigurationError, UnknownAliasError
from torchhal.plugin import alias_problem
from torchhal.registry import Registry
from torchhal.testing import isolated_registry

pytest_plugins = ["pytester"]


@pytest.fixture
def fresh() -> Iterator[Registry]:
    with isolated_registry() as registry:
        yield registry


class Board(Accelerator):
    def __init__(self, clock: int = 1) -> None:
        self.clock = clock


class Plank(Accelerator): ...


def test_register_and_find(fresh: Registry) -> None:
    assert torchhal.register("accelerator", "board", Board, summary="A board", defaults={"clock": 7}) is Board
    entry = registry.find("accelerator", "BOARD")
    assert entry is registry.find("accelerator", "user/board") is fresh.find("accelerator", "board")
    assert (entry.qualified_name, entry.plugin, entry.component.summary) == ("user/board", "user", "A board")
    assert entry.load() is Board and entry.create().clock == 7
    assert registry.aliases("accelerator") == ["board", "cpu"]
    assert registry.plugins() == []


def test_register_as_a_decorator(fresh: Registry) -> None:
    @torchhal.register("accelerator", "inner")
    class Inner(Accelerator): ...

    assert Inner.__qualname__.endswith("Inner")
    assert registry.find("accelerator", "inner").load() is Inner


def test_repeated_cell_replaces_class(fresh: Registry) -> None:
    """A notebook cell that is run again replaces its class."""

    def cell() -> type:
        class Cell(Accelerator): ...

        return registry.register("accelerator", "cell", Cell)

    cell()
    second = cell()
    assert registry.find("accelerator", "cell").load() is second


def test_another_class_does_not_replace_it(fresh: Registry) -> None:
    registry.register("accelerator", "board", Board)
    with pytest.raises(ConfigurationError, match=r"'board' is registered already, for .*:Board"):
        registry.register("accelerator", "board", Plank)
    assert registry.find("accelerator", "board").load() is Board


@pytest.mark.parametrize(
    ("kind", "alias", "cls", "error", "words"),
    [
        ("accelerators", "board", Board, ValueError, "'kind' must be one of"),
        ("accelerator", "Board", Board, ValueError, "lower-case"),
        ("accelerator", "auto", Board, ValueError, "reserved"),
        ("accelerator", "a/b", Board, ValueError, "an alias must be"),
        ("accelerator", ["a"], Board, ValueError, "must be a str"),
        ("accelerator", "cpu", Board, ConfigurationError, "core's own"),
        ("accelerator", "board", Board(), TypeError, "'cls' must be a class (got a Board)"),
        ("accelerator", "board", int, TypeError, "'cls' must be a subclass of torchhal.accelerators.Accelerator"),
        ("cluster_environment", "board", Board, TypeError, "must be a subclass of torchhal.cluster.ClusterEnvironment"),
        ("cluster_environment", "mine", type("Half", (ClusterEnvironment,), {}), TypeError, "abstract"),
    ],
)
def test_what_cannot_be_registered(
    kind: str, alias: Any, cls: Any, error: type[Exception], words: str, fresh: Registry
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        registry.register(kind, alias, cls)
    if kind == "accelerator":
        assert registry.aliases(kind) == ["cpu"]


def test_wrong_defaults(fresh: Registry) -> None:
    with pytest.raises(ValueError, match="'defaults' must be a mapping"):
        registry.register("accelerator", "board", Board, defaults={1: 2})  # type: ignore[dict-item]


@given(st.from_regex(r"\A[a-z][a-z0-9]{0,8}([-_][a-z0-9]{1,8}){0,3}\Z"), st.data())
def test_any_sound_alias_is_found_in_any_case(alias: str, data: st.DataObject) -> None:
    if alias_problem(alias, "accelerator") or alias == "cpu":
        return
    fresh = Registry(distributions=lambda: (), environ={})
    fresh.register("accelerator", alias, Board)
    spelt = "".join(data.draw(st.sampled_from((letter, letter.upper()))) for letter in alias)
    assert fresh.find("accelerator", spelt).load() is Board
    assert fresh.find("accelerator", f"USER/{spelt}").load() is Board
    assert alias in fresh.aliases("accelerator")


def test_refresh_keeps_what_was_registered(fresh: Registry) -> None:
    registry.register("accelerator", "board", Board)
    registry.refresh()
    assert registry.find("accelerator", "board")


def test_isolated_registry_restores_the_one_before() -> None:
    with isolated_registry() as outer:
        outer.register("accelerator", "board", Board)
        with pytest.raises(ZeroDivisionError), isolated_registry() as inner:
            with pytest.raises(UnknownAliasError):
                registry.find("accelerator", "board")
            inner.register("accelerator", "plank", Plank)
            raise ZeroDivisionError
        assert registry.aliases("accelerator") == ["board", "cpu"]
    assert "board" not in registry.aliases("accelerator")


@pytest.mark.filterwarnings("error")
def test_isolated_registry_does_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHHAL_PLUGINS", "no-such-plugin")
    with isolated_registry() as fresh:
        fresh.plugins()  # would warn
    with isolated_registry(environ={"TORCHHAL_PLUGINS": "no-such-plugin"}) as fresh, pytest.warns(UserWarning):
        fresh.plugins()


def test_the_fixture_comes_with_pytest_plugins(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['torchhal.testing']")
    pytester.makepyfile(
        """
        from torchhal import registry
        from torchhal.accelerators import Accelerator

        class Board(Accelerator): ...

        def test_first(isolated_registry):
            registry.register("accelerator", "board", Board)
            assert isolated_registry.find("accelerator", "board")

        def test_second(isolated_registry):
            assert registry.aliases("accelerator") == ["cpu"]
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_context_manager_needs_no_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "torchhal.testing")
    from torchhal.testing import isolated_registry as without_pytest

    with without_pytest() as fresh:
        assert fresh.find("accelerator", "cpu")
