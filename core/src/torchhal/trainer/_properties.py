"""Expose a run under the attribute names that models, callbacks and libraries expect of a Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchhal.errors import ConfigurationError
from torchhal.resolve import Plan
from torchhal.strategies import Strategy
from torchhal.suggestions import nearest
from torchhal.trainer._configure_optimizers import SchedulerConfig
from torchhal.trainer._forwarded import Forwarded
from torchhal.trainer._hooks import Hooks
from torchhal.trainer._run_data import load_training_data
from torchhal.trainer._settings import RunSettings, Setting
from torchhal.trainer._state import TrainerState
from torchhal.trainer.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, ProgressBar
from torchhal.trainer.data._loaders import find_loaders
from torchhal.trainer.logging._logged_metrics import Results
from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
from torchhal.trainer.loops._fit_loop import FitLoop
from torchhal.trainer.profilers import Profiler
from torchhal.trainer.run_state import RunState


def _made_with(name: str, value: Any, now: Any) -> ConfigurationError:
    return ConfigurationError(
        f"'{name}' can't become {value!r}: this Trainer was made with {now!r}. Make a new one, "
        f"Trainer({name}={value!r})"
    )


_DECIDED = frozenset({"strategy", "num_nodes"})
"""Attributes that the constructor sets once."""
_ARGUMENTS_ONLY = frozenset({"devices", "plugins", "enable_progress_bar", "enable_model_summary"})
"""Its arguments that are no attributes; a class of the user's own may have attributes of these names."""


def _check_attribute(trainer: Any, name: str) -> None:
    """Raise ConfigurationError for what is set once; warn of an argument that is no attribute, or nearly a setting."""
    owner = type(trainer).__name__
    if name in _DECIDED:
        raise ConfigurationError(f"{name!r} of a {owner} is decided when it is made: pass it to a new one")
    settings = [key for key, value in vars(RunSettings).items() if isinstance(value, Setting)]
    if name in _ARGUMENTS_ONLY:
        advice = "it is decided when the Trainer is made: pass it to a new one"
    elif near := nearest(name, settings, cutoff=0.87):
        advice = f"did you mean {near!r}?"
    else:
        return
    trainer._run.warn_once(f"{owner} has no setting {name!r}, and nothing reads this attribute; {advice}")


class TrainerProperties:
    """Views of a Trainer over its run, and the settings, which callbacks and scripts may set again.

    While a run is on, from the end of its ``setup`` hooks, a new value of a setting is taken with the next batch, or
    refused by a ConfigurationError where it would come too late. Every rank must set the same. An argument that no
    Trainer has as an attribute, or a name that is nearly a setting, is set with a warning; what the constructor has
    decided is refused.
    """

    _run: RunState
    fit_loop: FitLoop
    evaluation_loop: EvaluationLoop

    def __setattr__(self, name: str, value: Any) -> None:
        if self._run.settled:
            is_known = name in vars(self) or hasattr(type(self), name)
            if name in _DECIDED or not is_known:
                _check_attribute(self, name)
        object.__setattr__(self, name, value)

    # -- settings --------------------------------------------------------------------------------------------

    fast_dev_run = Forwarded[int]("_run")
    max_epochs = Forwarded[int | None]("_run")
    min_epochs = Forwarded[int | None]("_run")
    max_steps = Forwarded[int]("_run")
    min_steps = Forwarded[int | None]("_run")
    max_time = Forwarded[timedelta | None]("_run")
    limit_train_batches = Forwarded[int | float]("_run")
    limit_val_batches = Forwarded[int | float]("_run")
    limit_test_batches = Forwarded[int | float]("_run")
    limit_predict_batches = Forwarded[int | float]("_run")
    overfit_batches = Forwarded[int | float]("_run")
    val_check_interval = Forwarded[int | float | timedelta]("_run")
    check_val_every_n_epoch = Forwarded[int | None]("_run")
    num_sanity_val_steps = Forwarded[int]("_run")
    accumulate_grad_batches = Forwarded[int]("_run")
    gradient_clip_val = Forwarded[float | None]("_run")
    gradient_clip_algorithm = Forwarded[str]("_run")
    log_every_n_steps = Forwarded[int]("_run")
    reload_dataloaders_every_n_epochs = Forwarded[int]("_run")
    use_distributed_sampler = Forwarded[bool]("_run")
    sync_batchnorm = Forwarded[bool]("_run")
    inference_mode = Forwarded[bool]("_run")
    detect_anomaly = Forwarded[bool]("_run")
    deterministic = Forwarded[bool | str]("_run")
    benchmark = Forwarded[bool | None]("_run")
    default_root_dir = Forwarded[str]("_run")
    profiler = Forwarded[Profiler]("_run")

    # -- the run ---------------------------------------------------------------------------------------------

    enable_checkpointing = Forwarded[bool | None]("_run")
    plan = Forwarded[Plan]("_run")
    strategy = Forwarded[Strategy]("_run")
    num_nodes = Forwarded[int | None]("_run")
    state = Forwarded[TrainerState]("_run")
    module = Forwarded[Any]("_run")
    datamodule = Forwarded[Any]("_run")
    results = Forwarded[Results]("_run")
    hooks = Forwarded[Hooks]("_run")
    loggers = Forwarded[list[Any]]("_run")
    callbacks = Forwarded[list[Any]]("_run")
    should_stop = Forwarded[bool]("_run")
    current_hook = Forwarded[str | None]("_run")
    ckpt_path = Forwarded[str | None]("_run")
    log_dir = Forwarded[str | None]("_run")
    run_id = Forwarded[str]("_run")

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self._run.is_global_zero

    @property
    def global_rank(self) -> int:
        """The number of this process in the job, from 0."""
        return int(self.strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """The number of this process on its node, from 0."""
        return int(self.strategy.local_rank)

    @property
    def node_rank(self) -> int:
        """The number of this node, from 0."""
        return int(self.strategy.node_rank)

    @property
    def world_size(self) -> int:
        """Processes of the job; outside of a run those that the plan will have."""
        return self._run.world_size

    @property
    def num_devices(self) -> int:
        """Devices of this node that the job uses."""
        return len(self.strategy.devices)

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices that the job uses."""
        return list(self.plan.device_indices)

    @property
    def accelerator(self) -> Any:
        """The accelerator in use; the constructor chose it."""
        return self.strategy.accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        raise _made_with("accelerator", accelerator, self.strategy.accelerator.name)

    @property
    def precision_plugin(self) -> Any:
        """The precision in use, an object."""
        return self.strategy.precision

    @property
    def precision(self) -> str:
        """The alias of the precision in use."""
        return str(self.strategy.precision.alias)

    @precision.setter
    def precision(self, precision: Any) -> None:
        raise _made_with("precision", precision, self.precision)

    # -- counters and state ----------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._run.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs finished, which is the index of the running one."""
        return self._run.current_epoch

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before training runs."""
        return bool(self.state.stage == "sanity_check")

    @property
    def training(self) -> bool:
        """Whether training runs."""
        return bool(self.state.stage == "train")

    @property
    def validating(self) -> bool:
        """Whether a validation runs, within a fit or alone."""
        return bool(self.state.stage == "validate")

    @property
    def testing(self) -> bool:
        """Whether a test runs."""
        return bool(self.state.stage == "test")

    @property
    def predicting(self) -> bool:
        """Whether a prediction runs."""
        return bool(self.state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        """Whether a validation, a test or the check before training runs."""
        return self.state.stage in ("validate", "test", "sanity_check")

    @property
    def is_last_batch(self) -> bool:
        """Whether the running batch is the epoch's last; False where the loader has no length."""
        data = self._run.progress.data
        return data is not None and data.length is not None and self._run.progress.batch_idx + 1 >= data.length

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
        """The optimizers of the running fit."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        if not optimizers:
            self._run.warn_once("trainer.optimizers was set to an empty list: nothing is optimized")
        self.strategy.optimizers[:] = optimizers
        if self.fit_loop.optimization is not None:
            self.fit_loop.optimization.wrap_optimizers()

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers as ``self.optimizers()`` gives them to a model."""
        return self.fit_loop.optimization.wrapped if self.fit_loop.optimization is not None else self.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of the running fit, each with when it steps."""
        return self.strategy.lr_scheduler_configs

    # -- data ------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader; None before it is loaded."""
        data = self._run.progress.data
        return None if data is None else data.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader or loaders of this call."""
        return self._given("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader or loaders of this call."""
        return self._given("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader or loaders to predict."""
        return self._given("predict")

    def _given(self, stage: str) -> Any:
        return find_loaders(self._run, stage, getattr(self._run.sources, stage))

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch; inf when the loader has no length. In ``configure_optimizers`` it loads the data."""
        data = self._run.progress.data
        if data is None and self.state.fn == "fit" and self._run.sources.ready:
            data = load_training_data(self._run)
        if data is None:
            return 0
        return math.inf if data.length is None else data.length

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader; inf for one without a length."""
        data = self._run.sources.evaluation_data if self.state.fn == "validate" else self._run.sources.validation_data
        return [math.inf if length is None else length for length in data.lengths]

    @property
    def has_validation(self) -> bool:
        """Whether this fit validates; the same on every rank, even if one of them has no batch."""
        return bool(self._run.sources.validation_data)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each loader in the validation before training."""
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader; inf for one without a length."""
        return self._num_evaluation_batches()

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict; inf for one without a length."""
        return self._num_evaluation_batches()

    def _num_evaluation_batches(self) -> list[int | float]:
        return [math.inf if length is None else length for length in self._run.sources.evaluation_data.lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit; readable in ``configure_optimizers``, where it loads the training data."""
        data = self._run.progress.data
        if data is None:
            data = load_training_data(self._run)
        length = data.whole_length
        if length is None:
            return self.max_steps if self.max_steps != -1 else math.inf
        if self.max_epochs is None or self.max_epochs == -1:
            return self.max_steps if self.max_steps != -1 else math.inf
        per_batch, schedule = self.strategy.steps_per_batch, self._accumulation_schedule()
        if per_batch is not None:
            total = length * per_batch * self.max_epochs
        elif schedule is None:
            total = -(-length // self.accumulate_grad_batches) * self.max_epochs
        else:
            total = sum(-(-length // schedule(epoch)) for epoch in range(self.max_epochs))
        return total if self.max_steps == -1 else min(total, self.max_steps)

    def _accumulation_schedule(self) -> Callable[[int], int] | None:
        """Return the batches per optimizer step by epoch, where a callback sets them."""
        schedules = (each for each in self.callbacks if isinstance(each, GradientAccumulationScheduler))
        schedule = next(schedules, None)
        return None if schedule is None else schedule.get_accumulate_grad_batches

    # -- metrics, loggers, callbacks -------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Every value logged, by name, up to date whenever it is read."""
        return self.results.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The values that went to the loggers last, by name."""
        return self.results.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress bar shows, by name."""
        return self.results.progress_bar_metrics

    @property
    def logger(self) -> Any:
        """The first logger; None without one."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger in (None, False) else [logger]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints, those of other frameworks included."""
        return self._of_kind(ModelCheckpoint, "checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints; None without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that end the fit by a metric, those of other frameworks included."""
        return self._of_kind(EarlyStopping, "early_stopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that ends the fit by a metric; None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The callback that shows progress; None without one."""
        return next(iter(self._of_kind(ProgressBar, "progress_bar")), None)

    def _of_kind(self, own: type, kind: str) -> list[Any]:
        adapters = self._run.adapters
        return [each for each in self.callbacks if isinstance(each, own) or adapters.kind_of_callback(each) == kind]
