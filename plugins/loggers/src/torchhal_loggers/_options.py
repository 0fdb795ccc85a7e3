"""Check the arguments of a service's logger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchhal.errors import ConfigurationError, UnknownArgumentError
from torchhal.suggestions import nearest


def check_name(argument: str, value: Any) -> str:
    """Return ``value``, the argument's, where it is a name.

    Raises:
        ConfigurationError: it is empty, or no str.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{argument!r} must be a name (got {value!r})")
    return value


def check_further_options(
    logger: type, options: Mapping[str, Any], function: Callable[..., Any], reserved: Collection[str]
) -> None:
    """Look whether ``function``, which ``logger`` will call in its thread, has such arguments.

    Args:
        logger: the class of the logger.
        options: further arguments that it was made with.
        function: the vendor's.
        reserved: the names of arguments that the logger gives itself.

    Raises:
        UnknownArgumentError: it hasn't; with the nearest name of one of both.
    """
    of_function = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in of_function if parameter.kind is not parameter.VAR_KEYWORD]
    known = {*named, *list(inspect.signature(logger).parameters)[:-1]}  # the last one takes all others
    if unknown := [name for name in options if name not in known - set(reserved)]:
        name = unknown[0]
        if name in reserved:
            what = "which the logger gives itself"
        else:
            near = nearest(name, known - set(reserved))
            what = f"did you mean {near!r}?" if near else f"it takes {', '.join(sorted(known - set(reserved)))}"
        raise UnknownArgumentError(f"{logger.__name__}() has no argument {name!r}: {what}", names=unknown)


def folder_of(name: str) -> str:
    """Return an experiment's name as a folder below another: ``"/Users/me/x"`` is MLflow's at Databricks."""
    return "/".join(part for part in name.split("/") if part not in {"", ".", ".."})


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that are plain data; ``settings`` may hold a key."""
    plain = (str, int, float, bool, type(None))
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name != "settings"
        and (
            isinstance(value, plain)
            or (isinstance(value, list | tuple) and all(isinstance(item, plain) for item in value))
        )
    }


def withheld(variable: str) -> dict[str, str]:
    """Return what stands for a secret in a run's folder: the name of the environment variable that has to have it."""
    return {"withheld": variable}
