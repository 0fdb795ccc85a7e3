"""Check components against their contracts: rules with public ids, run by pytest or by ``torchhal conformance``.

In a plugin's tests::

    from torchhal_conformance import conformance_suite

    TestMine = conformance_suite("accelerator", "mine", features={"memory_stats"})

or from a shell: ``torchhal conformance run accelerator mine --report report.json``. The names are imported on first
use: the manifest lies in this package, and a listing of plugins imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_conformance._check import CHECKS, Check, CheckFailed, checks_for
    from torchhal_conformance._component_under_test import ComponentUnderTest
    from torchhal_conformance._session import Result, Session
    from torchhal_conformance._suite import conformance_suite

__version__ = "0.2.0"

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "ComponentUnderTest",
    "Result",
    "Session",
    "checks_for",
    "conformance_suite",
]

_HOMES = {
    "CHECKS": "_check",
    "Check": "_check",
    "CheckFailed": "_check",
    "Result": "_session",
    "Session": "_session",
    "ComponentUnderTest": "_component_under_test",
    "checks_for": "_check",
    "conformance_suite": "_suite",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.checks")  # which registers them
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
