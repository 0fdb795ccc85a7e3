"""Call steps and hooks with those of their arguments that their signatures take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torchhal.errors import ModelError


def positional_arguments(function: Callable[..., Any]) -> int | None:
    """Return how many positional arguments ``function`` takes, through ``functools.wraps``; None for ``*args``."""
    count = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            count += 1
    return count


def adapt_step(
    step: Callable[..., Any], signature_of: Callable[..., Any], *, several_loaders: bool
) -> Callable[..., Any]:
    """``call(batch, batch_idx, dataloader_idx)`` for a step that may take fewer arguments.

    ``dataloader_idx`` is passed when there are several loaders or when the step can't do without it.
    """
    count = positional_arguments(signature_of)
    if count == 0:
        raise ModelError(f"{_name(signature_of)} must take at least the batch (it takes no argument)")
    if count == 1:
        return lambda batch, batch_idx, dataloader_idx: step(batch)
    if several_loaders and (count is None or count >= 3):
        return step
    if count is not None and count >= 3 and _required(signature_of) >= 3:
        return step
    if several_loaders:
        raise ModelError(
            f"{_name(signature_of)} must take (batch, batch_idx, dataloader_idx): there are several loaders"
        )
    return lambda batch, batch_idx, dataloader_idx: step(batch, batch_idx)


def adapt_batch_hook(hook: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """``call(*arguments)`` for a hook of a batch that may do without the last one, ``dataloader_idx``.

    It is passed, by position or by name, to a hook whose signature takes it.
    """
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # of a builtin: it has to take what is documented
        return hook
    given = (None,) * arguments
    if binds(signature, *given):
        return hook
    if binds(signature, *given[:-1], dataloader_idx=None):
        return lambda *args: hook(*args[:-1], dataloader_idx=args[-1])
    return lambda *args: hook(*args[:-1])


def binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Return whether what has ``signature`` can be called with these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _required(function: Callable[..., Any]) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
