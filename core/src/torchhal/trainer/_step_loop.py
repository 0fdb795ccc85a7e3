"""Run one training step in the Trainer's order on given objects, and say which phase it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal._overrides import implements, overrides
from torchhal.errors import ModelError
from torchhal.precision import Precision, needs_closure
from torchhal.step_memory import Phase
from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer.loops._optimization import extract_loss


class StepLoop:
    """Training steps of ``module``, which is nobody else's: its ``log`` and ``optimizers`` are replaced on the object.

    The loss is not scaled, and no hook is called but ``training_step``.

    Args:
        module: on the device, converted to the precision.
        optimizers: of its parameters.
        precision: whose contexts are entered.
        on_phase: called when a phase begins.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        precision: Precision,
        on_phase: Callable[[Phase], None],
    ) -> None:
        self.module: Any = module
        self.optimizers = list(optimizers)
        self.on_phase = on_phase
        self.automatic = bool(getattr(module, "automatic_optimization", True))
        for optimizer in self.optimizers:
            if needs_closure(optimizer):
                raise ModelError(f"{type(optimizer).__name__} evaluates the loss inside of its step")
        self._clears_early = not any(
            implements(module, name) for name in ("on_before_zero_grad", "optimizer_zero_grad")
        )
        self._replace_methods()
        training_step = cast("Callable[..., Any]", self.module.training_step)
        step = self._with_precision(precision, training_step)
        self._step = adapt_step(step, training_step, several_loaders=False)

    def _replace_methods(self) -> None:
        own = vars(self.module)
        for name in ("log", "log_dict", "toggle_optimizer", "untoggle_optimizer", "print"):
            if hasattr(self.module, name):
                own[name] = _nothing
        if hasattr(self.module, "lr_schedulers"):
            own["lr_schedulers"] = list
        if hasattr(self.module, "optimizers") and callable(self.module.optimizers):
            own["optimizers"] = lambda *args, **kwargs: (
                self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
            )
        if not self.automatic:
            own["manual_backward"] = self._backward
            for optimizer in self.optimizers:
                vars(optimizer)["step"] = self._announced(optimizer.step)

    def _announced(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.on_phase("optimizer")
            result = step(*args, **kwargs)
            self.on_phase("forward")
            return result

        return run

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.on_phase("backward")
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.automatic:
            self.on_phase("forward")

    @staticmethod
    def _with_precision(precision: Precision, function: Callable[..., Any]) -> Callable[..., Any]:
        convert_output = precision.convert_output if overrides(precision, Precision, "convert_output") else None

        def step(batch: Any, *rest: Any) -> Any:
            with precision.forward_context():
                output = function(precision.convert_input(batch), *rest)
            return output if convert_output is None else convert_output(output)

        return step

    def run(self, batch: Any) -> None:
        """Take one step with ``batch``, in the Trainer's order.

        Raises:
            ModelError: ``training_step`` returns no loss.
        """
        optimizer = self.optimizers[0] if self.optimizers and self.automatic else None
        if self._clears_early and optimizer is not None:
            optimizer.zero_grad()
        self.on_phase("forward")
        output = self._step(batch, 0, 0)
        if optimizer is None:
            return
        loss = extract_loss(output, type(self.module).__name__)
        if loss is None:
            raise ModelError(f"{type(self.module).__name__}.training_step returns no loss for this batch")
        if not self._clears_early:
            optimizer.zero_grad()
        self._backward(loss)
        self.on_phase("optimizer")
        optimizer.step()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a method whose effect no step needs."""
