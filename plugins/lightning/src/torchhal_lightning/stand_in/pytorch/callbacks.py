"""Lightning's callbacks: torchhal's under their names."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.trainer import callbacks
from torchhal_lightning.stand_in._missing import missing


class Callback(torchhal.Callback):
    """Base class of callbacks that were written for Lightning."""


class Checkpoint(Callback):
    """Base class of callbacks that save."""


class ModelCheckpoint(torchhal.ModelCheckpoint, Checkpoint):
    """Saves the best or the newest states; see :class:`torchhal.ModelCheckpoint`."""

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(self, *args: Any, save_on_exception: bool = False, **kwargs: Any) -> None:
        if kwargs.get("save_last") == "link":
            kwargs["save_last"] = True  # a second name of the same file, where the file system has links
        super().__init__(*args, **kwargs)
        if save_on_exception:
            raise ConfigurationError("ModelCheckpoint(save_on_exception=True): use the callback OnExceptionCheckpoint")


class EarlyStopping(torchhal.EarlyStopping, Callback):
    """Ends a run whose metric no longer improves; see :class:`torchhal.EarlyStopping`."""


class LearningRateMonitor(torchhal.LearningRateMonitor, Callback):
    """Logs learning rates; see :class:`torchhal.LearningRateMonitor`."""


class ModelSummary(callbacks.ModelSummary, Callback):
    """Prints the model's parts; see :class:`torchhal.trainer.callbacks.ModelSummary`."""

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)


class RichModelSummary(ModelSummary):
    """The same table."""


class ProgressBar(torchhal.ProgressBar, Callback):
    """Draws a bar; see :class:`torchhal.ProgressBar`."""

    _trainer: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Any:
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no Trainer yet")
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_trainer"}


class TQDMProgressBar(ProgressBar):
    """The bar, with tqdm.

    Args:
        refresh_rate: draw at most every so many batches; 0 draws nothing.
        process_position: taken and not used.
        leave: leave each epoch's bar standing.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)


class RichProgressBarTheme:
    """Colours of a bar of rich, which are taken and not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class RichProgressBar(ProgressBar):
    """The same bar.

    Args:
        refresh_rate: draw at most every so many batches; 0 draws nothing.
        leave: leave each epoch's bar standing.
        theme: taken and not used.
        console_kwargs: the same.
    """

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None, console_kwargs: Any = None
    ) -> None:
        super().__init__(refresh_rate, leave)


class LearningRateFinder(Callback):
    """Looks for a learning rate before a fit; see :meth:`torchhal_lightning.Tuner.lr_find` for the arguments."""

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if mode not in ("exponential", "linear"):
            raise ValueError(f"'mode' must be 'exponential' or 'linear' (got {mode!r})")
        self._min_lr, self._max_lr, self._num_training_steps = min_lr, max_lr, num_training_steps
        self._mode, self._early_stop_threshold = mode, early_stop_threshold
        self._update_attr, self._attr_name = update_attr, attr_name
        self.optimal_lr: Any = None

    def lr_find(self, trainer: Any, module: Any) -> None:
        """Look for it; the Trainer's adapter gives this a body."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.lr_find(trainer, module)


class BatchSizeFinder(Callback):
    """Looks for a batch size; see :meth:`torchhal_lightning.Tuner.scale_batch_size` for the arguments."""

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise ValueError(f"'mode' must be 'power' or 'binsearch' (got {mode!r})")
        self._mode, self._steps_per_trial, self._init_val = mode, steps_per_trial, init_val
        self._max_trials, self._batch_arg_name = max_trials, batch_arg_name
        self._margin, self._max_val = margin, max_val
        self.optimal_batch_size: int | None = init_val

    def setup(self, trainer: Any, module: Any, stage: str | None = None) -> None:
        """Check that there is a batch size; the Trainer's adapter gives this a body."""

    def scale_batch_size(self, trainer: Any, module: Any) -> None:
        """Look for it; the same."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.scale_batch_size(trainer, module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "validate":
            self.scale_batch_size(trainer, module)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self.scale_batch_size(trainer, module)

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self.scale_batch_size(trainer, module)


class LambdaCallback(callbacks.LambdaCallback, Callback):
    """Calls functions; see :class:`torchhal.trainer.callbacks.LambdaCallback`."""


class Interval(str, Enum):
    """When a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"


class Timer(callbacks.Timer, Callback):
    """Measures time and ends training; see :class:`torchhal.trainer.callbacks.Timer`."""

    def __init__(self, duration: Any = None, interval: str = "step", verbose: bool = True) -> None:
        super().__init__(duration, str(getattr(interval, "value", interval)), verbose)


class GradientAccumulationScheduler(callbacks.GradientAccumulationScheduler, Callback):
    """Changes the batches per step; see :class:`torchhal.trainer.callbacks.GradientAccumulationScheduler`."""


class DeviceStatsMonitor(callbacks.DeviceStats, Callback):
    """Logs what devices measure; see :class:`torchhal.trainer.callbacks.DeviceStats`."""


class OnExceptionCheckpoint(callbacks.OnExceptionCheckpoint, Checkpoint):
    """Saves after an exception; see :class:`torchhal.trainer.callbacks.OnExceptionCheckpoint`."""


class BasePredictionWriter(callbacks.PredictionWriter, Callback):
    """Base class of what writes predictions; see :class:`torchhal.trainer.callbacks.PredictionWriter`."""

    def on_predict_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_predict_batch_end(trainer, *args)

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_predict_epoch_end(trainer, module)


class BaseFinetuning(callbacks.BaseFinetuning, Callback):
    """Base class of freezing schedules; see :class:`torchhal.trainer.callbacks.BaseFinetuning`."""


def multiplicative(epoch: int) -> float:
    """Return 2, for ``BackboneFinetuning(lambda_func=multiplicative)``."""
    return 2.0


class BackboneFinetuning(callbacks.BackboneFinetuning, BaseFinetuning):
    """Trains a backbone later; see :class:`torchhal.trainer.callbacks.BackboneFinetuning`."""


class StochasticWeightAveraging(callbacks.StochasticWeightAveraging, Callback):
    """Averages weights towards the end; see :class:`torchhal.trainer.callbacks.StochasticWeightAveraging`."""


class WeightAveraging(callbacks.WeightAveraging, Callback):
    """Averages weights; see :class:`torchhal.trainer.callbacks.WeightAveraging`."""


class EMAWeightAveraging(callbacks.EMAWeightAveraging, WeightAveraging):
    """Averages weights with a decay; see :class:`torchhal.trainer.callbacks.EMAWeightAveraging`."""


ModelPruning = missing("ModelPruning", "torch.nn.utils.prune needs no Trainer: call it in on_train_epoch_end.")
SpikeDetection = missing("SpikeDetection", "Compare the loss in on_train_batch_end(trainer, module, outputs, ...).")
ThroughputMonitor = missing("ThroughputMonitor", "Time batches in on_train_batch_end(trainer, module, outputs, ...).")
