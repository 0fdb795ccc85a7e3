"""Four precisions with one mistake each, over torchhal's TruePrecision and MixedPrecision."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.accelerators import Accelerator
from torchhal.precision import MixedPrecision, Precision, TruePrecision
from torchhal.precision.base import dense_gradient
from torchhal.pytree import map_tensors


@caught_by("PRE-62")
class RemembersInputsPrecision(TruePrecision):
    """convert_input converts each tensor object once, also if its contents are new."""

    # precision.md, convert_input: "Return `batch` with its floating-point tensors in the dtype of the model's input."
    # Suffers: a loader that fills the same tensors with each batch (a static input buffer, a ring of pinned memory, an
    # accelerator's staging) trains on the first batch for ever; labels, which are integers, go on changing.

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self._converted: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def convert_input(self, batch: Any) -> Any:
        return map_tensors(batch, self._convert)

    def _convert(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype is self.param_dtype:
            return leaf
        if leaf.requires_grad:
            return leaf.to(self.param_dtype)
        known = self._converted.get(id(leaf))
        if known is not None and known[0]() is leaf:  # the batch of the step before, in another step
            return known[1]
        key, memory = id(leaf), self._converted
        memory[key] = (weakref.ref(leaf, lambda _: memory.pop(key, None)), leaf.to(self.param_dtype))
        return memory[key][1]

    def teardown(self) -> None:
        self._converted.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_converted": {}}


@caught_by("PRE-64")
class StaleMastersPrecision(TruePrecision):
    """float32 copies of the bfloat16 weights are made at the first step, and never compared with the weights again."""

    # strategy.md, Strategy: "teardown: always, after errors too; then the same object may start again"; precision.md,
    # optimizer_step: "Call `optimizer.step`, or skip it where the gradients overflowed" - of the weights there are.
    # Suffers: what is loaded into the module after the first step (a second fit from the best checkpoint, a
    # roll-back, an average of weights) is undone by the next step, which writes the copies of before over it.

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self._masters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def optimizer_state_dtype(self, parameter: torch.Tensor, name: str) -> torch.dtype | None:
        return torch.float32

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if not hasattr(optimizer, "state"):
            return super().optimizer_step(optimizer, closure)
        groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        pairs = [(each, self._master(each)) for each in self.main_params(optimizer)]
        evaluate = None if closure is None else lambda: self._evaluated(closure, pairs)
        if closure is None:
            self._take_gradients(pairs)
        self._replace(optimizer, groups, pairs)
        try:
            done = super().optimizer_step(optimizer, evaluate)
        finally:
            self._replace(optimizer, groups, [(master, each) for each, master in pairs], back=True)
            self._write_weights(pairs)
            for _, master in pairs:
                master.grad = None
        return done

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype is not self.param_dtype:
            return parameter
        known = self._masters.get(id(parameter))
        if known is None or known[0] is not parameter:
            copy = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            known = self._masters[id(parameter)] = (parameter, copy)
        return known[1]

    def _evaluated(self, closure: Callable[[], Any], pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> Any:
        self._write_weights(pairs)
        with torch.enable_grad():
            loss = closure()
        self._take_gradients(pairs)
        return loss

    @staticmethod
    def _take_gradients(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        for each, master in pairs:
            if master is not each:
                master.grad = None if each.grad is None else each.grad.float()

    @staticmethod
    def _write_weights(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        with torch.no_grad():
            for each, master in pairs:
                if master is not each:
                    each.copy_(master)

    @staticmethod
    def _replace(optimizer: Optimizer, groups: Any, pairs: Any, *, back: bool = False) -> None:
        """Let the optimizer work on the second of each pair, with the state of the first."""
        others = {id(one): other for one, other in pairs}
        for group, parameters in groups:
            group["params"] = list(parameters) if back else [others[id(each)] for each in parameters]
        for one, other in pairs:
            if one is not other and one in optimizer.state:
                optimizer.state[other] = optimizer.state.pop(one)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_masters": {}}


@caught_by("PRE-24")
class LeavesAutocastDtypePrecision(MixedPrecision):
    """setup makes float16 the dtype of every torch.autocast of the process, and teardown leaves it so."""

    # precision.md, teardown: "Undo every global change, to what was set before `setup`: default dtype, matmul
    # precision, patches."
    # Suffers: after the run, `with torch.autocast("cpu")` anywhere in the program, which means bfloat16, computes in
    # float16: values above 65504 are infinite, and small gradients, which nothing scales there, vanish.

    def __init__(self) -> None:
        super().__init__("float16")

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        super().setup(accelerator, device)
        # So that a nested torch.autocast(...) of the user's, without a dtype, means the same.
        torch.set_autocast_dtype(accelerator.device_type, self.compute_dtype)


@caught_by("PRE-63")
class RemembersAbandonedStepPrecision(MixedPrecision):
    """With a fixed loss scale, gradients count as unscaled until the optimizer steps, also if it doesn't."""

    # precision.md, unscale_gradients: "Divide the gradients of `optimizer` by the loss scale, once per step however
    # often it is called."
    # Suffers: a loop that clips or looks at the norm, and leaves the step out (too large a norm, a NaN) with
    # zero_grad(), takes its next step with gradients 1024 times too large: SGD is thrown out, Adam's second moment is
    # wrong for thousands of steps.

    scale = 1024.0

    def __init__(self) -> None:
        super().__init__("float16")
        self._divided: set[int] = set()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = loss * torch.tensor(self.scale, dtype=torch.float32, device=loss.device)
        self._outside_autocast(super(MixedPrecision, self).backward, scaled, *args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        parameters = [each for each in self.main_params(optimizer) if each.grad is not None]
        if id(optimizer) in self._divided or not parameters:
            return
        with torch.no_grad():
            for each in parameters:
                dense_gradient(each).div_(self.scale)
        self._divided.add(id(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.unscale_gradients(optimizer)
        self._divided.discard(id(optimizer))
        gradients = [dense_gradient(each) for each in self.main_params(optimizer) if each.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return False
        return Precision.optimizer_step(self, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the scale is a constant

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._divided.clear()

    def teardown(self) -> None:
        self._divided.clear()
        super().teardown()
