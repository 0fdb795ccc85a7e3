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

from torchhal import rng, tuning
from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import implements
from torchhal_lightning import _trees as trees
from torchhal_lightning._errors import raising_lightnings
from torchhal_lightning._hyperparameter_fields import check_field

_log = logging.getLogger("torchhal")

_MODES = {"power": "power", "binsearch": "binary"}

METHODS = ("fit", "validate", "test", "predict")

QUIET: dict[str, Any] = {
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "fast_dev_run": False, "profiler": None,
}  # fmt: skip
"""Arguments of the Trainer of a trial."""


class LearningRates(tuning.LearningRates):
    """What a range test has measured, with Lightning's names, learning rates and suggestion.

    Args:
        mode: "exponential" or "linear".
        lr_min: the first learning rate.
        lr_max: the last one.
        num_training: how many.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        super().__init__(mode, lr_min, lr_max, num_training)
        self.lr_min, self.lr_max, self.num_training = lr_min, lr_max, num_training
        self._optimal_idx: int | None = None

    @property
    def results(self) -> dict[str, list[float]]:
        """``{"lr": [...], "loss": [...]}``; the losses are running averages."""
        return {"lr": self.lr, "loss": self.smoothed}

    @results.setter
    def results(self, results: dict[str, list[float]]) -> None:
        self.lr, self.smoothed = results["lr"], results["loss"]

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a step: Lightning's schedulers leave the second one out."""
        if step == 0:
            return self.lr_min
        share = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply; None where there are too few losses.

        Lightning measures the slope over the learning rate itself, whatever the mode.

        Args:
            skip_begin: how many of the first are left out.
            skip_end: how many of the last.
        """
        kept = range(skip_begin, len(self.smoothed) - skip_end)
        finite = [index for index in kept if torch.isfinite(torch.tensor(self.smoothed[index]))]
        if len(finite) < 2:
            _log.error("too few losses for a suggestion of a learning rate (%d): try more steps", len(finite))
            self._optimal_idx = None
            return None
        losses, rates = (torch.tensor([each[index] for index in finite]) for each in (self.smoothed, self.lr))
        steepest = int(torch.argmin(torch.gradient(losses, spacing=[rates])[0]))
        self._optimal_idx = finite[steepest]
        return self.lr[self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:  # type: ignore[override]
        """Plot the losses over the learning rates, by matplotlib.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: to draw in, instead of in a new figure.

        Returns:
            The figure.
        """
        if ax is None:
            ax = import_module("matplotlib.pyplot").subplots()[1]
        figure = super().plot(ax, suggest=suggest)
        if show:
            import_module("matplotlib.pyplot").show()
        return figure


class RangeTest(tuning.RangeTest):
    """A range test with Lightning's numbers: one learning rate for all parameter groups, and a slower average.

    Args:
        rates: which it fills.
        threshold: a loss that exceeds the best one so many times ends the trial; None: none does.
    """

    def __init__(self, rates: LearningRates, threshold: float | None) -> None:
        super().__init__(rates, threshold)

    def ratios(self, groups: list[dict[str, Any]]) -> list[float]:
        return [1.0] * len(groups)

    def loss_of_step(self, losses: list[float]) -> float:
        return losses[-1]  # as Lightning records it

    def smooth(self, loss: float) -> float:
        self.average = self.smoothing * self.average + (1 - self.smoothing) * loss
        return self.average / (1 - self.smoothing ** (len(self.rates.lr) + 2))

    def diverges(self, smoothed: float) -> bool:
        return self.stop_factor is not None and smoothed > self.stop_factor * self.minimum


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
            tuning.set_field((model, datamodule), name, lr)
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
        if mode not in _MODES:
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
            tuning.set_field((model, datamodule), batch_arg_name, size)
            limits = limits_of(steps_per_trial)
            trial = self._trainer.trial(callbacks=[], max_steps=steps_per_trial, limit_train_batches=1.0, **limits)
            with restored(model, self._trainer):
                getattr(trial, method)(model, datamodule=datamodule)
            return samples_of(trial, method)

        out_of_memory = self._trainer.trainer.accelerator.is_out_of_memory
        size = search(run, out_of_memory, init_val, mode=mode, max_trials=max_trials, margin=margin, max_val=max_val)
        tuning.set_field((model, datamodule), batch_arg_name, size)
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
        if tuning.find_field((model, datamodule), each) is not None:
            return each
    if name:
        raise AttributeError(f"there is no {name!r} in the model or its hyperparameters, as attr_name says")
    raise AttributeError(
        "a range test sets 'lr' or 'learning_rate' of the model or its hyperparameters, and there is neither: name the "
        "field, attr_name=..., or set none, update_attr=False"
    )


def search(
    run: Callable[[int], int | None],
    out_of_memory: Callable[[BaseException], bool],
    size: int,
    *,
    mode: str,
    max_trials: int,
    margin: float,
    max_val: int,
) -> int:
    """Return the largest batch size that fits, by trials.

    Args:
        run: tries a size and returns the number of samples, or None; raises an error where memory runs out.
        out_of_memory: whether it is that error.
        size: the first.
        mode: as of :meth:`Tuner.scale_batch_size`.
        max_trials: the same.
        margin: the same; Lightning reduces a size beyond which no memory ran out, too.
        max_val: the same.
    """
    enough: int | None = None

    def fits(tried: int) -> bool:
        nonlocal enough
        _log.info("trying batch size %d", tried)
        try:
            samples = run(tried)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            _log.info("batch size %d does not fit", tried)
            return False
        if samples is not None and tried >= samples:
            _log.info("batch size %d is greater or equal than the length of the data, %d", tried, samples)
            enough = tried
        return True

    if not max_trials:
        return size
    found = tuning.search_batch_size(
        fits, start=size, mode=_MODES[mode], max_trials=max_trials, max_size=max_val, limit=lambda: enough
    )
    return max(1, int(found * (1 - margin))) if mode == "binsearch" else found


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
