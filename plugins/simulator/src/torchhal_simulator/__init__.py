"""A simulated accelerator: a separate torch device with its own memory, for tests without hardware.

``load()`` compiles it on first use and registers ``torch.device("sim")``. The process group backend is called
``"sim"`` too. ``counting()`` counts operators, copies and synchronisations; ``simulate()`` sets the number of
devices, the memory limit, and faults. The README says what it is softer about than hardware.

Importing this package imports neither torch nor a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal_simulator._build import BuildError
    from torchhal_simulator._capabilities import restrict
    from torchhal_simulator._config import simulate
    from torchhal_simulator._counters import Counters, counters, counting
    from torchhal_simulator._library import load

__version__ = "0.1.0"

__simulator__ = True
"""What runs on this device ran on no hardware: tools that report results can ask for this."""

_HOMES = {
    "BuildError": "_build",
    "Counters": "_counters",
    "counters": "_counters",
    "counting": "_counters",
    "load": "_library",
    "restrict": "_capabilities",
    "simulate": "_config",
}

__all__ = ["BuildError", "Counters", "counters", "counting", "load", "restrict", "simulate"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
