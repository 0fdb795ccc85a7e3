"""Let ``import lightning``, ``import pytorch_lightning`` and ``import lightning_fabric`` find the stand-in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torchhal_lightning import _trees as trees

_ROOTS = {
    "lightning": trees.STAND_IN,
    "pytorch_lightning": f"{trees.STAND_IN}.pytorch",
    "lightning_fabric": f"{trees.STAND_IN}.fabric",
}
_SHARED = ("accelerators", "loggers", "plugins", "strategies", "utilities")
"""Packages that Lightning has twice, for Fabric and for the Trainer, and the stand-in once."""


def provide() -> None:
    """Let Lightning's names be the stand-in's from here on, in this process.

    Raises:
        ImportError: Lightning itself is imported already.
    """
    for root, target in _ROOTS.items():
        loaded = sys.modules.get(root)
        if loaded is not None and loaded.__name__ != target:
            raise ImportError(f"{root!r} is imported already: install the stand-in before anything imports it")
    if not is_provided():
        sys.meta_path.insert(0, _Finder())


def is_provided() -> bool:
    """Whether the names are the stand-in's in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = _target_of(name)
        return None if found is None else ModuleSpec(name, _Loader(found), is_package=True)


class _Loader(Loader):
    """Puts a module of the stand-in in the place of the one that is imported."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = import_module(self._target)
        vars(found).setdefault("__path__", [])  # else nothing could be imported below it
        sys.modules[module.__name__] = found


def _target_of(name: str) -> str | None:
    """Return the module of the stand-in that has what Lightning's module ``name`` has.

    A package of the stand-in's is what several of Lightning's are, so the nearest above counts.
    """
    root, _, rest = name.partition(".")
    if root not in _ROOTS:
        return None
    parts = [*_ROOTS[root].split("."), *(rest.split(".") if rest else ())]
    if parts[2:3] == ["fabric"] and parts[3:4] and parts[3] in _SHARED:
        parts[2] = "pytorch"
    packages = len(_ROOTS["pytorch_lightning"].split(".")) + 1  # neither lightning.no nor lightning.pytorch.no exists
    for depth in (len(parts), *range(len(parts) - 1, packages - 1, -1)):
        if _exists(parts[:depth]):
            return ".".join(parts[:depth])
    return None


def _exists(parts: Sequence[str]) -> bool:
    try:
        return util.find_spec(".".join(parts)) is not None
    except ModuleNotFoundError:  # what is above is no package
        return False
