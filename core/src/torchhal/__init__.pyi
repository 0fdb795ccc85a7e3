"""The public names, for type checkers and completion: ``__init__.py`` imports each when it is first used."""

from torchhal.module import DataModule as DataModule
from torchhal.module import Module as Module
from torchhal.plugin import Availability as Availability
from torchhal.plugin import Component as Component
from torchhal.plugin import hookimpl as hookimpl
from torchhal.registry import plugins as plugins
from torchhal.registry import register as register
from torchhal.rng import seed_everything as seed_everything
from torchhal.run import Run as Run
from torchhal.trainer import Trainer as Trainer
from torchhal.trainer.callbacks import BackboneFinetuning as BackboneFinetuning
from torchhal.trainer.callbacks import BaseFinetuning as BaseFinetuning
from torchhal.trainer.callbacks import Callback as Callback
from torchhal.trainer.callbacks import DeviceStats as DeviceStats
from torchhal.trainer.callbacks import EarlyStopping as EarlyStopping
from torchhal.trainer.callbacks import EMAWeightAveraging as EMAWeightAveraging
from torchhal.trainer.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
from torchhal.trainer.callbacks import LambdaCallback as LambdaCallback
from torchhal.trainer.callbacks import LearningRateMonitor as LearningRateMonitor
from torchhal.trainer.callbacks import ModelCheckpoint as ModelCheckpoint
from torchhal.trainer.callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
from torchhal.trainer.callbacks import PredictionWriter as PredictionWriter
from torchhal.trainer.callbacks import ProgressBar as ProgressBar
from torchhal.trainer.callbacks import RichProgress as RichProgress
from torchhal.trainer.callbacks import RichSummary as RichSummary
from torchhal.trainer.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
from torchhal.trainer.callbacks import Timer as Timer
from torchhal.trainer.callbacks import WeightAveraging as WeightAveraging
from torchhal.trainer_cli import TrainerCLI as TrainerCLI

__version__: str
