"""Find the class trees of Lightning that are imported: ``lightning.pytorch``, ``pytorch_lightning``, the stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, util
from types import ModuleType
from typing import Any

STAND_IN = "torchhal_lightning.stand_in"
ROOTS = ("lightning.pytorch", "pytorch_lightning", f"{STAND_IN}.pytorch")
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def has(cls: type) -> bool:
    """Whether a class is Lightning's own, or the stand-in's."""
    return cls.__module__.partition(".")[0] in PACKAGES or cls.__module__.startswith(f"{STAND_IN}.")


def imported() -> Iterator[ModuleType]:
    """Yield the trees that the program has imported; they have different classes of the same names."""
    found = [sys.modules[root] for root in ROOTS if root in sys.modules]
    yield from dict.fromkeys(found)  # the stand-in may have the names of the others


def first(root: str | None = None) -> ModuleType:
    """Return the tree ``root``; without it the first that is imported, or can be.

    Raises:
        ModuleNotFoundError: Lightning isn't installed, and nobody has asked for the stand-in.
    """
    if root is not None:
        return import_module(root)
    for tree in imported():
        return tree
    for each in ROOTS:
        if each.partition(".")[0] in PACKAGES and util.find_spec(each.partition(".")[0]):
            return import_module(each)
    raise ModuleNotFoundError(
        "Lightning is not installed: pip install lightning, or call torchhal_lightning.install() first, which provides "
        "a stand-in for it"
    )


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
