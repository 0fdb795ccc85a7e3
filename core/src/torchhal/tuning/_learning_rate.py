"""Run a learning-rate range test: train a copy of the model while the learning rate grows."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError
from torchhal.rng import host_generators_restored
from torchhal.trainer._connectors import check_model
from torchhal.trainer._trial import fit_trial, launch_trials, make_trial
from torchhal.trainer._trial_state import (
    RestoreState,
    check_idle,
    check_loaders,
    copy_data,
    copy_loader,
    copy_model,
)
from torchhal.tuning._learning_rates import MODES, LearningRates
from torchhal.tuning._range_test import RangeTest


def find_learning_rate(
    trainer: Any,
    model: nn.Module,
    train_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_steps: int = 100,
    mode: str = "exponential",
    stop_factor: float | None = 4.0,
    smoothing: float = 0.98,
) -> LearningRates:
    """Train a copy of ``model`` with growing learning rates, one per optimizer step, and return the losses.

    The loss of a step is the mean of its micro-batches, and over the ranks.

    The learning-rate range test of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). It
    runs with the Trainer's components and settings (accumulation, clipping, limits), on its devices, by its strategy;
    schedulers, callbacks, loggers, checkpoints and validation are left out. The model, the Trainer, the loaders and the
    random-number generators are as before, also where the test is interrupted or fails. Under several processes that
    run the script, all of them call this and get the same result.

    Args:
        trainer: the :class:`torchhal.Trainer` that is to fit; not while it runs.
        model: as of :meth:`.Trainer.fit`.
        train_dataloaders: the same.
        datamodule: the same; a shallow copy of it is used.
        min_lr: the first learning rate, of the first parameter group; the others keep their ratios to it.
        max_lr: the last one.
        num_steps: optimizer steps; where the data has fewer, its epochs are repeated.
        mode: ``"exponential"`` or ``"linear"``.
        stop_factor: end early when the smoothed loss exceeds so many times its minimum, or isn't finite; None: never.
            Where the minimum is 0 or below: when the loss has risen from it by ``stop_factor`` - 1 times its absolute
            value, or times how far it had fallen, whichever is more.
        smoothing: weight of the former average in the moving average of the losses, 0 to below 1.

    Returns:
        The :class:`LearningRates`; ``.suggestion()`` is the learning rate at which the loss falls most steeply.

    Raises:
        ConfigurationError: an argument outside its domain; a model with manual optimization, as several optimizers
            need it, without an optimizer, or that can't be copied.
        ModelError: as of :meth:`.Trainer.fit`; or a loader that can be read only once.

    .. versionadded:: 0.2
    """
    what = "find_learning_rate"
    check_idle(trainer, what)
    check_model(model)
    if hasattr(train_dataloaders, "train_dataloader"):
        train_dataloaders, datamodule = None, train_dataloaders
    check_loaders(train_dataloaders)
    _check_range(min_lr, max_lr, num_steps, mode, stop_factor, smoothing)
    if not getattr(model, "automatic_optimization", True):
        raise ConfigurationError(
            f"{type(model).__name__} steps its optimizers itself (automatic_optimization = False), so nobody but its "
            "training_step knows which learning rate a loss belongs to: look for one with automatic optimization, or "
            "step through learning rates in training_step"
        )
    trial = make_trial(trainer, max_steps=num_steps)
    test = RangeTest(LearningRates(mode, min_lr, max_lr, num_steps), stop_factor, smoothing)
    with host_generators_restored():
        rates: LearningRates = launch_trials(trial, _run, test, model, copy_loader(train_dataloaders), datamodule)
    return rates


def _run(trial: Any, test: RangeTest, model: nn.Module, train_dataloaders: Any, datamodule: Any) -> LearningRates:
    """Run the test on one rank."""
    trial.callbacks = [RestoreState(), test]
    fit_trial(trial, copy_model(model, "find_learning_rate"), train_dataloaders, copy_data(datamodule))
    return test.rates


def _check_range(
    min_lr: float, max_lr: float, num_steps: int, mode: str, stop_factor: float | None, smoothing: float
) -> None:
    if mode not in MODES:
        raise ConfigurationError(f"'mode' must be 'exponential' or 'linear' (got {mode!r})")
    least = "positive" if mode == "exponential" else "0 or more"
    if not (_is_finite(min_lr) and (min_lr > 0 or (min_lr == 0 and mode == "linear"))):
        raise ConfigurationError(f"'min_lr' must be {least} for mode {mode!r} (got {min_lr!r})")
    if not (_is_finite(max_lr) and max_lr > min_lr):
        raise ConfigurationError(f"'max_lr' must be a number above 'min_lr', {min_lr!r} (got {max_lr!r})")
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 2:
        raise ConfigurationError(f"'num_steps' must be an int of at least 2 (got {num_steps!r})")
    if stop_factor is not None and not (_is_finite(stop_factor) and stop_factor > 1):
        raise ConfigurationError(f"'stop_factor' must be above 1, or None (got {stop_factor!r})")
    if not (_is_finite(smoothing) and 0 <= smoothing < 1):
        raise ConfigurationError(f"'smoothing' must be from 0 to below 1 (got {smoothing!r})")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
