"""Measure the memory of a training step by a real one on the device, where fake tensors can't take it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.errors import FakeStepError
from torchhal.memory_estimate import ModelMemory
from torchhal.precision import Precision
from torchhal.pytree import move_module
from torchhal.rng import host_generators_restored
from torchhal.step_memory import Moment, Phase, StepMemory
from torchhal.trainer._step_loop import StepLoop


class RealStep:
    """A :class:`.TrainingStep` with values on a device that counts its memory; two steps of a copy of the model.

    It has no timeline of modules: each phase is one moment.

    Args:
        make: returns a model with values, on the CPU, and its optimizers, which are this object's own.
        model: its sizes.
        batch: one rank's batch, as its loader gives it.
        accelerator: of the device.
        device: on which the steps run.
        precision: of the step, after its ``setup``.
    """

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
        model: ModelMemory,
        batch: Any,
        *,
        accelerator: Accelerator,
        device: torch.device,
        precision: Precision | None = None,
    ) -> None:
        self.make = make
        self.model = model
        self.batch = batch
        self.accelerator = accelerator
        self.device = device
        self.precision = Precision() if precision is None else precision
        self._measured: StepMemory | None = None

    @property
    def module(self) -> nn.Module:
        """The model on the meta device."""
        return self.model.module

    def measure(
        self,
        *,
        shape_of: Callable[[str, nn.Parameter], Sequence[int] | None] | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
        foreach: bool | None = None,
    ) -> StepMemory:
        """Return what two real steps take on the device; whole layers also where ``shape_of`` is given.

        Raises:
            FakeStepError: the device keeps no count of its memory.
        """
        if prepare is None and self._measured is not None:
            found = self._measured
        else:
            with host_generators_restored():
                state = rng.collect(self.accelerator, self.device)
                try:
                    found = self._measure(prepare)
                finally:
                    rng.restore(state, self.accelerator, self.device)
            if prepare is None:
                self._measured = found
        if shape_of is None:
            return found
        return replace(found, note=f"{found.note}; its activations are those of whole layers")

    def _measure(self, prepare: Callable[[nn.Module], None] | None) -> StepMemory:
        counters = _Counters(self.accelerator, self.device)
        module, optimizers = self.make()
        if prepare is not None:
            prepare(module)
        move_module(module, self.device)
        batch = self.accelerator.batch_to_device(copy.deepcopy(self.batch), self.device)
        self.accelerator.synchronize(self.device)
        size = counters.allocated() - counters.start
        whole = self.model.estimate()
        size -= whole.parameters + whole.buffers
        loop = StepLoop(module, optimizers, self.precision, counters.begin)
        loop.run(batch)
        counters.peaks.clear()
        loop.run(batch)
        counters.begin("forward")
        held = counters.start + whole.parameters + whole.buffers + whole.optimizer + max(0, size)
        gradients: dict[Phase, int] = {"forward": 0, "backward": whole.gradients, "optimizer": whole.gradients}
        moments = [
            Moment(phase, "", max(0, counters.peaks.get(phase, 0) - held - there), there)
            for phase, there in gradients.items()
        ]
        return StepMemory(
            whole.parameters,
            whole.buffers,
            whole.gradients,
            whole.optimizer,
            max(0, size),
            tuple(moments),
            optimizer_temporary=moments[-1].activations,
            source="real step",
            note="measured by a real step, without what each module takes",
        )


class _Counters:
    """The peaks of the phases, read from the accelerator's counts."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device
        if not {"allocated", "peak"} <= set(accelerator.memory_stats(device)):
            raise FakeStepError(f"{device} keeps no count of its memory")
        self.start = self.allocated()
        self.peaks: dict[str, int] = {}
        self._phase: Phase | None = None

    def allocated(self) -> int:
        return self._accelerator.memory_stats(self._device)["allocated"]

    def begin(self, phase: Phase) -> None:
        if self._phase is not None:
            peak = self._accelerator.memory_stats(self._device)["peak"]
            self.peaks[self._phase] = max(peak, self.peaks.get(self._phase, 0))
        self._accelerator.reset_peak_memory_stats(self._device)
        self._phase = phase
