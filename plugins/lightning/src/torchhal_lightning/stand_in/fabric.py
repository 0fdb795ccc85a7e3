"""The names of ``lightning.fabric``."""

from __future__ import annotations

from torchhal_lightning.stand_in._missing import missing
from torchhal_lightning.stand_in.pytorch import accelerators, loggers, plugins, strategies, utilities
from torchhal_lightning.stand_in.pytorch.utilities import seed_everything

Fabric = missing("Fabric", "Keep the loop with torchhal.Run (docs/how-to/loop-of-your-own.md).")

__all__ = [
    "Fabric",
    "accelerators",
    "loggers",
    "plugins",
    "seed_everything",
    "strategies",
    "utilities",
]
