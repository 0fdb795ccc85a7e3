"""A step of a module run as the forward of what wraps the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forward_through(strategy: Any, module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` run as the forward of ``strategy.model``, which wraps ``module`` and hooks only forward.

    While the wrapper calls the module, the module's forward is the step; inside the step it is its own again, so
    that the user's ``self(x)`` means what it says. The wrapper is looked up each time: whoever keeps the step does not
    keep the wrapper, and what it holds of the process group, beyond the strategy's life.
    """
    attributes = module.__dict__
    own_forward: Any = None  # one that was set on the instance, perhaps in the midst of training

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if own_forward is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = own_forward
        return step(*args, **kwargs)

    def call(*args: Any) -> Any:
        nonlocal own_forward
        own_forward = attributes.get("forward")
        attributes["forward"] = redirected
        try:
            return strategy.model(*args)
        finally:
            if attributes.get("forward") is redirected:  # the wrapper never reached the module
                if own_forward is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = own_forward

    return call
