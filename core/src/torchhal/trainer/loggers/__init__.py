"""Record the metrics of a run, with the loggers for CSV files and TensorBoard or those of the user."""

from torchhal.trainer.loggers.base import Logger
from torchhal.trainer.loggers.csv import CSVLogger
from torchhal.trainer.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
