"""Record the metrics of a run, with the loggers for CSV files and TensorBoard or those of the user."""

from torchhal.trainer.loggers.base import FolderLogger, Logger, NullExperiment, as_dict, is_rank_zero
from torchhal.trainer.loggers.csv import CSVLogger
from torchhal.trainer.loggers.images import as_pixels
from torchhal.trainer.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "FolderLogger",
    "Logger",
    "NullExperiment",
    "TensorBoardLogger",
    "as_dict",
    "as_pixels",
    "is_rank_zero",
]
