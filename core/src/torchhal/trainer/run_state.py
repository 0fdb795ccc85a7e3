"""Hold the state of one run: its strategy, model, data, hooks, results, settings and counters."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from torchhal.resolve import Plan
from torchhal.strategies import Strategy
from torchhal.trainer._auto_strategy import AutoStrategy
from torchhal.trainer._frozen_parameters import FrozenParameters
from torchhal.trainer._hooks import Hooks
from torchhal.trainer._phases import Phases
from torchhal.trainer._progress import FitProgress
from torchhal.trainer._run_adapters import Adapters
from torchhal.trainer._run_output import RunOutput
from torchhal.trainer._settings import RunSettings
from torchhal.trainer._state import TrainerState
from torchhal.trainer.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from torchhal.trainer.callbacks._checkpoint_records import new_run_id
from torchhal.trainer.data._sources import DataSources
from torchhal.trainer.logging._logged_metrics import Results

__all__ = ["RunState"]


class RunState(RunSettings, RunOutput):
    """State of the calls of one Trainer in one process: what is set up, what is running, and its progress.

    The Trainer makes it; the loops, the data, logging and checkpointing work on it. Only callbacks, the user's module
    and loggers receive the Trainer itself, as :attr:`trainer`. The settings of :class:`RunSettings` (``max_epochs``,
    ``accumulate_grad_batches``, ...) are attributes as well.

    Its settings come first; :meth:`compose` then takes the components that the arguments were resolved to.

    Attributes:
        plan: the resolved components and devices.
        strategy: the strategy built from the plan.
        module: the user's module; the strategy's wrapper of it is ``strategy.model``.
        datamodule: the data module of the current call, or None.
        sources: the loaders given to the current call, and the evaluation data made of them.
        progress: the counters of the fit.
        results: everything logged.
        hooks: the hooks that callbacks and module override.
        phases: the phases of the loops whose hooks the strategy is still to end.
        callbacks, loggers: in the order of their calls.
        state: the function, stage and status of the current call.
        enable_checkpointing: False if the user has disabled ModelCheckpoint.
        should_stop: whether the end of the fit was requested; ranks agree on it between two steps.
        adapters: those of the objects that were written for another framework.
        ckpt_path: the checkpoint that the current call has loaded, or None.
        log_dir: the folder of the first logger, the same on every rank; None without a logger, and before a run.
        num_nodes: machines that take part; None where the launcher decides.
        trainer_id: identifies the Trainer and its copies in workers, independent of the run.
        run_id: identifies this run and those that continue it in its folder; rank 0's counts.
        trained_elsewhere: whether the last fit ran in workers that have ended, together with their optimizers.
        trained_by: the optimizers and schedulers as checkpoints name them; None before they exist.
        frozen_parameters: the parameters that are frozen, for checkpoints.
        keeps_record: whether rank 0 records the present call in its folder; the same on every rank.
        seconds: of the phases of the present fit but training, by name.
        peak_memory: of every rank, at the end of the fit; empty before.
        end_reason: why the latest fit that was completed has ended.
        profiling: what measures the present fit; None without a profiler.
        unused: the plan with copies of the strategy and the precision from before the first run, for trials; else None.
        by_hand: True for a run that a loop of the user's own drives: the model's hooks are not called.
        auto: the choice that ``strategy="auto"`` leaves; None where the strategy is given.
        is_trial: True for a run that tries out a setting in ranks that are started already: it announces nothing but,
            in one line, that a signal has stopped the search; and running out of memory in it is a finding rather than
            a failure to print.

    .. versionadded:: 0.2
    """

    plan: Plan
    strategy: Strategy
    results: Results
    num_nodes: int | None

    def __init__(self) -> None:
        self.state = TrainerState()
        self.module: Any = None
        self.datamodule: Any = None
        self.sources = DataSources()
        self.progress = FitProgress()
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.adapters = Adapters(self)
        self.hooks = Hooks(self)
        self.phases = Phases(self)
        self.enable_checkpointing: bool | None = True
        self.should_stop = False
        self._current_hook: str | None = None
        self.ckpt_path: str | None = None
        self.log_dir: str | None = None
        self.trainer_id = new_run_id()
        self.run_id = new_run_id()
        self.trained_elsewhere = False
        self.trained_by: dict[str, Any] | None = None
        self.frozen_parameters = FrozenParameters()
        self.said: set[str] = set()
        self.failed_loggers: set[int] = set()
        self.keeps_record = False
        self.seconds: dict[str, float] = {}
        self.peak_memory: list[dict[str, Any]] = []
        self.end_reason = ""
        self.profiling: Any = None  # a FitProfiling, which imports this module
        self.unused: Plan | None = None
        self.auto: AutoStrategy | None = None
        self.is_trial = False
        self.by_hand = False
        self._trainer: Any = None

    def compose(self, plan: Plan) -> None:
        """Take the components of ``plan``. From here on a setting is checked against the run whenever it is set."""
        self.plan = plan
        self.strategy = plan.build()
        self.num_nodes = plan.num_nodes
        self.results = Results(self.strategy)
        self.progress.accumulate = self.progress.asked_accumulate = self.accumulate_grad_batches
        self.settled = True

    @property
    def fuses_optimizers(self) -> bool:
        """Whether the planner lets optimizers step by fused kernels."""
        return self.auto is not None and self.auto.fuses_optimizers

    @property
    def planned_batches(self) -> int:
        """Batches of a step for each of the default strategy, where the planner has chosen one of fewer replicas."""
        return 1 if self.auto is None else self.auto.batches

    def replace_plan(self, plan: Plan) -> None:
        """Take the components of another plan, before the model is set up; the strategy of before is torn down."""
        self.plan = plan
        self.strategy = self.results.strategy = plan.build()

    @property
    def current_hook(self) -> str | None:
        """The hook or step that is running, which decides what ``self.log`` does by default."""
        return self._current_hook

    @current_hook.setter
    def current_hook(self, name: str | None) -> None:
        self._current_hook = name
        self.adapters.follow_hook(name)

    @property
    def trainer(self) -> Any:
        """The Trainer, which callbacks, module and loggers receive; this run doesn't keep it alive."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            raise ReferenceError("the Trainer of this run is gone: keep it as long as the run")
        return trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": self.trainer, "unused": None}  # which trials of this process need

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.trainer = state["_trainer"]

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return bool(self.strategy.is_global_zero)

    @property
    def world_size(self) -> int:
        """Processes of the job; outside of a run those that the plan will have.

        So a batch size or a learning rate computed before ``fit`` is the same in the process that launches and in those
        that it has launched.
        """
        return int(self.strategy.world_size) if self.strategy.is_set_up else self.plan.world_size

    # -- counters --------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs finished, which is the index of the running one."""
        return self.progress.epoch

    # -- callbacks -------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The callbacks that save checkpoints, and those that stand beside another framework's."""
        own = [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]
        return own + self.adapters.savers()

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The callbacks that end the fit by a metric."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, or None."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # -- module ----------------------------------------------------------------------------------------------

    def follow_module(self) -> None:
        """Continue with the strategy's module: a precision may have replaced the user's."""
        module: nn.Module | None = self.strategy.module
        if module is None or module is self.module:
            return
        self.module = self.results.module = module
        if hasattr(type(module), "trainer"):
            module.trainer = self.adapters.trainer_for(module)
