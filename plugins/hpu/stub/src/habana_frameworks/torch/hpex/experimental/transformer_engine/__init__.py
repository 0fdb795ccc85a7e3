"""The names of ``intel_transformer_engine``, a package of its own. The stub has none: without it this import fails."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_engine = import_module("intel_transformer_engine")
for _name, _value in vars(_engine).items():
    if isinstance(_value, ModuleType):
        sys.modules[f"{__name__}.{_name}"] = _value


def __getattr__(name: str) -> Any:
    return getattr(_engine, name)
