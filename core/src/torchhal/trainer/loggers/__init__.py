"""Loggers: where the metrics of a run are kept."""

from torchhal.trainer.loggers.base import Logger
from torchhal.trainer.loggers.csv import CSVLogger
from torchhal.trainer.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
