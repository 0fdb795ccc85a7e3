"""Import objects by module and name in any process, also those of test modules that only pytest can import."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torchhal.errors import ConfigurationError


@dataclass(frozen=True)
class Factory:
    """Function at the top level of a module, which each process imports anew."""

    module: str
    name: str
    file: str | None = None

    def __call__(self) -> Any:
        """Return what the function returns."""
        return import_object(self.module, self.name, self.file)()

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def import_object(module: str, name: str, file: str | None) -> Any:
    """Return ``name`` of ``module``, which is imported by its name or, where that leads elsewhere, from ``file``.

    pytest imports a test module under a name of its own, which nobody else can import.
    """
    found: Any = _import(module, file)
    for part in name.split("."):
        if part == "<locals>":
            raise ConfigurationError(
                f"{module}.{name} must stand at the top level of its module: other processes have to import it"
            )
        found = getattr(found, part)
    return found


def _import(name: str, file: str | None) -> ModuleType:
    try:
        module = importlib.import_module(name)
        if file is None or os.path.realpath(getattr(module, "__file__", None) or "") == os.path.realpath(file):
            return module
    except ImportError:
        if file is None:
            raise
    assert file is not None
    unique = "torchhal_conformance_" + re.sub(r"\W", "_", file)
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, file)
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"{file!r} can't be imported in another process")
        sys.modules[unique] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[unique])
    return sys.modules[unique]
