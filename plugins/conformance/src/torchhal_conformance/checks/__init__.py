"""The checks themselves, one module per family of ids: importing them fills ``torchhal_conformance._check.CHECKS``."""

from importlib import import_module
from typing import Final

FAMILIES: Final = (
    "generic",
    "accelerator",
    "precision",
    "checkpoint_io",
    "cluster_environment",
    "strategy",
    "training",
    "trainer",
    "processes",
    "cluster_launch",
)

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
