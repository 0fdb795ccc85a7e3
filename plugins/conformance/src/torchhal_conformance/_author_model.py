"""Accept an author's model and data for the checks of a strategy that can't train the kit's own small net."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import default_collate

from torchhal.errors import ConfigurationError
from torchhal_conformance._factory import Factory

KIT_MODEL: Final = frozenset(
    {"STR-16", "STR-25", "STR-32", "STR-33", "STR-40", "STR-43", "STR-55", "STR-60", "STR-64"}
    | {"SYS-02", "SYS-03", "SYS-04", "SYS-05"}
)
"""Checks that need names, layers or a training loop of the kit's own model, and can't use an author's."""


def factory_of(name: str, given: str | Callable[[], Any] | None) -> Factory | None:
    """Return the Factory for the argument ``name``: ``"MODULE:FACTORY"``, or a function at the top level of a module.

    Raises:
        ConfigurationError: neither of them.
    """
    if given is None:
        return None
    if isinstance(given, str):
        module, _, function = given.partition(":")
        if module and function:
            return Factory(module, function)
    elif callable(given) and hasattr(given, "__qualname__") and "<" not in given.__qualname__:
        file = getattr(sys.modules.get(given.__module__), "__file__", None)
        return Factory(given.__module__, given.__qualname__, file)
    raise ConfigurationError(
        f"{name!r} must be 'MODULE:FACTORY' or a function at the top level of its module, which other processes import "
        f"(got {given!r})"
    )


def check_model(kind: str, model: Factory | None, data: Factory | None) -> None:
    """Raise ConfigurationError unless the factories make a model with a training_step and samples for it."""
    if model is None and data is None:
        return
    if kind != "strategy":
        raise ConfigurationError(
            f"'model' and 'data' are for strategies: the checks of a {kind} train none of their own"
        )
    if model is None:
        raise ConfigurationError(f"'data' ({data}) is for an author's model: give 'model' too")
    made = create_model(model, 0)
    if data is None:
        return
    batch = collate(create(data), 0, 2)
    try:
        loss = made.training_step(batch, 0)
    except Exception as error:
        raise ConfigurationError(f"training_step of {model} with two samples of {data}: {_told(error)}") from error
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigurationError(f"training_step of {model} must return the loss, a scalar tensor (got {loss!r:.80})")


def create_model(factory: Factory, seed: int) -> Any:
    """Return a new model whose random weights belong to ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = create(factory)
    if not isinstance(model, nn.Module) or not callable(getattr(model, "training_step", None)):
        raise ConfigurationError(f"{factory} must return an nn.Module with a training_step (got {model!r:.80})")
    return model


def create(factory: Factory) -> Any:
    """Return what the author's function returns; its errors are ConfigurationErrors that name it."""
    try:
        return factory()
    except Exception as error:
        raise ConfigurationError(f"{factory} can't be imported and called: {_told(error)}") from error


def collate(dataset: Any, number: int, size: int) -> tuple[torch.Tensor, ...]:
    """Return batch ``number`` of ``size`` samples in a map-style dataset, which begins again at its end."""
    try:
        samples = [dataset[(number * size + index) % len(dataset)] for index in range(size)]
        batch = default_collate(samples)
    except Exception as error:
        raise ConfigurationError(f"'data' must make a map-style dataset of equal samples: {_told(error)}") from error
    if not isinstance(batch, (tuple, list)) or not all(isinstance(part, torch.Tensor) for part in batch):
        raise ConfigurationError(f"the samples of 'data' must be tuples of tensors or numbers (got {samples[0]!r:.80})")
    return tuple(batch)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
