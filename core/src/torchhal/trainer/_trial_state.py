"""Restore random-number generators and loaders after a trial, however it ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from torchhal import rng
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.adapters import run_of
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.data._compound import loaders_of
from torchhal.trainer.data._loaders import is_one_shot


class RestoreState(Callback):
    """Restores the device's random-number generator and the positions of the training loaders at the run's end."""

    def __init__(self) -> None:
        self._generators: dict[str, Any] | None = None
        self._positions: list[tuple[Any, str, Any]] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        strategy = trainer.strategy
        self._generators = rng.collect(strategy.accelerator, strategy.root_device)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        data = run_of(trainer).progress.data
        assert data is not None
        self._positions = list(_positions(data.given))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        for owner, name, value in self._positions:
            if name == "state":
                owner.set_state(value)
            elif name == "load_state_dict":
                owner.load_state_dict(value)
            else:
                setattr(owner, name, value)
        if self._generators is not None:
            rng.restore(self._generators, trainer.strategy.accelerator, trainer.strategy.root_device)


def _positions(given: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield what an epoch changes in loaders and samplers: ``(owner, what to set, value)``."""
    seen: set[int] = set()
    for loader in loaders_of(given):
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            yield loader, "load_state_dict", copy.deepcopy(loader.state_dict())
        batches = getattr(loader, "batch_sampler", None)
        owners: tuple[Any, ...] = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        for owner in owners:
            generator: Any = getattr(owner, "generator", None)
            if hasattr(generator, "get_state") and id(generator) not in seen:
                seen.add(id(generator))
                yield generator, "state", generator.get_state()
            if hasattr(owner, "set_epoch") and isinstance(getattr(owner, "epoch", None), int):
                yield owner, "epoch", owner.epoch


def check_loaders(train_dataloaders: Any) -> None:
    """Raise ModelError for batches that a trial would use up."""
    if train_dataloaders is not None and is_one_shot(train_dataloaders):
        raise ModelError(
            f"a trial can't put back the batches that it takes from a {type(train_dataloaders).__name__}: pass an "
            "object that can be iterated again, such as a DataLoader or a list"
        )


def check_idle(trainer: Any, what: str) -> None:
    """Raise ConfigurationError for what is no Trainer, and in a run, whose processes and memory a trial needs."""
    if not hasattr(trainer, "fit"):
        raise ConfigurationError(
            f"{what}(trainer, model, ...): 'trainer' must be a Trainer (got {'a ' + type(trainer).__name__})"
        )
    if run_of(trainer).state.status == "running":
        raise ConfigurationError(f"{what} must be called before fit, not in a hook or step of a run")


def copy_model(model: nn.Module, what: str) -> nn.Module:
    """Return a deep copy of the model, which a trial trains in its place."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ConfigurationError(
            f"{what} trains a copy of the model, and {type(model).__name__} can't be copied ({type(error).__name__}: "
            f"{error}): open files, locks and connections in setup(), and keep only leaf tensors as attributes"
        ) from error


def copy_data(datamodule: Any) -> Any:
    """Return a copy of a data module, with the same data, whose attributes and hyperparameters may be set."""
    made = copy.copy(datamodule)
    if "_hparams" in getattr(made, "__dict__", {}):
        made.__dict__["_hparams"] = copy.copy(made.__dict__["_hparams"])
    return made


def copy_loader(loader: Any) -> Any:
    """Return a copy of a DataLoader with the same dataset and samplers, and no worker processes yet."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return loader
    made = copy.copy(loader)
    made.__dict__["_iterator"] = None
    return made
