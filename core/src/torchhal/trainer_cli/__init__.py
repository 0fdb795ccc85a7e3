"""Command lines and configuration files for the user's own Module and DataModule classes, by jsonargparse.

The ``torchhal`` command is another one: :mod:`torchhal.cli`.
"""

from torchhal.lazy_names import lazy_names
from torchhal.trainer_cli._cli import SUBCOMMANDS, TrainerCLI
from torchhal.trainer_cli._config_file import SaveConfig
from torchhal.trainer_cli._optimizers import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    with_schedule,
)

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torchhal.trainer_cli._parser import TrainerParser as TrainerParser
else:  # it needs jsonargparse
    __getattr__, __dir__ = lazy_names(__name__, {"TrainerParser": "_parser"})
