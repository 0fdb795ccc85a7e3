"""Sort what a loop sets up: models, optimizers, schedulers, loaders, and other objects with a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError
from torchhal.run._models import Models
from torchhal.trainer.data._loaders import is_loader


@dataclass
class SetupObjects:
    """The objects of one :meth:`.Run.setup`, by kind.

    Attributes:
        module: the model; several, or one with a name, in one module.
        models: by name; "" is that of one without.
        optimizers, schedulers, loaders: in the order in which they were given.
        others: objects with ``state_dict`` and ``load_state_dict``, by name.
    """

    module: nn.Module
    models: dict[str, nn.Module]
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


def sort_objects(given: Sequence[Any], named: Mapping[str, Any]) -> SetupObjects:
    """Return the objects by kind.

    Args:
        given: those without a name.
        named: those with one, by which checkpoints know models and other objects.

    Raises:
        ConfigurationError: there is no model, an object is given twice, or is of no kind.
        ModelError: an optimizer has parameters of no model.
    """
    models: dict[str, nn.Module] = {}
    found = SetupObjects(nn.Module(), models)
    several = sum(isinstance(value, nn.Module) for value in (*given, *named.values())) > 1
    seen: dict[int, str] = {}
    for index, (name, value) in enumerate([*(("", value) for value in given), *named.items()]):
        what = f"argument {index + 1}" if not name else f"{name!r}"
        if id(value) in seen:
            raise ConfigurationError(f"setup got one {type(value).__name__} twice, as {seen[id(value)]} and {what}")
        seen[id(value)] = what
        if isinstance(value, nn.Module):
            models[name or (f"model_{len(models)}" if several else "")] = value
        elif isinstance(value, Optimizer) or (hasattr(value, "step") and hasattr(value, "param_groups")):
            found.optimizers.append(value)
        elif callable(getattr(value, "step", None)) and hasattr(value, "optimizer"):
            if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
                raise ConfigurationError(
                    f"{what}, a {type(value).__name__}, needs state_dict and load_state_dict, to be continued"
                )
            found.schedulers.append(value)
        elif isinstance(value, list | tuple) and any(hasattr(item, "step") or _is_model(item) for item in value):
            raise ConfigurationError(
                f"setup takes models, optimizers and schedulers one by one ({what} is a {type(value).__name__} of "
                f"{', '.join(type(item).__name__ for item in value)}): write setup(*objects)"
            )
        elif is_loader(value) or (isinstance(value, Iterable) and name == "" and isinstance(value, list | tuple)):
            found.loaders.append(value)
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            found.others[name or f"object_{len(found.others)}"] = value
        else:
            raise ConfigurationError(
                f"setup takes models, optimizers, schedulers, loaders, and objects with state_dict and "
                f"load_state_dict ({what} is {value!r})"
            )
    if not models:
        raise ConfigurationError("setup needs a model, an nn.Module: give it together with its optimizer and loader")
    _check_names(models)
    _check_optimizers(found)
    trained = sum(any(parameter.requires_grad for parameter in model.parameters()) for model in models.values())
    if list(models) == [""]:
        found.module = models[""]
    else:
        found.module = Models(models, automatic_optimization=trained <= 1 and len(found.optimizers) <= 1)
    return found


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _check_names(models: Mapping[str, nn.Module]) -> None:
    for name in models:
        if name and (not name.isidentifier() or hasattr(nn.Module, name) or name in ("training", "called_in_parts")):
            raise ConfigurationError(f"a model can't be called {name!r}, an attribute of every module: choose another")


def _check_optimizers(found: SetupObjects) -> None:
    own = {id(parameter) for model in found.models.values() for parameter in model.parameters()}
    for optimizer in found.optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in parameters)
        if foreign:
            raise ModelError(
                f"the {type(optimizer).__name__} has {foreign} of {len(parameters)} parameter(s) of no model that was "
                "given: give every model that it trains, in the same call"
            )
    for scheduler in found.schedulers:
        if not any(scheduler.optimizer is optimizer for optimizer in found.optimizers):
            raise ModelError(
                f"the {type(scheduler).__name__} sets the learning rates of an optimizer that setup didn't get: give "
                "both in the same call"
            )
