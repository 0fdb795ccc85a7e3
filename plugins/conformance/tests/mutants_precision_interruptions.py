"""Precisions that are wrong about several kinds of gradients, or about steps that are empty or given up."""

import torch
from zoo import caught_by

from torchhal.errors import CheckpointMismatchError
from torchhal.precision import MixedPrecision, SinglePrecision, TruePrecision


@caught_by("PRE-50", says="dense and sparse")
class TwoNorms(SinglePrecision):
    """Clips sparse gradients by their own norm, and dense ones by theirs."""

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if algorithm != "norm":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        norms = []
        for sparse in (False, True):
            parameters = [p for p in self.main_params(optimizer) if p.grad is not None and p.grad.is_sparse is sparse]
            part = torch.optim.SGD(parameters, lr=1.0) if parameters else None
            norms += [super().clip_gradients(part, clip_val)] if part else []
        return torch.stack(norms).norm()


@caught_by("PRE-50", says="was given one")
class FillsIn(SinglePrecision):
    """Gives zeros to a parameter that has no gradient."""

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        for parameter in self.main_params(optimizer):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().clip_gradients(optimizer, clip_val, algorithm)


@caught_by("PRE-51", says="must return a bool")
class NothingToDo(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        if closure is None and all(parameter.grad is None for parameter in self.main_params(optimizer)):
            return None
        return super().optimizer_step(optimizer, closure)


@caught_by("PRE-52", says="a load and a step", arguments={"dtype": "float16"})
class GoesOnWithTheStep(MixedPrecision):
    """What the step had found before the state was loaded counts in the next update of the scale."""

    def load_state_dict(self, state):
        if self.scaler is None or not state:
            super().load_state_dict(state)
        else:
            self.scaler.load_state_dict(state)


@caught_by("PRE-53", says="after teardown()", arguments={"dtype": "bfloat16"})
class LeavesTheDefault(TruePrecision):
    def teardown(self):
        """Trust that whoever entered a context leaves it."""


@caught_by("PRE-54", says="own backward", arguments={"dtype": "float16"})
class DividesAnything(MixedPrecision):
    """Takes every gradient for one that its backward has scaled."""

    def unscale_gradients(self, optimizer):
        self._scaled = self.scaler is not None and self.scaler._scale is not None
        super().unscale_gradients(optimizer)


@caught_by("PRE-54", says="own backward after teardown()")
class AddsScaled(SinglePrecision):
    """Scales by two, and adds scaled gradients to those that were unscaled."""

    features = frozenset({"scales_loss"})
    unscaled = True

    def backward(self, loss, *args, through=None, **kwargs):
        self.unscaled = False
        super().backward(loss * 2, *args, through=through, **kwargs)

    def unscale_gradients(self, optimizer):
        if not self.unscaled:
            self.unscaled = True
            for parameter in self.main_params(optimizer):
                parameter.grad /= 2


@caught_by("PRE-55", says="autocast is on in the backward", arguments={"dtype": "bfloat16"})
class StaysInside(MixedPrecision):
    """The backward and the update run under autocast where the step does."""

    def _outside_autocast(self, function, *args, **kwargs):
        return function(*args, **kwargs)


@caught_by("PRE-55", says="step of its own")
class KeepsTheStep(SinglePrecision):
    """Replaces the optimizer's step() by one that looks at the gradients, and leaves that there."""

    def optimizer_step(self, optimizer, closure=None):
        step = type(optimizer).step
        optimizer.step = lambda *args, **kwargs: step(optimizer, *args, **kwargs)
        return super().optimizer_step(optimizer, closure)


@caught_by("PRE-56", says="must name")
class RefusesWithoutNumbers(SinglePrecision):
    def reshard_rank_state(self, states, *, rank, world_size):
        if any(states):
            raise CheckpointMismatchError("another number of ranks has saved")
        return {}
