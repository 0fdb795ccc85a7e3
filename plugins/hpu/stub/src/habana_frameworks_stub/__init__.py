"""What habana-frameworks-stub adds to the vendor's names: that it is a stub, and what it has noted.

Importing this package imports neither torch nor the simulator.
"""

from __future__ import annotations

import os
from importlib import metadata

__version__ = "1.19.0+stub"
"""The release whose public API it follows, and that it is none."""

__simulator__ = True
"""What runs on this device ran on no hardware: tools that report results can ask for this."""

VARIABLE = "HABANA_FRAMEWORKS_STUB"
"""Set to 1 by those who want the simulation. Whoever has it installed by accident must not train on it."""

VENDOR = ("habana-torch-plugin", "habana-torch-dataloader")


def wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


def check() -> None:
    """Raise ImportError unless the simulation is wanted and the vendor's packages are not there."""
    if not wanted():
        raise ImportError(
            f"the habana_frameworks.torch that is installed is habana-frameworks-stub {__version__}, a simulation for "
            f"tests: set {VARIABLE}=1 to use it, or install Intel's own on a machine with Gaudi"
        )
    for distribution in VENDOR:
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        raise ImportError(
            f"habana-frameworks-stub and {distribution} are both installed, and the stub would stand in for the real "
            "one: pip uninstall habana-frameworks-stub, then install the vendor's package again"
        )
