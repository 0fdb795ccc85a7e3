"""Call the hooks of callbacks and model in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torchhal._overrides import implements
from torchhal.trainer._call_signatures import adapt_batch_hook
from torchhal.trainer._run_adapters import Adapters
from torchhal.trainer._run_part import RunPart


def module_hook(module: Any, name: str) -> Callable[..., Any] | None:
    """Return the model's own body of a hook, or None."""
    if not implements(module, name):
        return None
    function: Callable[..., Any] = getattr(module, name)
    return function


class HookContext(Protocol):
    """The attributes of a :class:`~torchhal.trainer.run_state.RunState` on which its hooks depend."""

    module: Any
    callbacks: list[Any]
    adapters: Adapters
    current_hook: str | None

    @property
    def trainer(self) -> Any: ...


class Hooks(RunPart[HookContext]):
    """The hooks that callbacks and model override, looked up once per stage: a loop never calls an empty hook."""

    def __init__(self, run: HookContext) -> None:
        super().__init__(run)
        self._bound: dict[str, tuple[list[Callable[..., Any]], list[Callable[..., Any]]]] = {}
        self._around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Call ``around(name, body)`` instead of each body of a hook from now on; None: the bodies themselves.

        For a strategy that has to observe what hooks do. ``around`` may return a body unchanged.
        """
        self._around = around
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bound": {}, "_around": None}  # a copy belongs to no run

    def refresh(self) -> None:
        """Clear the cache; callbacks may have been added."""
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
            for callback in self.run.callbacks:
                if implements(callback, name):
                    after = _comes_after(callback, name, self.run.adapters.kind_of_callback(callback))
                    bound[after].append(self._made(name, self.run.adapters.bind_callback(callback, name)))
        return bound

    def of_module(self, name: str) -> Callable[..., Any] | None:
        run = self.run
        return self._made(name, run.adapters.bind_model(run.module, name)) if implements(run.module, name) else None

    def _made(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        return body if self._around is None else self._around(name, body)

    def call(self, name: str, *args: Any) -> None:
        """Callbacks, the model, then the callbacks that need the effect of the model's hook."""
        run = self.run
        trainer, module = run.trainer, run.module
        previous, run.current_hook = run.current_hook, name
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
            run.current_hook = previous

    def of_batch(self, name: str, arguments: int) -> Callable[..., None] | None:
        """:meth:`call` for a hook of an evaluation's batch, decided once for all batches; None if it isn't overridden.

        Args:
            name: the hook.
            arguments: how many the result is called with; the last one is ``dataloader_idx``, which each body gets if
                its signature takes it.
        """
        run = self.run
        trainer, module = run.trainer, run.module
        before, after = (
            [adapt_batch_hook(function, 2 + arguments) for function in bodies] for bodies in self.around_module(name)
        )
        own = self.of_module(name)
        if own is not None:
            own = adapt_batch_hook(own, arguments)
        if not (before or after) and own is None:
            return None

        def call(*args: Any) -> None:
            previous, run.current_hook = run.current_hook, name
            try:
                for body in before:
                    body(trainer, module, *args)
                if own is not None:
                    own(*args)
                for body in after:
                    body(trainer, module, *args)
            finally:
                run.current_hook = previous

        return call

    def has(self, name: str) -> bool:
        return any(self.around_module(name)) or self.of_module(name) is not None


def _comes_after(callback: Any, name: str, kind: str | None) -> bool:
    """Return whether ``callback``, which stands in for one of ``kind``, is called after the model in the hook."""
    monitors = kind in ("checkpoint", "early_stopping") or getattr(callback, "monitors", False)
    after = kind == "checkpoint" or getattr(callback, "runs_after_module", False)
    return bool((monitors and name.endswith("_epoch_end")) or after)
