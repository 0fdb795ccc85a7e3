from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchhal.plugin import HOOKS, KINDS, Availability, Component, Hookspecs, alias_problem
from torchhal.registry import _builtin as builtin
from torchhal.registry._discovery import collect_components

TEXT = st.text("abz019-_ A/.é", max_size=70)


def well_formed(alias: str, kind: str) -> bool:
    """The rule for aliases, told another way than by one regular expression."""
    words = re.split("[-_]", alias)
    return (
        alias != "auto"
        and 1 <= len(alias) <= 64
        and all(word and set(word) <= set("abcdefghijklmnopqrstuvwxyz0123456789") for word in words)
        and (kind == "precision" or not alias[0].isdigit())
    )


@given(TEXT, st.sampled_from(KINDS))
def test_alias_rule(alias: str, kind: str) -> None:
    assert (alias_problem(alias, kind) is None) == well_formed(alias, kind)


@pytest.mark.parametrize(
    "alias", ["", "auto", "a/b", "a--b", "a-_b", "-a", "a-", "1a", "A", "ä", "a b", "a\n", "x" * 65]
)
def test_alias_refused(alias: str) -> None:
    assert alias_problem(alias, "strategy")


@pytest.mark.parametrize("alias", ["a", "x" * 64, "single_device", "bf16-true", "a1-b2_c3"])
def test_alias_accepted(alias: str) -> None:
    assert alias_problem(alias, "strategy") is None


def test_only_a_precision_may_start_with_a_digit() -> None:
    assert alias_problem("16-mixed", "precision") is None
    assert alias_problem("16-mixed", "strategy")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alias": 3}, "must be a str"),
        ({"alias": "Upper"}, "lower-case"),
        ({"target": "package.module"}, "package.module:Class"),
        ({"target": "package.module:"}, "package.module:Class"),
        ({"target": None}, "package.module:Class"),
        ({"summary": None}, "'summary'"),
        ({"defaults": [("a", 1)]}, "'defaults'"),
        ({"defaults": {1: 2}}, "'defaults'"),
        ({"requires": "vendor"}, "'requires' must be a tuple"),
        ({"requires": ["vendor"]}, "'requires' must be a tuple"),
        ({"requires": ("vendor.sub",)}, "top-level"),
        ({"aliases": "other"}, "'aliases' must be a tuple"),
        ({"aliases": ("auto",)}, "'auto' is reserved"),
    ],
)
def test_component_problem(change: dict[str, Any], reason: str) -> None:
    sound = Component("mine", "package.module:Class.Inner", "text", {"a": 1}, ("vendor",), ("other",))
    assert sound.problem("strategy") is None
    problem = dataclasses.replace(sound, **change).problem("strategy")
    assert problem is not None and reason in problem


def test_availability_has_a_reason() -> None:
    assert Availability(True) and not Availability(False, "no device")
    for reason in ("", "  "):
        with pytest.raises(ValueError, match="'reason' must say why"):
            Availability(False, reason)
    with pytest.raises(TypeError, match="'ok' must be a bool"):
        Availability(1)  # type: ignore[arg-type]


def test_one_hook_for_each_kind() -> None:
    specs = {name for name in vars(Hookspecs) if name.startswith("torchhal_")}
    assert specs == set(HOOKS.values())
    assert set(HOOKS) == {*KINDS, "default_logger", "default_callback", "command", "model_adapter"}


def test_builtin_components_are_valid() -> None:
    """The core contributes valid components of every kind through the hooks, but adapts no other framework."""
    pairs = collect_components(builtin)
    assert {kind for kind, _ in pairs} == set(HOOKS) - {"model_adapter", "default_logger", "default_callback"}
    assert [component.problem(kind) for kind, component in pairs] == [None] * len(pairs)
    names = [(kind, name) for kind, component in pairs for name in (component.alias, *component.aliases)]
    assert len(names) == len(set(names))
