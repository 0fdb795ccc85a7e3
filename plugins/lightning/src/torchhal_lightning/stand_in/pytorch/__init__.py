"""The names of ``lightning.pytorch`` and ``pytorch_lightning``."""

from torchhal_lightning.stand_in._version import __version__
from torchhal_lightning.stand_in.pytorch import (
    accelerators,
    callbacks,
    core,
    loggers,
    plugins,
    profilers,
    strategies,
    trainer,
    tuner,
    utilities,
)
from torchhal_lightning.stand_in.pytorch.callbacks import Callback
from torchhal_lightning.stand_in.pytorch.core import LightningDataModule, LightningModule
from torchhal_lightning.stand_in.pytorch.trainer import Trainer
from torchhal_lightning.stand_in.pytorch.utilities import seed_everything

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "accelerators",
    "callbacks",
    "core",
    "loggers",
    "plugins",
    "profilers",
    "seed_everything",
    "strategies",
    "trainer",
    "tuner",
    "utilities",
]
