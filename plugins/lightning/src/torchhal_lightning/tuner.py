"""Find a learning rate, or the largest batch size that fits, by short trial runs: Lightning's Tuner."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from torchhal import Callback, rng
from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import implements
from torchhal_lightning import _trees as trees
from torchhal_lightning._errors import raising_lightnings
from torchhal_lightning._hyperparameter_fields import check_field, find_field, set_field

_log = logging.getLogger("torchhal")

METHODS = ("fit", "validate", "test", "predict")

QUIET: dict[str, Any] = {
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "fast_dev_run": False, "profiler": None,
}  # fmt: skip
"""Arguments of the Trainer of a trial."""


class LearningRates:
    """What a range test has measured.

    Args:
        mode: "exponential" or "linear".
        lr_min: the first learning rate.
        lr_max: the last one.
        num_training: how many.

    Attributes:
        results: ``{"lr": [...], "loss": [...]}``; the losses are running averages.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def lr_of(self, step: int) -> float:
        """Return the learning rate of an optimizer step, from 0."""
        if step == 0:
            return self.lr_min
        share = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply; None where there are too few losses.

        Args:
            skip_begin: how many of the first are left out.
            skip_end: how many of the last.
        """
        kept = range(skip_begin, len(self.results["loss"]) - skip_end)
        finite = [index for index in kept if torch.isfinite(torch.tensor(self.results["loss"][index]))]
        if len(finite) < 2:
            _log.error("too few losses for a suggestion of a learning rate (%d): try more steps", len(finite))
            self._optimal_idx = None
            return None
        losses, rates = (torch.tensor([self.results[name][index] for index in finite]) for name in ("loss", "lr"))
        steepest = int(torch.argmin(torch.gradient(losses, spacing=[rates])[0]))
        self._optimal_idx = finite[steepest]
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the losses over the learning rates, by matplotlib.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: to draw in, instead of in a new figure.

        Returns:
            The figure.
        """
        plt: Any = import_module("matplotlib.pyplot")
        if ax is None:
            figure, ax = plt.subplots()
        else:
            figure = ax.figure
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            point = [self.results[name][self._optimal_idx] for name in ("lr", "loss")]
            ax.plot(*point, markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


class RangeTest(Callback):
    """Sets the learning rate of each step of a trial, and notes the loss.

    Args:
        rates: which it fills.
        threshold: a loss that exceeds the best one so many times ends the trial; None: none does.
    """

    beta = 0.98

    def __init__(self, rates: LearningRates, threshold: float | None) -> None:
        self.rates, self.threshold = rates, threshold
        self.average = self.best = 0.0
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers() must return one optimizer for a range test (got {len(trainer.optimizers)})"
            )
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] = self.rates.lr_of(self._step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step and outputs is not None:
            return  # inside of an accumulation
        self.rates.results["lr"].append(self.rates.lr_of(self._step))
        loss = outputs["loss"] if isinstance(outputs, dict) and outputs else outputs
        if loss is None or isinstance(loss, dict):
            self.rates.results["loss"].append(float("nan"))
            self._end(trainer)
            return
        self.average = self.beta * self.average + (1 - self.beta) * float(loss)
        smoothed = self.average / (1 - self.beta ** (step + 1))
        diverges = self.threshold is not None and step > 1 and smoothed > self.threshold * self.best
        if trainer.strategy.broadcast(diverges):
            trainer.should_stop = True
        self.rates.results["loss"].append(smoothed)
        self._end(trainer)
        if smoothed < self.best or step == 1:
            self.best = smoothed

    def _end(self, trainer: Any) -> None:
        """End the trial after so many learning rates, though a batch that the model skips is no step."""
        if len(self.rates.results["loss"]) >= self.rates.num_training:
            trainer.should_stop = True


@contextmanager
def restored(model: Any, trainer: Any) -> Any:
    """Give ``model`` its state back at the end, and ``trainer``; and this process its random numbers."""
    state, training = copy.deepcopy(model.state_dict()), model.training
    numbers = rng.collect_host()
    try:
        yield
    finally:
        model.load_state_dict(state)
        model.train(training)
        model.trainer = trainer
        rng.restore_host(numbers)


class TunedData:
    """What a Trainer shows as its data after a search of the batch size: loaders that are made with the size found.

    Args:
        model: which makes the loaders, unless the data module does.
        datamodule: or None.
    """

    def __init__(self, model: Any, datamodule: Any) -> None:
        self.model, self.datamodule = model, datamodule

    def _loader(self, hook: str) -> Any:
        owner = self.datamodule if implements(self.datamodule, hook) else self.model
        return getattr(owner, hook)() if implements(owner, hook) else None

    @functools.cached_property
    def train_dataloader(self) -> Any:
        return self._loader("train_dataloader")

    @functools.cached_property
    def val_dataloaders(self) -> Any:
        return self._loader("val_dataloader")


class Tuner:
    """Finds settings for a model before it is trained; the trials leave the model and the Trainer as they were.

    Args:
        trainer: whose settings the trials have; a :class:`.Trainer` of this package.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @raising_lightnings
    def lr_find(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRates | None:
        """Train with learning rates from ``min_lr`` to ``max_lr``, one for each step, and return the losses.

        Args:
            model: with an attribute, or a hyperparameter, ``lr`` or ``learning_rate``.
            train_dataloaders: as of fit.
            val_dataloaders: as of fit.
            dataloaders: None.
            datamodule: as of fit.
            method: "fit".
            min_lr: the first learning rate.
            max_lr: the last one.
            num_training: steps.
            mode: "exponential" or "linear".
            early_stop_threshold: a loss so many times the best one ends it; None: none does.
            update_attr: set the model's attribute to the suggestion.
            attr_name: its name, where it is another.

        Raises:
            ConfigurationError: another ``method``, or a model with several optimizers.
            AttributeError: the model has no such attribute.
        """
        if method != "fit":
            raise ConfigurationError(f"'method' must be 'fit' for a range test (got {method!r})")
        _check(method, train_dataloaders, val_dataloaders, dataloaders)
        self._check_callbacks("LearningRateFinder")
        if self._trainer.fast_dev_run:
            warnings.warn("fast_dev_run: no learning rate is looked for", stacklevel=2)
            return None
        name = find_learning_rate(model, datamodule, attr_name) if update_attr else ""
        rates = LearningRates(mode, min_lr, max_lr, num_training)
        trial = self._trainer.trial(
            callbacks=[RangeTest(rates, early_stop_threshold)], max_steps=num_training, limit_val_batches=num_training
        )
        with restored(model, self._trainer):
            trial.fit(model, train_dataloaders, val_dataloaders, datamodule)
        if update_attr and (lr := rates.suggestion()) is not None:
            set_field(model, datamodule, name, lr)
            _log.info("learning rate set to %s", lr)
        return rates

    @raising_lightnings
    def scale_batch_size(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Return the largest batch size for which ``steps_per_trial`` steps don't run out of memory.

        Args:
            model: with an attribute, or a hyperparameter, ``batch_arg_name``; or the data module has it.
            train_dataloaders: None, as the model or the data module makes the loaders.
            val_dataloaders: None.
            dataloaders: None.
            datamodule: makes the loaders.
            method: "fit", "validate", "test" or "predict".
            mode: "power": doubled until memory runs out; "binsearch": then halved in on the largest.
            steps_per_trial: steps with each size.
            init_val: the first size.
            max_trials: how many sizes are tried.
            batch_arg_name: name of the attribute, which is set to the size found.
            margin: share by which "binsearch" reduces what it has found.
            max_val: the largest size to try.

        Raises:
            ConfigurationError: loaders are given, or nobody has such an attribute.
            ValueError: an unknown ``method`` or ``mode``, or several processes.
        """
        _check(method, train_dataloaders, val_dataloaders, dataloaders)
        if self._trainer.world_size > 1:
            raise ValueError("the batch size can't be looked for by several processes: use devices=1")
        self._check_callbacks("BatchSizeFinder")
        if mode not in ("power", "binsearch"):
            raise ValueError(f"'mode' must be 'power' or 'binsearch' (got {mode!r})")
        if not 0 <= margin < 1:
            raise ValueError(f"'margin' must be from 0 to below 1 (got {margin!r})")
        check_no_loaders((train_dataloaders, val_dataloaders, dataloaders))
        check_field(model, datamodule, batch_arg_name)
        if self._trainer.fast_dev_run:
            warnings.warn("fast_dev_run: no batch size is looked for", stacklevel=2)
            return None

        def run(size: int) -> int | None:
            """Try a size; return how many samples there are, where it is known."""
            set_field(model, datamodule, batch_arg_name, size)
            limits = limits_of(steps_per_trial)
            trial = self._trainer.trial(callbacks=[], max_steps=steps_per_trial, limit_train_batches=1.0, **limits)
            with restored(model, self._trainer):
                getattr(trial, method)(model, datamodule=datamodule)
            return samples_of(trial, method)

        size = search(run, init_val, mode=mode, max_trials=max_trials, margin=margin, max_val=max_val)
        set_field(model, datamodule, batch_arg_name, size)
        self._trainer.tuned = TunedData(model, datamodule)
        return size

    def _check_callbacks(self, name: str) -> None:
        if any(isinstance(each, trees.classes(f"callbacks.{name}")) for each in self._trainer.callbacks):
            raise ValueError(f"the Trainer has a {name} already: remove it, or call fit alone")


def find_learning_rate(model: Any, datamodule: Any, name: str) -> str:
    """Return the name of the model's learning rate.

    Raises:
        AttributeError: it has none.
    """
    for each in (name,) if name else ("lr", "learning_rate"):
        if find_field(model, datamodule, each) is not None:
            return each
    if name:
        raise AttributeError(f"there is no {name!r} in the model or its hyperparameters, as attr_name says")
    raise AttributeError(
        "a range test sets 'lr' or 'learning_rate' of the model or its hyperparameters, and there is neither: name the "
        "field, attr_name=..., or set none, update_attr=False"
    )


def search(
    run: Callable[[int], int | None], size: int, *, mode: str, max_trials: int, margin: float, max_val: int
) -> int:
    """Return the largest batch size that fits, by trials.

    Args:
        run: tries a size and returns the number of samples, or None; raises torch's error where memory runs out.
        size: the first.
        mode: as of :meth:`Tuner.scale_batch_size`.
        max_trials: the same.
        margin: the same.
        max_val: the same.
    """
    fits, fails = 0, None
    for trial in range(max_trials):
        size = min(size, max_val)
        if trial:
            _log.info("trying batch size %d", size)
        try:
            samples = run(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fails = size
            _log.info("batch size %d does not fit", size)
        else:
            fits = size
            if samples is not None and size >= samples:
                _log.info("batch size %d is greater or equal than the length of the data, %d", size, samples)
                break
            if size >= max_val:
                break
        if trial + 1 == max_trials:
            break
        if fails is None:
            size = fits * 2
        elif fails <= 1 or fails - fits <= 1 or (mode == "power" and fits):
            break
        else:
            size = (fits + fails) // 2 if mode == "binsearch" or not fits else fits
    if not fits and fails is None:  # no trial was asked for
        return size
    if not fits:
        raise ConfigurationError("not even the smallest batch size that was tried fits into memory")
    return max(1, int(fits * (1 - margin))) if mode == "binsearch" else fits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or the system, ran out of memory."""
    words = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def check_no_loaders(loaders: Iterable[Any]) -> None:
    """Raise ConfigurationError where a loader was passed, whose batch size is fixed."""
    if any(each is not None for each in loaders):
        raise ConfigurationError(
            "the batch size of loaders that are passed can't be changed: let the model or a data module make them"
        )


def limits_of(steps: int) -> dict[str, int]:
    """Return the Trainer's arguments by which an evaluation takes so many batches."""
    return {f"limit_{name}_batches": steps for name in ("val", "test", "predict")}


def samples_of(trial: Any, method: str) -> int | None:
    """Return the samples of a trial's data; None where that is not known."""
    name = {"fit": "train_dataloader", "validate": "val_dataloaders"}.get(method, f"{method}_dataloaders")
    try:
        return len(getattr(trial, name).dataset)
    except (AttributeError, TypeError):
        return None


def _check(method: str, train_dataloaders: Any, val_dataloaders: Any, dataloaders: Any) -> None:
    if method not in METHODS:
        raise ValueError(f"'method' must be one of {', '.join(map(repr, METHODS))} (got {method!r})")
    if method == "fit" and dataloaders is not None:
        raise ConfigurationError("'dataloaders' must be None for method='fit': pass train_dataloaders, val_dataloaders")
    if method != "fit" and (train_dataloaders is not None or val_dataloaders is not None):
        raise ConfigurationError(
            f"'train_dataloaders' and 'val_dataloaders' must be None for method={method!r}: pass dataloaders"
        )
