"""Measure the memory of a training step on fake tensors: shapes of the target device, without values or the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._pytree import tree_leaves

from torchhal.errors import FakeStepError
from torchhal.precision import Precision
from torchhal.pytree import map_tensors, moves_itself
from torchhal.rng import host_generators_restored
from torchhal.step_memory import StepMemory
from torchhal.strategies._fused_optimizers import fuse
from torchhal.strategies._optimizer_trials import copy_optimizer, without_step_hooks
from torchhal.trainer._fake_copy import FakeCopy, copy_function
from torchhal.trainer._memory_counter import MemoryCounter
from torchhal.trainer._step_loop import StepLoop


class FakeStep:
    """A :class:`.TrainingStep` on fake tensors; module, optimizers, batch and random numbers stay as they are.

    The optimizers are those that step on ``module``: two steps are taken by copies of both, the second of which, when
    the optimizer's state is there, is measured. Hooks and callbacks are not called, and the loss is not scaled.

    Args:
        module: with a ``training_step``, on any device, on the meta device too; converted to the precision.
        optimizers: over its parameters.
        batch: one rank's batch, as its loader gives it.
        device_type: such as ``"cpu"``; one that torch can use here, of which nothing is allocated.
        precision: of the step, after its ``setup``.
        fused: let the copies of the optimizers step by fused kernels, see :func:`.can_fuse`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        batch: Any,
        *,
        device_type: str,
        precision: Precision | None = None,
        fused: bool = False,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.batch = batch
        self.device_type = device_type
        self.precision = Precision() if precision is None else precision
        self.fused = fused
        self._measured: dict[bool | None, StepMemory] = {}
        """Of the model as it is, by ``foreach``."""

    def measure(
        self,
        *,
        shape_of: Callable[[str, nn.Parameter], Sequence[int] | None] | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
        foreach: bool | None = None,
    ) -> StepMemory:
        """Return what the step takes on one device; see :meth:`.TrainingStep.measure`.

        Raises:
            FakeStepError: it can't run on fake tensors.
        """
        as_it_is = shape_of is None and prepare is None
        if as_it_is and foreach in self._measured:
            return self._measured[foreach]
        _check_device_type(self.device_type)
        shapes = {}
        if shape_of is not None:
            for name, parameter in self.module.named_parameters():
                if (shape := shape_of(name, parameter)) is not None:
                    shapes[id(parameter)] = tuple(shape)
        try:
            with host_generators_restored(), _quiet(), without_step_hooks():
                found = self._measure(shapes, prepare, foreach)
        except FakeStepError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise FakeStepError(
                f"a step of {type(self.module).__name__} can't run without values "
                f"({type(error).__name__}: {reason[:300]})"
            ) from error
        if as_it_is:
            self._measured[foreach] = found
        return found

    def _measure(
        self,
        shapes: dict[int, tuple[int, ...]],
        prepare: Callable[[nn.Module], None] | None,
        foreach: bool | None,
    ) -> StepMemory:
        counter = MemoryCounter(self.device_type)
        device = torch.device(self.device_type)
        # what the step reads beside the model and the batch, such as constants of its file, has values still
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            copier = FakeCopy(device, shapes)
            module = copier.module(self.module)
        optimizers = [self._copy(optimizer, copier, foreach) for optimizer in self.optimizers]
        with mode:
            for optimizer in optimizers:
                _make_state_fake(optimizer)
            batch = map_tensors(self.batch, copy_function(device), is_leaf=moves_itself)
            if prepare is not None:
                prepare(module)
            with counter:
                parameters = counter.hold(module.parameters())
                buffers = counter.hold(module.buffers())
                size = counter.hold(tree_leaves(batch))
                counter.watch(module)
                loop = StepLoop(module, optimizers, self.precision, counter.begin)
                state = sum(counter.hold(_state_of(optimizer)) for optimizer in optimizers)
                loop.run(batch)
                state += sum(counter.hold(_state_of(optimizer)) for optimizer in optimizers)
                counter.restart()
                loop.run(batch)
            gradients = sum(
                counter.size_of(parameter.grad)
                for parameter in module.parameters()
                if parameter.grad is not None and parameter.grad.layout is torch.strided
            )
        moments = tuple(counter.moments)
        stepping = max((moment.activations for moment in moments if moment.phase == "optimizer"), default=0)
        return StepMemory(
            parameters,
            buffers,
            gradients,
            state,
            size,
            moments,
            counter.saved,
            counter.results,
            counter.result_elements,
            counter.outputs,
            max(0, stepping - counter.outputs),
        )

    def _copy(self, optimizer: Optimizer, copier: FakeCopy, foreach: bool | None) -> Optimizer:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all(parameter in copier.twins for parameter in held):
            raise FakeStepError(f"the {type(optimizer).__name__} holds tensors that are no parameters of the model")
        copied = copy_optimizer(optimizer, copier.twins)
        if self.fused:
            fuse([copied])
        for original, group in zip(optimizer.param_groups, copied.param_groups, strict=True):
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = self._steps_by_foreach(original) if foreach is None else foreach
        return copied

    def _steps_by_foreach(self, group: dict[str, Any]) -> bool:
        """Return torch's default for parameters on the device: those of a fake step are of no class that has one."""
        if self.device_type not in _get_foreach_kernels_supported_devices() or group.get("differentiable"):
            return False
        if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
            return False
        return all(type(parameter) in (torch.Tensor, nn.Parameter) for parameter in group["params"])


def _check_device_type(device_type: str) -> None:
    """Raise FakeStepError for a device type that torch lacks here: autograd would end the process, without an error."""
    try:
        torch.empty(0, device=device_type)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise FakeStepError(f"torch has no device of type {device_type!r} here ({reason})") from error


def _make_state_fake(optimizer: Optimizer) -> None:
    """Give the state that a copied optimizer has already a place on the device; counters have a value.

    A counter is a number on the CPU, where also the other state of a number that is trained lies if its model does.
    """
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                counts = not (value.dim() or value.is_meta) and (parameter.dim() > 0 or name == "step")
                entry[name] = (
                    torch.tensor(0.0, dtype=value.dtype)
                    if counts
                    else torch.zeros(value.shape, dtype=value.dtype, device=parameter.device)
                )


def _state_of(optimizer: Optimizer) -> Iterator[Any]:
    for entry in optimizer.state.values():
        yield from tree_leaves(entry)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
