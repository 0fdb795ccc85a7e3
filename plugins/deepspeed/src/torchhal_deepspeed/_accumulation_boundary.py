"""Steps of which the engine has to know more than that they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def manual_step(engine: Any, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` of a module that optimizes by hand: its backward passes run inside it, and the engine has to have seen
    what they begin with. Each ``self(...)`` goes through the engine instead."""
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
    """Entered for the batches of an accumulation that more will follow: the engine keeps their gradients."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        self.engine.set_gradient_accumulation_boundary(False)

    def __exit__(self, *exc_info: object) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
