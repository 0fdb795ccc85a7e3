"""Run code beside the model at fixed points of a run, by callbacks of the user or the ready-made ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names
from torchhal.trainer.callbacks.base import Callback
from torchhal.trainer.callbacks.checkpoint import ModelCheckpoint
from torchhal.trainer.callbacks.early_stopping import EarlyStopping
from torchhal.trainer.callbacks.lr_monitor import LearningRateMonitor
from torchhal.trainer.callbacks.progress import ProgressBar
from torchhal.trainer.callbacks.summary import ModelSummary, summarize

if TYPE_CHECKING:
    from torchhal.trainer.callbacks.accumulation_scheduler import GradientAccumulationScheduler
    from torchhal.trainer.callbacks.device_stats import DeviceStats
    from torchhal.trainer.callbacks.exception_checkpoint import OnExceptionCheckpoint
    from torchhal.trainer.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from torchhal.trainer.callbacks.lambda_callback import LambdaCallback
    from torchhal.trainer.callbacks.prediction_writer import PredictionWriter
    from torchhal.trainer.callbacks.rich_progress import RichProgress
    from torchhal.trainer.callbacks.rich_summary import RichSummary
    from torchhal.trainer.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from torchhal.trainer.callbacks.timer import Timer
    from torchhal.trainer.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "DeviceStats",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RichProgress",
    "RichSummary",
    "StochasticWeightAveraging",
    "Timer",
    "WeightAveraging",
    "summarize",
]

# Those that the Trainer itself never makes.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BackboneFinetuning": "finetuning",
        "BaseFinetuning": "finetuning",
        "DeviceStats": "device_stats",
        "EMAWeightAveraging": "weight_averaging",
        "GradientAccumulationScheduler": "accumulation_scheduler",
        "LambdaCallback": "lambda_callback",
        "OnExceptionCheckpoint": "exception_checkpoint",
        "PredictionWriter": "prediction_writer",
        "RichProgress": "rich_progress",
        "RichSummary": "rich_summary",
        "StochasticWeightAveraging": "stochastic_weight_averaging",
        "Timer": "timer",
        "WeightAveraging": "weight_averaging",
    },
)
