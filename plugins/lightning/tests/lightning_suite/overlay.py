"""A pytest plugin that runs Lightning's own tests by torchhal's Trainer: those that ask for public behaviour.

Its options are variables of the environment: ``LIGHTNING_SUITE_TRAINER`` is "lightning" or "torchhal",
``LIGHTNING_SUITE_RESULTS`` the file to which each test's outcome is appended as a line of JSON, and
``LIGHTNING_SUITE_ONLY`` a JSON list of the tests to run, empty for all.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from typing import Any

import lightning.pytorch
import pytest

if os.environ["LIGHTNING_SUITE_TRAINER"] == "torchhal":
    import torchhal_lightning

    torchhal_lightning.install()

_MOCKS = {"Mock", "MagicMock", "PropertyMock", "mocker", "create_autospec"}
_HARDWARE = ("cuda_count_", "mps_count_", "xla_available", "mock_")
"""Fixtures that pretend to have a device."""

trainers = 0
"""Trainers that the running test has made."""


def unfair(function: Any, seen: frozenset[Any] = frozenset()) -> str | None:
    """Return why a test, or a function that it calls, asks for more than public behaviour; None where neither does."""
    if any(name.startswith(_HARDWARE) and not name.endswith("_0") for name in inspect.signature(function).parameters):
        return "pretends to have a device"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in _MOCKS or (name in ("patch", "setattr") and _of_a_mock(node)):
                return "mocks"
            if name.startswith("_") and not name.startswith("__") and name != "_" and name not in own:
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    continue  # a class of the test
                return "looks at what is private"
            helper = function.__globals__.get(name)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # of a module of helpers
                module = function.__globals__.get(node.value.id)
                helper = getattr(module, name, None) if inspect.ismodule(module) else helper
            own_helper = (
                inspect.isfunction(helper) and helper.__module__.startswith("tests_pytorch") and helper not in seen
            )
            if own_helper and (why := unfair(helper, seen | {function, helper})):
                return why
        elif isinstance(node, ast.Call) and _patches(node):
            return "mocks"
    return None


def _of_a_mock(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "monkeypatch"


def _patches(call: ast.Call) -> bool:
    """Whether ``call`` is a ``mock.patch`` of anything but the environment's variables."""
    words = ast.unparse(call.func).split(".")
    if "patch" not in words:
        return False
    return not (words[-1] == "dict" and call.args and "environ" in ast.unparse(call.args[0]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with open(os.environ["LIGHTNING_SUITE_ONLY"], encoding="utf-8") as file:
        only = set(json.load(file))
    fair, others = [], []
    for item in items:
        function = getattr(item, "function", None)
        left_out = function is None or unfair(inspect.unwrap(function)) or (only and item.nodeid not in only)
        (others if left_out else fair).append(item)
    items[:] = fair
    config.hook.pytest_deselected(items=others)


def _count(cls: type) -> None:
    init = cls.__init__  # type: ignore[misc]

    def counting(self: Any, *args: Any, **options: Any) -> None:
        global trainers
        trainers += 1
        init(self, *args, **options)

    counting.__wrapped__ = init  # type: ignore[attr-defined]
    counting.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    cls.__init__ = counting  # type: ignore[misc]


_count(lightning.pytorch.Trainer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global trainers
    trainers = 0
    _write({"begun": item.nodeid})  # which is all there is of one that ends the process
    try:
        return (yield)
    finally:
        item.user_properties.append(("trainers", trainers))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {
        "test": report.nodeid,
        "outcome": report.outcome if report.when == "call" or report.skipped else "error",
        "trainers": dict(report.user_properties).get("trainers", 0),
        "seconds": round(report.duration, 2),
        "why": "" if crash is None else f"{os.path.basename(crash.path)}:{crash.lineno}: {crash.message}",
    }
    _write(line)


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["LIGHTNING_SUITE_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
