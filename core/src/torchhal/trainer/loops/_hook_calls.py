"""Calling user code: hooks of callbacks and model, and steps with the arguments their signatures take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torchhal._overrides import overrides
from torchhal.errors import ModelError
from torchhal.module import ModuleHooks
from torchhal.trainer._part import TrainerPart
from torchhal.trainer.callbacks import Callback


def positional_arguments(function: Callable[..., Any]) -> int | None:
    """How many positional arguments ``function`` takes, through ``functools.wraps``; None for ``*args``."""
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
    """Whether what has ``signature`` can be called with these arguments."""
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


def module_hook(module: Any, name: str) -> Callable[..., Any] | None:
    """The model's own body of a hook, or None."""
    if not hasattr(module, name) or not overrides(module, ModuleHooks, name):
        return None
    function: Callable[..., Any] = getattr(module, name)
    return function


class Hooks(TrainerPart):
    """Who overrides which hook: looked up once per stage, so that a loop calls nothing that is empty."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._bound: dict[str, tuple[list[Callable[..., Any]], list[Callable[..., Any]]]] = {}
        self._around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Call from now on what ``around`` makes of a hook's name and a body of it; None: the bodies themselves.

        For a strategy that has to know what hooks do. It may give a body back as it is.
        """
        self._around = around
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bound": {}, "_around": None}  # a copy is of no run

    def refresh(self) -> None:
        """Forget; callbacks may have been added."""
        self._bound.clear()

    def of_callbacks(self, name: str) -> list[Callable[..., Any]]:
        """Return the callbacks' bodies of ``name``, in the order of their calls with (trainer, module, ...)."""
        before, after = self.around_module(name)
        return before + after

    def around_module(self, name: str) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
        """Return the bodies of :meth:`of_callbacks` that come before the model's own, and those that come after it."""
        bound = self._bound.get(name)
        if bound is None:
            bound = self._bound[name] = ([], [])
            for callback in self.trainer.callbacks:
                if hasattr(callback, name) and overrides(callback, Callback, name):
                    bound[_comes_after(callback, name)].append(self._made(name, getattr(callback, name)))
        return bound

    def of_module(self, name: str) -> Callable[..., Any] | None:
        own = module_hook(self.trainer.module, name)
        return None if own is None else self._made(name, own)

    def _made(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        return body if self._around is None else self._around(name, body)

    def call(self, name: str, *args: Any) -> None:
        """Callbacks, the model, then the callbacks that want what the model's hook has done."""
        trainer, module = self.trainer, self.trainer.module
        previous, trainer.current_hook = trainer.current_hook, name
        before, after = self.around_module(name)
        try:
            for function in before:
                function(trainer, module, *args)
            own = self.of_module(name)
            if own is not None:
                own(*args)
            for function in after:
                function(trainer, module, *args)
        finally:
            trainer.current_hook = previous

    def of_batch(self, name: str, arguments: int) -> Callable[..., None] | None:
        """:meth:`call` for a hook of an evaluation's batch, decided once for all batches; None where nobody has it.

        Args:
            name: the hook.
            arguments: how many the result is called with; the last one is ``dataloader_idx``, which each body gets if
                its signature takes it.
        """
        trainer, module = self.trainer, self.trainer.module
        before, after = (
            [adapt_batch_hook(function, 2 + arguments) for function in bodies] for bodies in self.around_module(name)
        )
        own = self.of_module(name)
        if own is not None:
            own = adapt_batch_hook(own, arguments)
        if not (before or after) and own is None:
            return None

        def call(*args: Any) -> None:
            previous, trainer.current_hook = trainer.current_hook, name
            try:
                for body in before:
                    body(trainer, module, *args)
                if own is not None:
                    own(*args)
                for body in after:
                    body(trainer, module, *args)
            finally:
                trainer.current_hook = previous

        return call

    def has(self, name: str) -> bool:
        return any(self.around_module(name)) or self.of_module(name) is not None


def _comes_after(callback: Any, name: str) -> bool:
    """Whether ``callback`` is called after the model in the hook ``name``."""
    monitors = name.endswith("_epoch_end") and getattr(callback, "monitors", False)
    return bool(monitors or getattr(callback, "runs_after_module", False))
