"""Precisions that are each broken in one way."""

import inspect
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from zoo import caught_by

from torchhal.precision import MixedPrecision, SinglePrecision, TruePrecision
from torchhal.pytree import map_tensors

HALF = {"arguments": {"dtype": "float16"}}
BRAIN = {"arguments": {"dtype": "bfloat16"}}


@caught_by("PRE-01", **BRAIN)
class NeverConverts(TruePrecision):
    def convert_module(self, module):
        return module


@caught_by("PRE-01", **BRAIN)
class SilentlySingle(MixedPrecision):
    def forward_context(self):
        return nullcontext()


@caught_by("PRE-02", **BRAIN)
class ConvertsBuffers(TruePrecision):
    def convert_module(self, module):
        return module._apply(lambda tensor: tensor.to(self.param_dtype))


@caught_by("PRE-03", **BRAIN)
class NewParameters(TruePrecision):
    def convert_module(self, module):
        for layer in module.modules():
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    setattr(layer, name, nn.Parameter(parameter.to(self.param_dtype)))
        return module


class Leaky:
    """A context that restores nothing when its body raises."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, kind, *rest):
        if kind is None:
            torch.set_default_dtype(self.before)


@caught_by("PRE-04", **BRAIN)
class InitInFloat32(TruePrecision):
    def module_init_context(self):
        return nullcontext()


@caught_by("PRE-04", **BRAIN)
class InitLeaks(TruePrecision):
    @contextmanager
    def module_init_context(self):
        torch.set_default_dtype(self.param_dtype)
        yield


@caught_by("PRE-05", **BRAIN)
class LeaksOnError(TruePrecision):
    def module_init_context(self):
        return Leaky(self.param_dtype)


@caught_by("PRE-05")
class SwallowsErrors(SinglePrecision):
    @contextmanager
    def forward_context(self):
        try:
            yield
        except Exception:
            pass


@caught_by("PRE-06", says="autocast", **BRAIN)
class TorchsOwnContext(MixedPrecision):
    context = None

    def forward_context(self):
        if self.context is None:
            self.context = torch.autocast("cpu", self.compute_dtype)
        return self.context


@caught_by("PRE-07", **BRAIN)
class CastsLabels(TruePrecision):
    def convert_input(self, batch):
        return map_tensors(batch, lambda t: t.to(self.param_dtype) if isinstance(t, torch.Tensor) else t)


@caught_by("PRE-07", **BRAIN)
class CopiesInputs(TruePrecision):
    def convert_input(self, batch):
        floats = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point()  # noqa: E731
        return map_tensors(batch, lambda t: t.to(self.param_dtype, copy=True) if floats(t) else t)


@caught_by("PRE-08", **BRAIN)
class HalfOutput(MixedPrecision):
    def convert_output(self, output):
        return output


@caught_by("PRE-08")
class CastsCounts(SinglePrecision):
    def convert_output(self, output):
        return map_tensors(output, lambda t: t.float())


@caught_by("PRE-09", "PRE-10", **HALF)
class NeverUnscales(MixedPrecision):
    def unscale_gradients(self, optimizer):
        pass

    def optimizer_step(self, optimizer, closure=None):
        super().unscale_gradients(optimizer)
        return super().optimizer_step(optimizer, closure)


@caught_by("PRE-09")
class HalvesGradients(SinglePrecision):
    def unscale_gradients(self, optimizer):
        for parameter in self.main_params(optimizer):
            parameter.grad.mul_(0.5)


@caught_by("PRE-10")
class ReturnsNothing(SinglePrecision):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        super().clip_gradients(optimizer, clip_val, algorithm)


@caught_by("PRE-11")
class AlwaysByNorm(SinglePrecision):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        return super().clip_gradients(optimizer, clip_val, "norm")


@caught_by("PRE-12", **HALF)
class UnscalesEachTime(MixedPrecision):
    def unscale_gradients(self, optimizer):
        if id(optimizer) in self._unscaled:
            for parameter in self.main_params(optimizer):
                parameter.grad.mul_(0.5)
        super().unscale_gradients(optimizer)


@caught_by("PRE-13", **HALF)
class StepsAnyway(MixedPrecision):
    def optimizer_step(self, optimizer, closure=None):
        self.unscale_gradients(optimizer)
        optimizer.step()
        self.scaler.update()
        self._unscaled.clear()
        return True


@caught_by("PRE-13", **HALF)
class NeverLowers(MixedPrecision):
    def _end_step(self):
        scale = self.scaler.get_scale()
        super()._end_step()
        self.scaler.update(scale)


@caught_by("PRE-14", **HALF)
class SaysNothing(MixedPrecision):
    def optimizer_step(self, optimizer, closure=None):
        super().optimizer_step(optimizer, closure)
        return True


@caught_by("PRE-14")
class ReturnsNone(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        super().optimizer_step(optimizer, closure)


@caught_by("PRE-15")
class CountsBackwards(SinglePrecision):
    def __init__(self):
        self.count = 0

    def backward(self, loss, *args, **kwargs):
        self.count += 1
        super().backward(loss, *args, **kwargs)

    def state_dict(self):
        return {"count": self.count}


@caught_by("PRE-15")
class Overwrites(SinglePrecision):
    parameters = ()

    def convert_module(self, module):
        self.parameters = list(module.parameters())
        return module

    def backward(self, loss, *args, **kwargs):
        for parameter in self.parameters:
            parameter.grad = None
        super().backward(loss, *args, **kwargs)


@caught_by("PRE-16", **HALF)
class ForgetsTheScale(MixedPrecision):
    def load_state_dict(self, state):
        pass


@caught_by("PRE-17")
class PicklesItself(SinglePrecision):
    def state_dict(self):
        return {"self": self}


@caught_by("PRE-18", says="LBFGS.step() missing", **HALF)
class TakesLBFGS(MixedPrecision):
    def check_optimizer(self, optimizer):
        pass


@caught_by("PRE-18", **HALF)
class TakesLBFGSInFloat16(TruePrecision):
    def check_optimizer(self, optimizer):
        pass


@caught_by("PRE-19")
class MistakesFused(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        if optimizer.defaults.get("fused"):
            for parameter in self.main_params(optimizer):
                parameter.grad.mul_(2)
        return super().optimizer_step(optimizer, closure)


@caught_by("PRE-20", **BRAIN)
class HalfMasters(MixedPrecision):
    def convert_module(self, module):
        return module.to(torch.bfloat16)


@caught_by("PRE-21", **HALF)
class OneForAll(MixedPrecision):
    """The overflow of one optimizer counts for the other one."""

    def optimizer_step(self, optimizer, closure=None):
        before = self.last
        self.last = super().optimizer_step(optimizer, closure) and before
        return self.last

    last = True


@caught_by("PRE-22")
class FirstGroupOnly(SinglePrecision):
    def main_params(self, optimizer):
        yield from optimizer.param_groups[0]["params"]


@caught_by("PRE-22")
class Twice(SinglePrecision):
    def main_params(self, optimizer):
        yield from super().main_params(optimizer)
        yield from super().main_params(optimizer)


@caught_by("PRE-23", **BRAIN)
class TrainingOnly(MixedPrecision):
    def forward_context(self):
        return super().forward_context() if torch.is_grad_enabled() else nullcontext()


@caught_by("PRE-24")
class LeavesASwitch(SinglePrecision):
    def setup(self, accelerator, device):
        torch.set_float32_matmul_precision("medium")


@caught_by("PRE-24")
class Patches(SinglePrecision):
    original = staticmethod(inspect.getattr_static(torch.optim.SGD, "step"))

    def setup(self, accelerator, device):
        torch.optim.SGD.step = lambda self, closure=None: Patches.original(self, closure)


@caught_by("PRE-25")
class RoundsLosses(SinglePrecision):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss * 1.3, *args, **kwargs)


@caught_by("PRE-29", says="'autocast:bfloat16'", **BRAIN)
class HidesItsAutocast(MixedPrecision):
    wraps_autocast = False


@caught_by("PRE-29", says="'compute:bfloat16'", **BRAIN)
class HidesItsDtype(TruePrecision):
    needs = frozenset({"store:bfloat16"})


@caught_by("PRE-29", says="'loss_scaling'", **HALF)
class HidesItsScale(MixedPrecision):
    def __init__(self, dtype):
        super().__init__(dtype)
        self.features = frozenset()


@caught_by("PRE-29", says="'matmul:...'")
class HidesItsMatmulMode(SinglePrecision):
    def setup(self, accelerator, device):
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")

    def teardown(self):
        torch.set_float32_matmul_precision(self.before)


@caught_by("PRE-29", says="must be a frozenset of words")
class NeedsOneWord(SinglePrecision):
    needs = "compute:float32"


@caught_by("PRE-26")
class AutocastsSingle(SinglePrecision):
    def forward_context(self):
        return torch.autocast("cpu", torch.bfloat16)


@caught_by("PRE-26", says="got medium, expected highest")
class ProductsInBrain(SinglePrecision):
    def setup(self, accelerator, device):
        super().setup(accelerator, device)
        torch.set_float32_matmul_precision("medium")


@caught_by("PRE-26", **BRAIN)
class ScalesBrain(MixedPrecision):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss * 2, *args, **kwargs)


class Dithers(SinglePrecision):
    """A precision of users' that adds random numbers to the weights, from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def optimizer_step(self, optimizer, closure=None):
        result = super().optimizer_step(optimizer, closure)
        with torch.no_grad():
            for parameter in self.main_params(optimizer):
                parameter += torch.rand(parameter.shape, generator=self.generator).to(parameter)
        return result

    def rank_state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_rank_state_dict(self, state):
        self.generator.set_state(state["generator"])


@caught_by("PRE-27", says="after it was loaded")
class ForgetsGenerator(Dithers):
    def load_rank_state_dict(self, state):
        pass


@caught_by("PRE-27", says="no plain data")
class SavesGenerator(Dithers):
    def rank_state_dict(self):
        return {"generator": self.generator}


@caught_by("PRE-28", says="IndexError")
class OwnPlaceOnly(Dithers):
    def reshard_rank_state(self, states, *, rank, world_size):
        return states[rank]


@caught_by("PRE-28", says="own state after reshard_rank_state")
class RestoresAtOnce(Dithers):
    def reshard_rank_state(self, states, *, rank, world_size):
        self.load_rank_state_dict(states[0])
        return states[0]


@caught_by("PRE-30", says="step 2 of Adam raised")
class ChoosesOnly(SinglePrecision):
    """Steps as torch does, which combines no dtypes."""

    def optimizer_state_dtype(self, parameter, name):
        return torch.float64


@caught_by("PRE-30", says="floating-point dtype")
class StoresIntegers(SinglePrecision):
    def optimizer_state_dtype(self, parameter, name):
        return torch.int8
