"""Classes of Lightning's names, for scripts that import it where it isn't installed.

:func:`torchhal_lightning.install` lets ``lightning``, ``lightning.pytorch``, ``lightning.fabric`` and
``pytorch_lightning`` be these modules: one tree of classes for all of them.
"""

from torchhal_lightning.stand_in import fabric, pytorch
from torchhal_lightning.stand_in._version import __version__
from torchhal_lightning.stand_in.fabric import Fabric
from torchhal_lightning.stand_in.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "fabric",
    "pytorch",
    "seed_everything",
]
