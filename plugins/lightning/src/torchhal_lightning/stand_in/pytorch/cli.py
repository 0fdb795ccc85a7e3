"""LightningCLI, where jsonargparse is installed."""

from importlib import util
from typing import TYPE_CHECKING, Any

from torchhal_lightning.stand_in._missing import missing

if TYPE_CHECKING or util.find_spec("jsonargparse"):
    from torchhal.trainer_cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
    from torchhal_lightning.stand_in.pytorch._command_line import (
        ArgsType,
        LightningArgumentParser,
        LightningCLI,
        SaveConfigCallback,
        instantiate_class,
    )
else:
    _INSTEAD = "It needs jsonargparse: pip install 'jsonargparse[signatures]'."
    LightningCLI = missing("LightningCLI", _INSTEAD)
    LightningArgumentParser = missing("LightningArgumentParser", _INSTEAD)
    SaveConfigCallback = missing("SaveConfigCallback", _INSTEAD)
    ReduceLROnPlateau = missing("ReduceLROnPlateau", _INSTEAD)
    instantiate_class = missing("instantiate_class", _INSTEAD)
    ArgsType = LRSchedulerCallable = OptimizerCallable = Any

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
]
