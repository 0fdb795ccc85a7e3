"""Run code beside the model at fixed points of a run, by callbacks of the user or the ready-made ones."""

from torchhal.trainer.callbacks.base import Callback
from torchhal.trainer.callbacks.checkpoint import ModelCheckpoint
from torchhal.trainer.callbacks.early_stopping import EarlyStopping
from torchhal.trainer.callbacks.lr_monitor import LearningRateMonitor
from torchhal.trainer.callbacks.progress import ProgressBar
from torchhal.trainer.callbacks.summary import ModelSummary, summarize

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "summarize",
]
