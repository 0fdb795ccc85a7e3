"""Command lines and configuration files for the user's own Module and DataModule classes, by jsonargparse.

The ``torchhal`` command is another one: :mod:`torchhal.cli`.
"""

from torchhal.trainer_cli._cli import SUBCOMMANDS, TrainerCLI
from torchhal.trainer_cli._config_file import SaveConfig
from torchhal.trainer_cli._optimizers import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    with_schedule,
)
from torchhal.trainer_cli._parser import TrainerParser

__all__ = [
    "SUBCOMMANDS",
    "LRSchedulerCallable",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfig",
    "TrainerCLI",
    "TrainerParser",
    "with_schedule",
]
