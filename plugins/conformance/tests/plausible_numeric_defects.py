"""Accelerators and precisions with defects that an author may plausibly ship.

Each was written from the contract alone, before the check that catches it: the defect shows for some inputs, in the
second group, in the second life or in the second call only.
"""

from collections import OrderedDict

import torch
from torch import nn
from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.precision import MixedPrecision, SinglePrecision, TruePrecision
from torchhal.pytree import map_tensors, moves_itself

HALF = {"arguments": {"dtype": "float16"}}
BRAIN = {"arguments": {"dtype": "bfloat16"}}


# -- accelerators --------------------------------------------------------------------------------------------


@caught_by("ACC-12")
class DropsConjugation(CPUAccelerator):
    """Copies the memory of a tensor and forgets the bit that says that it is conjugated."""

    def batch_to_device(self, batch, device, *, non_blocking=False):
        def move(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf.to(device) if moves_itself(leaf) else leaf
            return torch.conj(leaf.clone()).clone() if leaf.is_conj() else leaf.clone()

        return map_tensors(batch, move, is_leaf=moves_itself)


@caught_by("ACC-12")
class IntegersThroughFloat(CPUAccelerator):
    """Moves 0-d tensors as Python floats, which large integers don't survive."""

    def batch_to_device(self, batch, device, *, non_blocking=False):
        def move(leaf):
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and not leaf.is_complex():
                return torch.tensor(float(leaf.float())).to(leaf.dtype)
            return leaf if torch.is_tensor(leaf) or not moves_itself(leaf) else leaf.to(device)

        return map_tensors(batch, move, is_leaf=moves_itself)


@caught_by("ACC-12")
class NoDoubleComplex(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        def move(leaf):
            if isinstance(leaf, torch.Tensor):
                return leaf.to(torch.complex64).to(leaf.dtype) if leaf.is_complex() else leaf
            return leaf.to(device) if moves_itself(leaf) else leaf

        return map_tensors(batch, move, is_leaf=moves_itself)


@caught_by("ACC-13")
class PlainTuples(CPUAccelerator):
    """Rebuilds a named tuple at the top of a container, and a plain one deeper in."""

    def batch_to_device(self, batch, device, *, non_blocking=False):
        def rebuild(value, depth):
            if isinstance(value, tuple):
                items = [rebuild(item, depth + 1) for item in value]
                return type(value)(*items) if hasattr(value, "_fields") and depth < 2 else tuple(items)
            if type(value) in (list, dict, OrderedDict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                made = [(key, rebuild(item, depth + 1)) for key, item in items]
                return [item for _, item in made] if isinstance(value, list) else type(value)(made)
            return super(PlainTuples, self).batch_to_device(value, device, non_blocking=non_blocking)

        return rebuild(batch, 0)


@caught_by("ACC-13")
class OrdinaryDicts(CPUAccelerator):
    """Rebuilds every mapping as a dict."""

    def batch_to_device(self, batch, device, *, non_blocking=False):
        if isinstance(batch, dict):
            return {key: self.batch_to_device(value, device) for key, value in batch.items()}
        return super().batch_to_device(batch, device, non_blocking=non_blocking)


@caught_by("ACC-14")
class ShortSeeds(CPUAccelerator):
    """Hands the seed to a library that takes 32 bits."""

    def manual_seed(self, seed):
        super().manual_seed(int.from_bytes(seed.to_bytes(4, "little"), "little"))


@caught_by("ACC-14")
class OneStateBuffer(CPUAccelerator):
    """Returns its random state in one buffer, which the next call overwrites."""

    def get_rng_state(self, device):
        state = super().get_rng_state(device)
        buffer = self.__dict__.setdefault("_buffer", torch.empty_like(state))
        return buffer.copy_(state)


@caught_by("ACC-04")
class ListsOnly(CPUAccelerator):
    """Takes only lists for sequences, and any other sequence for its length."""

    def parse_devices(self, devices):
        if isinstance(devices, range):
            devices = len(devices)
        return super().parse_devices(devices)


@caught_by("ACC-10")
class OneLife(CPUAccelerator):
    """Can't be set up again after a teardown."""

    def teardown(self):
        super().teardown()
        self._closed = True

    def setup_device(self, device):
        if getattr(self, "_closed", False) and device.type == "cpu":
            raise RuntimeError("the runtime was shut down")
        super().setup_device(device)


@caught_by("ACC-31")
class SetsDefaultDtype(CPUAccelerator):
    """Sets what is fast on the hardware as everybody's default."""

    def setup_device(self, device):
        super().setup_device(device)
        torch.set_float32_matmul_precision("medium")


@caught_by("ACC-31")
class WarmsUpRandomly(CPUAccelerator):
    """Warms the device up with random numbers, which are missing in the program's stream."""

    def setup_device(self, device):
        super().setup_device(device)
        torch.rand(2, 2) @ torch.rand(2, 2)


# -- precisions ----------------------------------------------------------------------------------------------


@caught_by("PRE-10")
class ClipsEachGroup(SinglePrecision):
    """Clips every parameter group by its own norm."""

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if algorithm != "norm":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        norms = [nn.utils.clip_grad_norm_(group["params"], clip_val) for group in optimizer.param_groups]
        return torch.stack(norms).norm()


@caught_by("PRE-11")
class ClipsFirstGroupByValue(SinglePrecision):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if algorithm == "value":
            return nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], clip_val)
        return super().clip_gradients(optimizer, clip_val, algorithm)


@caught_by("PRE-10")
class DividesByTheNorm(SinglePrecision):
    """Makes NaN of gradients that are all zero."""

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if algorithm != "norm":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        grads = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for grad in grads:
            grad.mul_(clip_val / norm if not norm > 0 or norm > clip_val else 1.0)
        return norm


@caught_by("PRE-07", **BRAIN)
class TwoLevels(TruePrecision):
    """Converts inputs down to the second level."""

    def convert_input(self, batch):
        def convert(value, depth):
            if isinstance(value, torch.Tensor):
                return value.to(self.param_dtype) if value.is_floating_point() else value
            if depth < 3 and type(value) in (list, tuple):
                return type(value)(convert(item, depth + 1) for item in value)
            if depth < 3 and type(value) is dict:
                return {key: convert(item, depth + 1) for key, item in value.items()}
            return value

        return convert(batch, 0)


@caught_by("PRE-07", **BRAIN)
class NotDoubles(TruePrecision):
    """Converts float32 inputs only."""

    def convert_input(self, batch):
        def convert(leaf):
            return leaf.to(self.param_dtype) if torch.is_tensor(leaf) and leaf.dtype is torch.float32 else leaf

        return map_tensors(batch, convert)


@caught_by("PRE-08", **BRAIN)
class OutputsInFloat32(TruePrecision):
    """Converts outputs to float32, whatever the default dtype is."""

    def convert_output(self, output):
        return map_tensors(
            output, lambda leaf: leaf.float() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf
        )


@caught_by("PRE-09", **HALF)
class UnscalesFirstGroup(MixedPrecision):
    """Unscales the first parameter group."""

    def unscale_gradients(self, optimizer):
        kept = [(p, p.grad.clone()) for g in optimizer.param_groups[1:] for p in g["params"] if p.grad is not None]
        super().unscale_gradients(optimizer)
        for parameter, grad in kept:
            parameter.grad.copy_(grad)


@caught_by("PRE-22")
class ParametersWithGradient(SinglePrecision):
    def main_params(self, optimizer):
        return (parameter for parameter in super().main_params(optimizer) if parameter.grad is not None)


@caught_by("PRE-18")
class ForgetsClosure(SinglePrecision):
    """Evaluates no closure."""

    def optimizer_step(self, optimizer, closure=None):
        optimizer.step()
        return True


@caught_by("PRE-18")
class EvaluatesTwice(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        if closure is not None:
            closure()
        return super().optimizer_step(optimizer, closure)


@caught_by("PRE-16")
class LiveState(SinglePrecision):
    """Returns the dictionary that it goes on writing to."""

    def __init__(self):
        self._state = {"steps": 0}

    def optimizer_step(self, optimizer, closure=None):
        self._state["steps"] += 1
        return super().optimizer_step(optimizer, closure)

    def state_dict(self):
        return self._state

    def load_state_dict(self, state):
        self._state = dict(state)


@caught_by("PRE-16", **HALF)
class EatsState(MixedPrecision):
    """Takes the keys out of the state that it is given."""

    def load_state_dict(self, state):
        super().load_state_dict({name: state.pop(name) for name in list(state)})


class _Gradients:
    """A context with gradients, which may be entered inside of itself."""

    def __enter__(self):
        self.__dict__.setdefault("_before", []).append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)

    def __exit__(self, *error):
        torch.set_grad_enabled(self._before.pop())


@caught_by("PRE-23")
class AlwaysRecordsGradients(SinglePrecision):
    """Enables gradients in every step."""

    def forward_context(self):
        return _Gradients()


@caught_by("PRE-02", **BRAIN)
class LeavesFrozen(TruePrecision):
    """Converts trainable parameters only."""

    def convert_module(self, module):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.param_dtype)
        return module


@caught_by("PRE-09")
class IgnoresArguments(SinglePrecision):
    """Passes no further argument to backward."""

    def backward(self, loss, *args, through=None, **kwargs):
        if through is None:
            loss.backward()
        else:
            through(loss)


@caught_by("PRE-24", **BRAIN)
class ForgetsFirstSetup(TruePrecision):
    """Remembers in a second set-up what the first one set."""

    def setup(self, accelerator, device):
        super().setup(accelerator, device)
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")

    def teardown(self):
        super().teardown()
        if hasattr(self, "_before"):
            torch.set_float32_matmul_precision(self._before)
            self._before = "highest" if self._before == "highest" else "high"


class _Draws:
    """A context that draws a random number and changes nothing else."""

    def __enter__(self):
        torch.rand(1)

    def __exit__(self, *error):
        pass


@caught_by("PRE-06")
class DrawsInForward(SinglePrecision):
    """Rounds stochastically, from everybody's generator."""

    def forward_context(self):
        return _Draws()
