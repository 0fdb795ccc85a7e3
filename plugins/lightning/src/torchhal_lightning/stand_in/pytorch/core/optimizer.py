"""LightningOptimizer, as which a module sees the objects by which it steps optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


class LightningOptimizer:
    """The base of what ``self.optimizers()`` returns; the Trainer makes them.

    Attributes:
        optimizer: torch's.
    """

    optimizer: Any
    _strategy: Any

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients inside of the context.

        Args:
            sync_grad: whether the ranks average gradients at a backward in it.
        """
        module = self._strategy.lightning_module
        module.toggle_optimizer(self)
        try:
            with nullcontext() if sync_grad else self._strategy.block_backward_sync():
                yield
        finally:
            module.untoggle_optimizer(self)
