"""What models, callbacks and libraries read on a Trainer, under the names they know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchhal.errors import ConfigurationError
from torchhal.trainer._settings import TrainerSettings
from torchhal.trainer.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from torchhal.trainer.data._loaders import TrainingData, find_loaders

if TYPE_CHECKING:
    from torchhal.trainer._connectors import DataSources
    from torchhal.trainer.logging._logged_metrics import Results
    from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
    from torchhal.trainer.loops._fit_loop import FitLoop
    from torchhal.trainer.loops._optimization import SchedulerConfig


def _made_with(name: str, value: Any, now: Any) -> ConfigurationError:
    return ConfigurationError(
        f"'{name}' can't become {value!r}: this Trainer was made with {now!r}. Make a new one, "
        f"Trainer({name}={value!r})"
    )


class TrainerProperties(TrainerSettings):
    """Read-only views over strategy, loops and results; nothing here changes a run."""

    strategy: Any
    state: Any
    module: Any
    datamodule: Any
    loggers: list[Any]
    callbacks: list[Any]
    plan: Any
    fit_loop: FitLoop
    evaluation_loop: EvaluationLoop
    results: Results
    attachments: DataSources
    log_dir: str | None
    """The folder of the first logger, the same on every rank; None without a logger, and before a run."""

    def warn_once(self, message: str) -> None:
        raise NotImplementedError

    def reload_train_loader(self, *, first: bool = False) -> TrainingData:
        raise NotImplementedError

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return bool(self.strategy.is_global_zero)

    @property
    def global_rank(self) -> int:
        return int(self.strategy.global_rank)

    @property
    def local_rank(self) -> int:
        return int(self.strategy.local_rank)

    @property
    def node_rank(self) -> int:
        return int(self.strategy.node_rank)

    @property
    def world_size(self) -> int:
        """Processes of the job: outside of a run those that the plan will have, so that a batch size or a learning
        rate computed before ``fit`` is the same in the process that launches and in those that it has launched."""
        return int(self.strategy.world_size) if self.strategy.is_set_up else self.plan.world_size

    @property
    def num_devices(self) -> int:
        return len(self.strategy.devices)

    @property
    def device_ids(self) -> list[int]:
        return list(self.plan.device_indices)

    @property
    def accelerator(self) -> Any:
        return self.strategy.accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        raise _made_with("accelerator", accelerator, self.strategy.accelerator.name)

    @property
    def precision_plugin(self) -> Any:
        return self.strategy.precision

    @property
    def precision(self) -> str:
        return str(self.strategy.precision.alias)

    @precision.setter
    def precision(self, precision: Any) -> None:
        raise _made_with("precision", precision, self.precision)

    # -- counters and state ----------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.fit_loop.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs finished, which is the index of the running one."""
        return self.fit_loop.epoch

    @property
    def sanity_checking(self) -> bool:
        return bool(self.state.stage == "sanity_check")

    @property
    def training(self) -> bool:
        return bool(self.state.stage == "train")

    @property
    def validating(self) -> bool:
        return bool(self.state.stage == "validate")

    @property
    def testing(self) -> bool:
        return bool(self.state.stage == "test")

    @property
    def predicting(self) -> bool:
        return bool(self.state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        return self.state.stage in ("validate", "test", "sanity_check")

    @property
    def is_last_batch(self) -> bool:
        data = self.fit_loop.data
        return data is not None and data.length is not None and self.fit_loop.batch_idx + 1 >= data.length

    # -- model, optimizers -----------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model, wrapped by the strategy while a run lasts."""
        return self.strategy.model if self.strategy.model is not None else self.module

    @property
    def lightning_module(self) -> Any:
        """The user's own module."""
        return self.module

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = self.strategy.optimizers
        return optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        if not optimizers:
            self.warn_once("trainer.optimizers was set to an empty list: nothing is optimized")
        self.strategy.optimizers[:] = optimizers
        if self.fit_loop.optimization is not None:
            self.fit_loop.optimization.wrap_optimizers()

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers as ``self.optimizers()`` gives them to a model."""
        return self.fit_loop.optimization.wrapped if self.fit_loop.optimization is not None else self.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        configs: list[SchedulerConfig] = self.strategy.lr_scheduler_configs
        return configs

    # -- data ------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader; None before it is loaded."""
        return self.fit_loop.data.loader if self.fit_loop.data is not None else None

    @property
    def val_dataloaders(self) -> Any:
        return self._given("validate")

    @property
    def test_dataloaders(self) -> Any:
        return self._given("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._given("predict")

    def _given(self, stage: str) -> Any:
        given = getattr(self.attachments, stage)
        return given if given is not None else find_loaders(stage, None, self.module, self.datamodule)

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch; inf when the loader doesn't know. In ``configure_optimizers`` it loads the data."""
        data = self.fit_loop.data
        if data is None and self.state.fn == "fit" and self.attachments.ready:
            data = self.reload_train_loader(first=True)
        if data is None:
            return 0
        return math.inf if data.length is None else data.length

    @property
    def num_val_batches(self) -> list[int | float]:
        data = self.attachments.evaluation_data if self.state.fn == "validate" else self.attachments.validation_data
        return [math.inf if length is None else length for length in data.lengths]

    @property
    def has_validation(self) -> bool:
        """Whether this fit validates; the same on every rank, even where one of them has no batch of its own."""
        return bool(self.attachments.validation_data)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._num_evaluation_batches()

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self._num_evaluation_batches()

    def _num_evaluation_batches(self) -> list[int | float]:
        return [math.inf if length is None else length for length in self.attachments.evaluation_data.lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit; readable in ``configure_optimizers``, where it loads the training data."""
        data = self.fit_loop.data
        if data is None:
            data = self.reload_train_loader(first=True)
        length = data.whole_length
        if length is None:
            return self.max_steps if self.max_steps != -1 else math.inf
        per_batch = self.strategy.steps_per_batch
        per_epoch = -(-length // self.accumulate_grad_batches) if per_batch is None else length * per_batch
        if self.max_epochs in (None, -1):
            return self.max_steps if self.max_steps != -1 else math.inf
        total = per_epoch * (self.max_epochs or 0)
        return total if self.max_steps == -1 else min(total, self.max_steps)

    # -- metrics, loggers, callbacks -------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Every value logged, by name, up to date whenever it is read."""
        return self.results.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return self.results.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return self.results.progress_bar_metrics

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger in (None, False) else [logger]

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)
