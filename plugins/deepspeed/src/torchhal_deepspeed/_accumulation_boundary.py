"""Prepare the engine for steps that it can't run as plain calls: manual ones, and batches without a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def manual_step(engine: Any, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step``, of a module that optimizes by hand, with its forwards going through the engine.

    Its backward passes run inside it, and the engine must have run the forward that they begin with: each ``self(...)``
    goes through the engine instead.
    """
    attributes = vars(module)

    def run(*args: Any) -> Any:
        before = attributes.get("forward")
        forward = module.forward  # bound: the class's own, or one that was set on the instance
        attributes["forward"] = lambda *inputs, **options: engine(forward, *inputs, **options)
        try:
            return step(*args)
        finally:
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before

    return run


class no_accumulation_boundary:
    """A context for batches of an accumulation that more will follow: the engine keeps their gradients."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)

    def __exit__(self, *exc_info: object) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
