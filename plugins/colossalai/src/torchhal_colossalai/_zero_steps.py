"""Steps under Colossal-AI's ZeRO: gradients that are averaged and clipped, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchhal.strategies import StepResult
from torchhal.strategies.gradient_averaging import GradientAveragingStrategy
from torchhal.strategies.sharded_optimizers import ShardedOptimizersStrategy, deferred_step_hooks
from torchhal_colossalai import _compatibility as compatibility
from torchhal_colossalai._base import ColossalAIStrategy
from torchhal_colossalai._element_trial import ElementTrial
from torchhal_colossalai._gradients import GradientReducer
from torchhal_colossalai._shard_state import divide_state
from torchhal_colossalai._zero_engine import ZeroEngine


class ZeroSteps(ColossalAIStrategy, ShardedOptimizersStrategy, GradientAveragingStrategy):
    """The part of :class:`.ColossalAIZeroStrategy` that runs steps with its engines."""

    arguments_of_base: ClassVar[tuple[str, ...]] = ("find_unused_parameters",)

    def __init__(
        self,
        *,
        plugin: str | None = None,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(plugin=plugin, options=options, **arguments)
        self.stage: int = self.plugin_options.get("stage", 1)
        self.engines: dict[Optimizer, ZeroEngine] = {}
        """Colossal-AI's part of each optimizer, in a fit of several ranks; ``engine.zero`` is its own object."""
        self.boosted_module: Any = None
        """What the booster has returned for the module, as its methods for checkpoints take it."""
        self._reducer: GradientReducer | None = None
        self._unscaled: set[int] = set()
        self._lost_state = False
        self._element_trials: dict[int, ElementTrial] = {}
        """By the ``id`` of the optimizer."""

    def _divide(self, optimizer: Optimizer) -> None:
        """Let Colossal-AI divide the parameters that the optimizer has now."""
        assert self.module is not None
        module = self.module if self.boosted_module is None else self.boosted_module
        before = self.engines.get(optimizer)
        engine = ZeroEngine(self.booster, module, optimizer, self.stage, before)
        if before is not None:
            engine.take_gradients(before)
        else:
            with self.guard("division of the optimizer's state"):
                divide_state(engine)
        self.boosted_module, self.engines[optimizer] = engine.boosted_module, engine

    def follow_parameters(self) -> None:
        """Divide again where a group was added to an optimizer, or a parameter has other memory."""
        for optimizer, engine in list(self.engines.items()):
            if not engine.is_current():
                self._divide(optimizer)

    # -- gradients -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._reducer is not None and any(id(each) in self._unscaled for each in self.engines):
            self._reducer.check_unscaled(self._unscaled)
        super().backward(loss, *args, **kwargs)
        if self._reducer is not None and not self.averaging_is_paused:
            with self.guard("averaging of the gradients"):
                self._reducer.reduce()

    def sync_gradients(self) -> None:
        if self._reducer is None:
            super().sync_gradients()
            return
        with self.guard("averaging of the gradients"):
            self._reducer.reduce(frozen=True)
        self.gradients_synced = True

    def _divided_gradients(self, optimizer: Optimizer) -> ZeroEngine | None:
        """Return the engine that has the gradients of ``optimizer`` in parts, if there is one."""
        return self.engines.get(optimizer) if self.stage == 2 else None

    def zero_grad(self, optimizer: Optimizer) -> None:
        super().zero_grad(optimizer)
        if (engine := self._divided_gradients(optimizer)) is not None:
            engine.zero_grad()
            self._unscaled.discard(id(optimizer))

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if (engine := self._divided_gradients(optimizer)) is None:
            super().unscale_gradients(optimizer)
            return
        with engine.gradients_on_shards() as shards:
            if "scales_loss" in self.precision.features and shards:
                self._agree_on_overflow(shards)
                self._unscaled.add(id(optimizer))
            super().unscale_gradients(optimizer)

    def _agree_on_overflow(self, shards: Sequence[torch.Tensor]) -> None:
        """Let an infinite gradient be one on every rank: all come to the same decision whether to step."""
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        flag = torch.tensor([0.0 if finite else 1.0], device=self.root_device)
        with self.guard("comparison of infinite gradients"):
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if float(flag):
            gradients[0].view(-1)[0] = torch.inf

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip by the norm over all ranks' parts, in the order of sums of one process, or by value."""
        if (engine := self._divided_gradients(optimizer)) is None:
            return super().clip_gradients(optimizer, clip_val, algorithm)
        if algorithm != "norm":
            self.unscale_gradients(optimizer)
            with engine.gradients_on_shards():
                return self.precision.clip_gradients(optimizer, clip_val, algorithm)
        norm = self.grad_norm(optimizer)
        with engine.gradients_on_shards() as shards:
            torch.nn.utils.clip_grads_with_norm_(shards, clip_val, norm)
        return norm

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        if (engine := self._divided_gradients(optimizer)) is None:
            return super().grad_norm(optimizer)
        self.unscale_gradients(optimizer)
        with self.guard("the norm of the gradients"):
            norms = [torch.linalg.vector_norm(whole) for _, whole in engine.whole_gradients()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.root_device)

    # -- the step --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, *, with_closure: bool = False) -> AbstractContextManager[None]:
        if (trial := self._element_trials.get(id(optimizer))) is not None:
            trial.before_step()
        return super().before_step(optimizer, with_closure=with_closure)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if optimizer not in self.engines:
            return super().optimizer_step(optimizer, closure)
        if closure is not None:  # it has the gradients of all parameters, as in one process
            with torch.enable_grad():
                closure()
        compatibility.check_no_step_pre_hooks(self.module, optimizer, self.stage)
        self.follow_parameters()
        self.unscale_gradients(optimizer)  # the same on all ranks, which come to the same decision
        watched = self.before_step(optimizer)
        results: list[StepResult] = []

        def run_step() -> None:
            results.append(super(ZeroSteps, self).optimizer_step(optimizer, None))

        with deferred_step_hooks(optimizer):  # which see, and may change, whole parameters
            with watched, self.guard("sending of the updated parameters"):
                self.engines[optimizer].step(run_step)
            self._unscaled.discard(id(optimizer))
        return results[0]
