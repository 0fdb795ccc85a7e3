"""Ask each component whether it can be used here, and with the others; an error in it is its own, by name."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torchhal.composition import PARTS, Composition
from torchhal.errors import ConfigurationError, TorchhalError, message_of
from torchhal.plugin import Availability
from torchhal.strategies import Strategy


def availability_of(component: type[Any]) -> Availability:
    """Return what the class answers; one that raises, or answers something else, is unavailable for that reason."""
    try:
        answer: object = component.availability()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a vendor's import may end in SystemExit
        return Availability(False, f"{type(error).__name__}: {message_of(error)}")
    if not isinstance(answer, Availability):
        return Availability(False, f"its availability() returned {answer!r}, and not an Availability")
    return answer


def check_fits(composition: Composition) -> None:
    """Raise the first refusal of a component of ``composition``.

    Raises:
        ConfigurationError: a component doesn't fit, or can't say whether it does.
    """
    for kind in PARTS:
        component = getattr(composition, kind)
        if component is not None:
            check_fit(kind, component, composition)


def check_fit(kind: str, component: Any, composition: Composition) -> None:
    """Raise an error if ``component`` refuses ``composition``."""
    try:
        if isinstance(component, Strategy) and _takes_parts(type(component)):
            old: Any = component.check_fit
            old(precision=composition.precision, world_size=composition.world_size)
        else:
            component.check_fit(composition)
    except TorchhalError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{kind.replace('_', ' ')} {type(component).__name__} could not say whether it fits the others: "
            f"{type(error).__name__}: {message_of(error)}"
        ) from error


def composition_of(strategy: Strategy, world_size: int) -> Composition:
    """Return the composition of a strategy that has been configured, for ``world_size`` processes."""
    return Composition(
        accelerator=strategy.accelerator,
        precision=strategy.precision,
        checkpoint_io=strategy.checkpoint_io,
        cluster_environment=strategy.cluster_environment,
        strategy=strategy,
        devices=strategy.devices,
        num_nodes=strategy.num_nodes,
        world_size=world_size,
    )


def _takes_parts(strategy: type[Strategy]) -> bool:
    """Return whether a class of an earlier release takes the precision and the world size, by keyword."""
    parameters = inspect.signature(strategy.check_fit).parameters
    if "composition" in parameters or "precision" not in parameters:
        return False
    warnings.warn(
        f"{strategy.__qualname__}.check_fit(*, precision, world_size) goes with torchhal 1.0: take the composition, "
        "check_fit(self, composition), which has these and the rest",
        FutureWarning,
        stacklevel=2,
    )
    return True
