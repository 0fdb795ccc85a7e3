"""List the modules and names of torchhal that a plugin may import, the extension API, and find uses of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Final

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "What every plugin needs": (
        "torchhal.plugin",
        "torchhal.capabilities",
        "torchhal.composition",
        "torchhal.errors",
        "torchhal.suggestions",
        "torchhal.lazy_names",
        "torchhal.vendor_package",
    ),
    "The contracts": (
        "torchhal.accelerators",
        "torchhal.precision",
        "torchhal.checkpoint",
        "torchhal.cluster",
        "torchhal.strategies",
        "torchhal.strategies.model_checks",
        "torchhal.strategies.gradient_averaging",
        "torchhal.strategies.sharded_optimizers",
        "torchhal.launchers",
        "torchhal.memory_estimate",
        "torchhal.step_memory",
    ),
    "Tensors and random numbers": ("torchhal.pytree", "torchhal.rng"),
    "Ranks and processes": (
        "torchhal.distributed",
        "torchhal.distributed.collectives",
        "torchhal.distributed.stores",
        "torchhal.distributed.process",
        "torchhal.distributed.failures",
        "torchhal.distributed.signals",
        "torchhal.distributed.rendezvous",
        "torchhal.launchers.serialization",
        "torchhal.launchers.worker",
        "torchhal.launchers.worker_outcome",
    ),
    "The Trainer": (
        "torchhal",
        "torchhal.trainer.adapters",
        "torchhal.trainer.callbacks",
        "torchhal.trainer.loggers",
        "torchhal.trainer.data",
        "torchhal.trainer.logging",
        "torchhal.trainer.loops",
        "torchhal.trainer_cli",
        "torchhal.tuning",
    ),
    "Look-up and tools": ("torchhal.registry", "torchhal.resolve", "torchhal.testing", "torchhal.cli"),
}
"""Heading of the page -> the modules whose ``__all__`` a plugin may import from."""


@cache
def public_names() -> Mapping[str, frozenset[str]]:
    """Return each module of the API with its public names, its public submodules among them."""
    modules = [name for names in MODULES.values() for name in names]
    found = {module: {name for name in import_module(module).__all__ if name[0] != "_"} for module in modules}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        if parent:
            found.setdefault(parent, set()).add(leaf)
    return {module: frozenset(names) for module, names in found.items()}


def foreign_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield what ``source`` uses of torchhal that isn't in the extension API, as ``(line, what)``.

    A use is an import, or an attribute of something imported: of a module one that it doesn't list, of anything else
    one with an underscore. What an object that the code is handed has is not looked at.
    """
    tree = ast.parse(source)
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torchhal":
                    origins[name.asname or "torchhal"] = name.name if name.asname else "torchhal"
                    if name.name not in public_names():
                        yield node.lineno, f"imports {name.name}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] != "torchhal":
                continue
            for name in node.names:
                origins[name.asname or name.name] = f"{module}.{name.name}"
                if name.name != "*" and not _is_public(module, name.name):
                    yield node.lineno, f"imports {module}.{name.name}{_instead(name.name)}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain = _chain(node)
            if chain and (origin := origins.get(chain[0])) and (wrong := _foreign_attribute(origin, chain[1:])):
                yield node.lineno, f"uses {wrong}"


def overridden_private_names(source: str, namespace: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Yield the names with an underscore that a class of ``source`` takes from a class of torchhal's.

    An attribute is found where the class body defines it, as ``(line, what)``: core calls the plugin's by accident, or
    misses its own.

    Args:
        source: of the module.
        namespace: the module's, after its import.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not isinstance(cls := namespace.get(node.name), type):
            continue
        for line, name in _defined(node):
            if name[0] != "_" or _is_dunder(name):
                continue
            for base in cls.__mro__[1:]:
                if base.__module__.partition(".")[0] == "torchhal" and name in vars(base):
                    yield line, f"overrides {base.__module__}.{base.__qualname__}.{name}"
                    break


def _defined(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.lineno, statement.name
        elif isinstance(statement, ast.Assign):
            yield from ((statement.lineno, target.id) for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.lineno, statement.target.id


def _is_public(module: str, name: str) -> bool:
    return name in public_names().get(module, ()) or (_is_dunder(name) and module in public_names())


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _instead(name: str) -> str:
    """Return where else a name is public, for the end of a message."""
    places = [module for module, names in public_names().items() if name in names]
    return f" (public as {places[0]}.{name})" if places else ""


def _chain(node: ast.Attribute) -> list[str]:
    """Return ``["a", "b", "c"]`` for ``a.b.c``; empty where it begins with something else than a name."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(names)] if isinstance(inner, ast.Name) else []


def _foreign_attribute(origin: str, attributes: list[str]) -> str:
    for name in attributes:
        outside = not _is_public(origin, name) if origin in public_names() else name[0] == "_" and not _is_dunder(name)
        origin = f"{origin}.{name}"
        if outside:
            return origin
    return ""
