"""Simulate an accelerator: a separate torch device with its own memory, for tests without hardware.

``load()`` compiles it on first use and registers ``torch.device("sim")``. The process group backend is called
``"sim"`` too. ``counting()`` counts operators, copies and synchronisations; ``simulate()`` sets the number of
devices, the memory limit, and faults. The README says what it is softer about than hardware.

Importing this package imports neither torch nor a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_simulator._build_errors import BuildError
    from torchhal_simulator._capabilities import restrict
    from torchhal_simulator._config import simulate
    from torchhal_simulator._counters import Counters, counters, counting
    from torchhal_simulator._library import load

__version__ = "0.2.0"

__simulator__ = True
"""What runs on this device ran on no hardware: tools that report results can ask for this."""

__all__ = ["BuildError", "Counters", "counters", "counting", "load", "restrict", "simulate"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BuildError": "_build_errors",
        "Counters": "_counters",
        "counters": "_counters",
        "counting": "_counters",
        "load": "_library",
        "restrict": "_capabilities",
        "simulate": "_config",
    },
)
