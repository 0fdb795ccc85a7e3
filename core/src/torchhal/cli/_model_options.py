"""Read ``--model`` and ``--model-args``: a class by its name, and what it is called with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from torchhal.errors import ConfigurationError

MODEL_ARGS_HELP: Final = "its arguments, an object or an array"


def parse_model_args(text: str | None) -> Any:
    """Return the value of ``--model-args``; None without it."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"'--model-args' must be JSON (got {text!r}: {error})") from error


def find_model(target: str) -> Callable[..., Any]:
    """Import the class or function that ``--model`` names, with the working directory first on the path."""
    found = find_object(target, "--model", "package.module:Class")
    if not callable(found):
        raise ConfigurationError(
            f"'--model' must name a class or a function (got {target!r}, a {type(found).__name__})"
        )
    model: Callable[..., Any] = found
    return model


def find_object(target: str, option: str, form: str) -> Any:
    """Import what ``option`` names, in the form ``form``, with the working directory first on the path."""
    from torchhal.registry._discovery import describe
    from torchhal.registry._entry import resolve_target

    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"{option!r} must be {form!r} (got {target!r})")
    sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        return resolve_target(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a script without a guard around its run
        behind = error.__traceback__.tb_next if error.__traceback__ is not None else None  # where it is not this line
        reason = describe(error.with_traceback(behind))
        raise ConfigurationError(f"{option!r}: {target!r} can't be imported: {reason}") from error
    finally:
        sys.path.remove(os.getcwd())
