"""Accept an author's model and data for the checks of a strategy that can't train the kit's own small net."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import default_collate

from torchhal.errors import ConfigurationError
from torchhal_conformance._error_text import with_article
from torchhal_conformance._factory import Factory

GLOBAL_BATCH: Final = 12
"""Samples of a global batch: divisible by 2 and 3 ranks."""

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
            f"'model' and 'data' are for strategies: the checks of {with_article(kind)} train none of their own"
        )
    if model is None:
        raise ConfigurationError(f"'data' ({data}) is for an author's model: give 'model' too")
    made = create_model(model, 0)
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise ConfigurationError(f"{model} must return a model with a parameter that is trained (it has none)")
    again = dict(create_model(model, 0).named_parameters())
    if differing := [name for name, one in made.named_parameters() if not _equal(one, again.get(name))]:
        raise ConfigurationError(
            f"{model} must return equal models for one seed of torch's: {differing[0]!r} differs between two calls"
        )
    if data is None:
        _check_loss(made, (torch.zeros(2, 6), torch.ones(2, 2)), f"{model} with two samples of the kit's own net")
        return
    dataset = create(data)
    _check_samples(dataset, data)
    _check_loss(made, collate(dataset, 0, 2), f"{model} with two samples of {data}")


def _check_samples(dataset: Any, data: Factory) -> None:
    """Raise ConfigurationError unless the ranks of a batch get samples that differ, and the same ones each time."""
    size = _length(dataset)
    if size < GLOBAL_BATCH:
        raise ConfigurationError(
            f"{data} must make a dataset of at least {GLOBAL_BATCH} samples, a batch of the kit's (got {size}): with "
            "fewer, ranks train the same samples, and what they don't exchange is not seen"
        )
    read = [collate(dataset, number, 1) for number in range(min(size, 4 * GLOBAL_BATCH))]
    for number, sample in enumerate(read[:GLOBAL_BATCH]):
        other = collate(dataset, number, 1)
        if len(other) != len(sample) or not all(map(_equal, sample, other)):
            raise ConfigurationError(
                f"sample {number} of {data} differs between two reads: each rank reads them itself, so draw no random "
                "numbers there"
            )
    different: list[tuple[torch.Tensor, ...]] = []
    for sample in read:
        if not any(len(one) == len(sample) and all(map(_equal, one, sample)) for one in different):
            different.append(sample)
    if len(different) < GLOBAL_BATCH:
        raise ConfigurationError(
            f"{data} must make at least {GLOBAL_BATCH} samples that differ (the first {len(read)} have "
            f"{len(different)}): with equal samples on all ranks, what they don't exchange is not seen"
        )


def _check_loss(model: Any, batch: tuple[torch.Tensor, ...], told: str) -> None:
    """Raise ConfigurationError unless training_step returns a loss that can be trained, the same one each time."""
    losses = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                loss = model.training_step(tuple(part.clone() for part in batch), 0)
            except Exception as error:
                raise ConfigurationError(f"training_step of {told}: {_told(error)}") from error
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise ConfigurationError(
                f"training_step of {told} must return the loss, a scalar tensor (got {loss!r:.80})"
            )
        if not loss.isfinite():
            raise ConfigurationError(f"training_step of {told} must return a finite loss (got {loss.item()})")
        if not loss.requires_grad:
            raise ConfigurationError(
                f"the loss that training_step of {told} returns must require a gradient: compute it from the model's "
                "parameters, without detach() or item()"
            )
        losses.append(loss.item())
    if losses[0] != losses[1]:
        raise ConfigurationError(
            f"training_step of {told} must return the same loss each time (got {losses[0]} and {losses[1]}): draw no "
            "random numbers there, as dropout does"
        )


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same type, shape and values; NaN is the same as NaN."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise ConfigurationError(f"'data' must make a map-style dataset, which has a length: {_told(error)}") from error


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
