"""Hold the loaders that one call was given, and determine the provider of a stage's loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchhal._overrides import implements
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.data._evaluation_data import EvaluationData
from torchhal.trainer.data._loaders import LOADER_HOOKS


@dataclass
class DataSources:
    """The loaders as given to one call, and those made of them."""

    train: Any = None
    validate: Any = None
    test: Any = None
    predict: Any = None
    keep_predictions: bool = True
    callbacks_asked_of: Any = None
    """The model whose ``configure_callbacks`` are among the Trainer's callbacks."""
    ready: bool = False
    """Whether all ``setup`` hooks have run, so that loaders may be created."""
    validation_data: EvaluationData = field(default_factory=EvaluationData)
    evaluation_data: EvaluationData = field(default_factory=EvaluationData)


def check_datamodule(datamodule: Any) -> None:
    """Raise ModelError for a value that gives no data: a class, a number, a loader in the wrong place."""
    if isinstance(datamodule, type):
        raise ModelError(f"'datamodule' must be a DataModule (got {datamodule!r}): make an object, as Data(...)")
    hooks = LOADER_HOOKS.values()
    if datamodule is not None and not any(implements(datamodule, hook) for hook in hooks):
        raise ModelError(
            f"'datamodule' must be a DataModule, or have one of {', '.join(dict.fromkeys(hooks))} (got "
            f"{datamodule!r}); loaders go into the arguments before it"
        )


def check_no_second(datamodule: Any, name: str, given: Any) -> None:
    if datamodule is not None and given is not None:
        raise ConfigurationError(
            f"'{name}' and 'datamodule' both give data: pass one of them (got {given!r} and {datamodule!r})"
        )


def find_source(model: Any, datamodule: Any, stage: str, given: Any) -> Any:
    """Return the provider of the loaders of ``stage``, without creating them yet."""
    if given is not None:
        return given
    for owner in (datamodule, model):
        if implements(owner, LOADER_HOOKS[stage]):
            return owner
    return None
