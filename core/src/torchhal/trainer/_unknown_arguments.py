"""Explain an unknown argument of the Trainer, a callback or a logger: its name here, or its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from torchhal.errors import UnknownArgumentError
from torchhal.registry._hints import argument_advice
from torchhal.suggestions import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CALLS: dict[str, tuple[str, ...]] = {}
"""Every call that was decorated -> its arguments."""


def explain_unknown_arguments(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``call``, a method, raise an error with the replacement for an argument that it doesn't take."""
    parameters = list(inspect.signature(call).parameters.values())[1:]
    names = tuple(parameter.name for parameter in parameters)
    positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)
    label = call.__qualname__.removesuffix(".__init__") + "()"
    _CALLS[label] = names

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known:
            refuse_unknown(label, kwargs, names)
        if args and not positional:
            raise UnknownArgumentError(
                f"{label} takes its arguments by name (got {', '.join(map(repr, args))}): write {label[:-1]}max_epochs="
                f"..., accelerator=..., ...); the model goes to fit",
                names=(),
            )
        return method(self, *args, **kwargs)

    known, method = set(names), cast("Callable[..., Any]", call)
    return cast("Callable[_P, _R]", checked)


def refuse_unknown(label: str, arguments: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise UnknownArgumentError, with the replacements, for ``arguments`` of ``label`` that aren't ``names``."""
    if unknown := [name for name in arguments if name not in names]:
        reasons = [_reason(label, name, arguments[name], names) for name in unknown]
        raise UnknownArgumentError("\n".join(reasons), names=tuple(unknown))


def _reason(label: str, name: str, value: Any, names: Collection[str]) -> str:
    said = f"{label} got an unexpected keyword argument {name!r}"
    owners = [owner for owner, taken in _CALLS.items() if name in taken]
    near, advice = nearest(name, names), argument_advice(name, value)
    if not label.startswith("Trainer"):  # to a callback, the arguments of the Trainer's methods are of another kind
        owners = [owner for owner in owners if "." not in owner]
        if near and not advice and "Trainer()" not in owners:  # nearer than an argument of another callback
            owners = []
    reasons = [f"it is an argument of {' and '.join(owners)}"] if owners else []
    if advice:
        reasons.append(advice)
    if reasons:
        return f"{said}: {'; '.join(reasons)}"
    if near:
        return f"{said}; did you mean {near!r}?"
    return f"{said}; it takes {', '.join(names)}"
