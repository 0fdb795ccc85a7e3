"""Find the class trees of Lightning that are imported: ``lightning.pytorch`` and ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, util
from types import ModuleType
from typing import Any

ROOTS = ("lightning.pytorch", "pytorch_lightning")
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def has(cls: type) -> bool:
    """Whether a class is Lightning's own."""
    return cls.__module__.partition(".")[0] in PACKAGES


def imported() -> Iterator[ModuleType]:
    """Yield the trees that the program has imported; the two have different classes of the same names."""
    for root in ROOTS:
        if root in sys.modules:
            yield import_module(root)


def first(root: str | None = None) -> ModuleType:
    """Return the tree ``root``; without it the first that is imported, or can be.

    Raises:
        ModuleNotFoundError: Lightning isn't installed.
    """
    if root is not None:
        return import_module(root)
    for tree in imported():
        return tree
    for each in ROOTS:
        if util.find_spec(each.partition(".")[0]):
            return import_module(each)
    raise ModuleNotFoundError("Lightning is not installed: pip install lightning")


def dummy_logger(root: str | None) -> Any:
    """Return a logger of the tree ``root`` that takes everything and writes nothing."""
    return first(root).loggers.logger.DummyLogger()


def root_of(owner: Any) -> str | None:
    """Return the tree that the class of ``owner`` comes from, or None."""
    for cls in type(owner).__mro__:
        for root in ROOTS:
            if cls.__module__ == root or cls.__module__.startswith(f"{root}."):
                return root
    return None


def classes(name: str) -> tuple[type, ...]:
    """Return the classes of that name in the trees that are imported, such as ``callbacks.ModelCheckpoint``."""
    found = []
    for tree in imported():
        value: Any = tree
        for part in name.split("."):
            value = getattr(value, part)
        found.append(value)
    return tuple(found)
