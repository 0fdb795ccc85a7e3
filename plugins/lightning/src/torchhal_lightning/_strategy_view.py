"""A strategy under the names and with the arguments that Lightning's modules and callbacks use."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.trainer.adapters import Run


class StrategyView:
    """``trainer.strategy``; what isn't named here is the strategy's own."""

    def __init__(self, run: Run) -> None:
        object.__setattr__(self, "_run", run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizers":
            self._run.trainer.optimizers = value
        else:
            setattr(self._run.strategy, name, value)

    @property
    def lightning_module(self) -> Any:
        return self._run.module

    @property
    def precision_plugin(self) -> PrecisionView:
        return PrecisionView(self._run)

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return list(self._run.trainer.wrapped_optimizers)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._run.strategy.manual_backward(closure_loss, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        word = str(getattr(reduce_op, "name", reduce_op)).lower() if reduce_op is not None else "mean"
        return self._run.strategy.reduce(tensor, "mean" if word == "avg" else word)


class PrecisionView:
    """``trainer.precision_plugin``; what isn't named here is the precision's own."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.strategy.precision, name)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if not clip_val:
            return
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        self._run.strategy.clip_gradients(getattr(optimizer, "optimizer", optimizer), float(clip_val), algorithm)
