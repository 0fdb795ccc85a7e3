"""Run a step of a module as the forward of its wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def forward_through(strategy: Any, module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` as the forward of ``strategy.model``, which wraps ``module`` and hooks only forward.

    While the wrapper calls the module, the module's forward is the step; inside the step it is its own again, so
    that the user's ``self(x)`` calls it. The same holds for its hooks: those that the user has registered belong to
    ``self(x)`` and would get the step's batch and loss otherwise, while those of the wrapper belong to its call. The
    wrapper is looked up each time: a reference to the step doesn't keep the wrapper, and its references to the process
    group, alive after the strategy's teardown.
    """
    attributes = module.__dict__
    own: dict[str, Any] = {}
    """Replacements for attributes of the module; a forward only if one was set on the instance."""

    def restore() -> None:
        if "forward" not in own:
            attributes.pop("forward", None)
        attributes.update(own)

    def redirected(*args: Any, **kwargs: Any) -> Any:
        hidden = {name: attributes[name] for name in own if name != "forward"}
        restore()
        output = step(*args, **kwargs)
        if hidden:  # torch reads them once more, if the wrapper has hooks or there are global ones
            own.update((name, attributes[name]) for name in hidden)
            attributes.update(hidden)
        return output

    def call(*args: Any) -> Any:
        own.clear()
        if "forward" in attributes:
            own["forward"] = attributes["forward"]
        wrapper = strategy.model
        if any(map(attributes.get, _HOOKS)):
            for name in _HOOKS:
                own[name] = attributes[name]
                attributes[name] = _of_wrapper(own[name], wrapper, module)
        attributes["forward"] = redirected
        try:
            return wrapper(*args)
        finally:
            if attributes.get("forward") is redirected:  # the wrapper didn't call the module
                restore()
            else:
                attributes.update((name, own[name]) for name in own if name != "forward")

    return call


def _of_wrapper(hooks: OrderedDict[int, Any], wrapper: Any, module: Any) -> OrderedDict[int, Any]:
    """Return the hooks that a wrapper has registered, the library that it is from, or ``torch.distributed``.

    torch's DistributedDataParallel registers methods of its own, and ``fully_shard`` those of its state; torch's other
    functions come from ``torch.nn.utils``, which the user has called.
    """
    library = _package(type(wrapper))
    is_library = library not in ("torch", "__main__", _package(type(module)))

    def is_own(hook: Any) -> bool:
        hook = getattr(hook, "func", hook)
        owner = getattr(hook, "__self__", None)
        places = [str(getattr(each, "__module__", "")) for each in (hook, type(owner))]
        return (
            owner is wrapper
            or any(place.startswith("torch.distributed.") for place in places)
            or (is_library and _package(hook) == library)
        )

    return OrderedDict((number, hook) for number, hook in hooks.items() if is_own(hook))


def _package(named: Any) -> str:
    return str(getattr(named, "__module__", "")).partition(".")[0]
