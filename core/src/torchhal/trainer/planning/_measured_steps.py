"""Measure the memory of a model's training step for one strategy after another: by a fake step, or else a real one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from torchhal.accelerators import Accelerator
from torchhal.errors import FakeStepError, TorchhalError
from torchhal.memory_estimate import ModelMemory, bytes_of
from torchhal.precision import Precision
from torchhal.step_memory import MemoryByPhase, StepMemory, unknown_step
from torchhal.strategies import Strategy
from torchhal.strategies._fused_optimizers import can_fuse
from torchhal.trainer._fake_step import FakeStep
from torchhal.trainer._real_step import RealStep


class Measured(NamedTuple):
    """What a strategy needs, and the step that it follows from."""

    phases: MemoryByPhase
    step: StepMemory


class MeasuredSteps:
    """The training step of a model, for each strategy measured as it needs it.

    First on fake tensors; where the step can't run so, by a real one on the device; else not at all.

    Args:
        memory: sizes of the model, converted to the precision.
        batch: of one rank.
        accelerator: of the device.
        device: whose type a fake step has, and on which a real one runs.
        precision: of the steps, of which a copy is set up.
        make: returns the model with values, and its optimizers; None: no real step is taken.
        why_unknown: why no step can be measured; then each strategy's activations are unknown.
    """

    def __init__(
        self,
        memory: ModelMemory,
        batch: Any,
        *,
        accelerator: Accelerator,
        device: torch.device,
        precision: Precision,
        make: Callable[[], tuple[Any, Any]] | None,
        why_unknown: str = "",
    ) -> None:
        self.memory = memory
        self.batch = batch
        self.why_unknown = why_unknown
        self._batch_bytes = sum(bytes_of(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        precision = copy.deepcopy(precision)
        precision.setup(accelerator, device)
        self._given: dict[str, Any] = {"accelerator": accelerator, "device": device, "precision": precision}
        self._device_type = accelerator.device_type
        self._scales = "scales_loss" in precision.features
        self._fake = {
            fused: FakeStep(
                memory.module,
                memory.optimizers,
                batch,
                device_type=accelerator.device_type,
                precision=precision,
                fused=fused,
            )
            for fused in (False, True)
        }
        self._real = None
        if make is not None:
            self._real = RealStep(make, memory, batch, accelerator=accelerator, device=device, precision=precision)
        self.batch_bytes = 0

    def with_batch(self, batch: Any) -> MeasuredSteps:
        """Return the same with another batch, which may lie on the meta device; no real step is taken with it."""
        return MeasuredSteps(self.memory, batch, make=None, why_unknown=self.why_unknown, **self._given)

    @property
    def can_fuse(self) -> bool:
        """Whether the optimizers have fused kernels on the device, and none yet."""
        return not self._scales and can_fuse(self.memory.optimizers, self._device_type)

    def measure(self, strategy: Strategy, world_size: int, *, fused: bool = False) -> Measured:
        """Return what a rank of ``world_size`` needs under ``strategy``.

        Raises:
            TorchhalError: the strategy can't divide the model so.
        """
        step = self._step(strategy, world_size, fused)
        self.batch_bytes = step.batch
        return Measured(strategy.memory_by_phase(step, self.memory, world_size), step)

    def _step(self, strategy: Strategy, world_size: int, fused: bool) -> StepMemory:
        reason = self.why_unknown
        if not reason:
            try:
                return strategy.step_memory(self._fake[fused], world_size)
            except FakeStepError as error:
                reason = " ".join(str(error).split())
        if self._real is None or fused:
            return unknown_step(self.memory, reason, batch=self._batch_bytes)
        try:
            found: StepMemory = strategy.step_memory(self._real, world_size)
        except TorchhalError as error:
            return unknown_step(self.memory, f"{reason}; {error}", batch=self._batch_bytes)
        except Exception as error:
            reason = f"{reason}; nor on the device ({type(error).__name__}: {error})"[:500]
            return unknown_step(self.memory, reason, batch=self._batch_bytes)
        return replace(found, note=f"{found.note}; {reason}")
