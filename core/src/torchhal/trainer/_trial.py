"""Make a Trainer for a trial run: of the same components and settings, with nothing of the runs before."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from torchhal.distributed import rendezvous
from torchhal.distributed.process import open_standard_descriptors
from torchhal.errors import ConfigurationError
from torchhal.resolve import Plan
from torchhal.strategies import Strategy
from torchhal.trainer._settings import RunSettings, Setting
from torchhal.trainer.logging._standard_streams import lossy_streams
from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
from torchhal.trainer.loops._fit_loop import FitLoop
from torchhal.trainer.run_state import RunState

_QUIET: dict[str, Any] = {
    "fast_dev_run": False,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "profiler": None,
}
"""Settings of a trial: it only trains, and its end is its own."""


def make_trial(trainer: Any, callbacks: Sequence[Any] = (), **settings: Any) -> Any:
    """Return a Trainer with the components, settings and attributes of ``trainer``, but no logger and no checkpoint.

    The strategy and the precision are copies that have run nothing; ``trainer`` and its run are left as they are.

    Args:
        trainer: a Trainer, before or after any call, or another trial.
        callbacks: those of the trial; the model's own ``configure_callbacks`` is not called.
        settings: arguments that the trial has instead of the Trainer's.

    Raises:
        ConfigurationError: the strategy can't be copied.
    """
    run = trainer._run
    trial = object.__new__(type(trainer))
    vars(trial).update({name: value for name, value in vars(trainer).items() if name not in _OWN})
    made = trial._run  # which the first access makes
    for name, setting in vars(RunSettings).items():
        if isinstance(setting, Setting):
            vars(made)[name] = vars(run)[name]
    for name, value in {**_QUIET, **settings}.items():
        setattr(made, name, value)
    made.compose(unused_copy(run.unused or run.plan))
    made.strategy.devices, made.strategy.num_nodes = list(run.strategy.devices), run.strategy.num_nodes
    made.num_nodes = run.num_nodes  # "auto" may be resolved by now
    made.enable_checkpointing, made.is_trial, made.said = False, True, run.said
    trial.evaluation_loop = EvaluationLoop(made)
    trial.fit_loop = FitLoop(made, trial.evaluation_loop)
    made.callbacks = list(callbacks)
    return trial


_OWN = ("_run", "fit_loop", "evaluation_loop")
"""Attributes of a Trainer that belong to its run."""


def fit_trial(trial: Any, model: Any, train_dataloaders: Any, datamodule: Any) -> None:
    """Fit ``model`` by a trial, on a rank that :func:`launch_trials` has started."""
    trial._run.sources.callbacks_asked_of = model
    trial.fit(model, train_dataloaders, datamodule=datamodule)


def launch_trials(trial: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(trial, *args)`` on every rank of the trial's strategy, which this starts where needed.

    Returns:
        The result of rank 0 where workers were started, else that of this rank.
    """
    open_standard_descriptors()
    with lossy_streams():
        rendezvous.begin_call()
        launcher = trial.strategy.make_launcher()
        trial._run.num_nodes = trial.strategy.num_nodes
        return launcher.launch(function, trial, *args)


_OF_A_RUN: dict[str, Callable[[], Any]] = {
    "module": lambda: None,
    "model": lambda: None,
    "trainer": lambda: None,
    "mark_step": lambda: None,
    "optimizers": list,
    "lr_scheduler_configs": list,
    "_watch": lambda: None,
    "_precision_step": lambda: None,
    "_synchronized": list,
}
"""Attributes of a strategy that a run sets -> what they are before one."""


def unused_copy(plan: Plan) -> Plan:
    """Return the plan with copies of its strategy, which has run nothing yet, and of its precision.

    Raises:
        ConfigurationError: one of them can't be copied.
    """
    strategy, precision = plan.strategy.value, plan.precision.value
    made: Strategy = object.__new__(type(strategy))
    kept = {name: value for name, value in vars(strategy).items() if name not in _OF_A_RUN}
    parts = (plan.accelerator, plan.checkpoint_io, plan.cluster_environment)  # which keep nothing of a run
    shared = [part.value for part in parts if part is not None]
    shared += [value for value in kept.values() if isinstance(value, ModuleType)]  # an engine, as it was imported
    memo = {id(value): value for value in shared}
    try:
        copies = copy.deepcopy((kept, precision), memo)
    except Exception as error:
        raise ConfigurationError(
            f"a trial has a strategy of its own, and {type(strategy).__name__} can't be copied "
            f"({type(error).__name__}: {error}): give it by alias, or as an object that nothing has used"
        ) from error
    vars(made).update(copies[0], **{name: value() for name, value in _OF_A_RUN.items()})
    return dataclasses.replace(
        plan,
        strategy=dataclasses.replace(plan.strategy, value=made),
        precision=dataclasses.replace(plan.precision, value=copies[1]),
    )


def keep_unused(run: RunState) -> None:
    """Keep a copy of the strategy before the first run, as most keep something of their last one."""
    if run.state.fn is None and run.unused is None and not run.is_trial:
        with suppress(ConfigurationError):  # raised when a trial is asked for
            run.unused = unused_copy(run.plan)


def release_frames(error: BaseException) -> None:
    """Free what the frames of an error, and of those before it, have kept.

    That is the step's memory, and the process group, whose open connections other ranks wait for.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]
