"""Components of all kinds that are each broken in one way that an order of calls or an odd value shows."""

import os
import signal

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import LocalEnvironment, TorchElasticEnvironment
from torchhal.errors import ConfigurationError
from torchhal.precision import MixedPrecision, SinglePrecision
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal_simulator.accelerator import SimAccelerator

HALF = {"arguments": {"dtype": "float16"}}


@caught_by("ACC-40")
class CurrentDeviceOnly(SimAccelerator):
    def set_rng_state(self, state, device):
        super().set_rng_state(state, torch.device("sim", 0))


@caught_by("ACC-59", says="the first draw")
class SeedsInItsLibrary(CPUAccelerator):
    """Draws what its library was built to draw, until it is seeded."""

    loaded = False

    @classmethod
    def load(cls):
        if not cls.loaded:
            cls.loaded = True
            torch.default_generator.manual_seed(0)


@caught_by("ACC-59", says="the state of the device's generator")
class SeedsAtEachQuestion(CPUAccelerator):
    @classmethod
    def load(cls):
        torch.default_generator.manual_seed(torch.initial_seed())


@caught_by("ACC-41")
class CountsIndices(Accelerator):
    name = device_type = "xpu"

    def parse_devices(self, devices):
        if isinstance(devices, list):
            raise ConfigurationError(f"index {max(devices)} of {self.device_count()} devices")
        return super().parse_devices(devices)


@caught_by("ACC-42", says="raised RuntimeError: the device has failed")
class RaisesAgain(CPUAccelerator):
    def teardown(self):
        self.synchronize()
        self.empty_cache()


@caught_by("PRE-40")
class ClipsDenseOnly(SinglePrecision):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        if any(parameter.grad.is_sparse for parameter in self.main_params(optimizer)):
            return None
        return super().clip_gradients(optimizer, clip_val, algorithm)


@caught_by("PRE-41")
class YieldsTwice(SinglePrecision):
    def main_params(self, optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]


@caught_by("PRE-42", says="a second time")
class DropsArguments(SinglePrecision):
    def backward(self, loss, *args, through=None, **kwargs):
        super().backward(loss, through=through)


@caught_by("PRE-42")
class IgnoresThrough(SinglePrecision):
    def backward(self, loss, *args, through=None, **kwargs):
        super().backward(loss, **kwargs)


@caught_by("PRE-43", **HALF)
class OutsideOnly(MixedPrecision):
    """The backward does nothing under autocast."""

    def backward(self, loss, *args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            loss = loss * 0
        super().backward(loss, *args, **kwargs)


@caught_by("PRE-44", **HALF)
class LosesEarlyState(MixedPrecision):
    def load_state_dict(self, state):
        if self.scaler is not None:
            super().load_state_dict(state)


@caught_by("PRE-44", **HALF)
class StartsAnew(MixedPrecision):
    def setup(self, accelerator, device):
        self._restored = {}
        super().setup(accelerator, device)


@caught_by("PRE-45", **HALF)
class ScalesInSecret(MixedPrecision):
    def __init__(self, dtype):
        super().__init__(dtype)
        self.features = frozenset()


@caught_by("PRE-46", says="was not stepped")
class ForgetsTheFirst(SinglePrecision):
    """A second backward ends the step of every optimizer whose gradients were unscaled."""

    def unscale_gradients(self, optimizer):
        self.open = optimizer

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        self.gone = getattr(self, "open", None)

    def optimizer_step(self, optimizer, closure=None):
        return super().optimizer_step(optimizer, closure) and optimizer is not self.gone


@caught_by("CIO-40")
class OpensNothing(TorchCheckpointIO):
    def open_checkpoint(self, path):
        return {}


@caught_by("CIO-40", says="must raise CheckpointError")
class OpensAnything(TorchCheckpointIO):
    def open_checkpoint(self, path):
        return torch.load(path, weights_only=True)


@caught_by("CIO-41", says="must raise CheckpointError")
class TorchsOwnErrors(TorchCheckpointIO):
    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return torch.load(path, map_location=map_location, weights_only=weights_only)


@caught_by("ENV-40")
class CountsTooEarly(LocalEnvironment):
    def world_size(self):
        return max(super().world_size(), self._local_world_size)


@caught_by("ENV-40")
class MeetsElsewhere(LocalEnvironment):
    main_address = "127.0.0.1"


@caught_by("ENV-41")
class TakesAnyInt(TorchElasticEnvironment):
    def global_rank(self):
        return int(os.environ["RANK"])


@caught_by("ENV-41")
class TrustsAll(TorchElasticEnvironment):
    def validate_settings(self, *, num_devices, num_nodes):
        pass


@caught_by("ENV-42")
class OneNode(TorchElasticEnvironment):
    def num_nodes(self):
        return 1


@caught_by("ENV-42")
class EachItsOwnNode(TorchElasticEnvironment):
    def node_of(self, rank):
        return rank


@caught_by("ENV-43")
class ForgetsSignals(TorchElasticEnvironment):
    stop_signals = property(lambda self: (), lambda self, signals: None)


@caught_by("ENV-43", says="run_again must return a str")
class SaysNothing(TorchElasticEnvironment):
    def run_again(self, signum, *, continues):
        return None


@caught_by("ENV-43", says="job_id()")
class OwnJob(TorchElasticEnvironment):
    def job_id(self):
        return os.environ["RANK"]


@caught_by("PRE-47")
class StepsWithoutClosure(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        return super().optimizer_step(optimizer)


@caught_by("PRE-47", says="how often the closure ran")
class RunsItTwice(SinglePrecision):
    def optimizer_step(self, optimizer, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().optimizer_step(optimizer, closure)


@caught_by("STR-60")
class ForgetsAccumulation(DDPStrategy):
    def accumulated_gradients(self):
        return {}


@caught_by("STR-60", says="the accumulated gradient")
class SavesItsOwn(DDPStrategy):
    def sync_gradients(self):
        pass


@caught_by("STR-60", says="after the continued step")
class LoadsNothing(DDPStrategy):
    def load_accumulated_gradients(self, gradients):
        pass


@caught_by("STR-61", says="beside rank 0")
class SyncsForTrainingOnly(DDPStrategy):
    def sync_module(self, module):
        pass


@caught_by("STR-62", says="must tear down the rest too")
class StopsAtTheFirst(SingleDeviceStrategy):
    def teardown(self):
        self.precision.teardown()
        super().teardown()


@caught_by("STR-63", says="have a graph")
class KeepsGraphs(SingleDeviceStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return tensor.clone().unsqueeze(0)


@caught_by("STR-63", says="was written to")
class GathersViews(SingleDeviceStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return tensor.detach().unsqueeze(0)


@caught_by("STR-64", says="frozen")
class TrainsFrozen(SingleDeviceStrategy):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data += 1


@caught_by("STR-65")
class TakesAnyState(SingleDeviceStrategy):
    def check_optimizer_state(self, optimizer, state):
        pass

    def load_optimizer_state(self, optimizer, state):
        optimizer.state.update(state)


@caught_by("ACC-54")
class IgnoresTermination(CPUAccelerator):
    """``setup`` protects the device from a stop in the midst of a transfer, and nothing ends that."""

    name = "ignores_termination"
    auto_priority = None

    def setup(self, module):
        super().setup(module)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@caught_by("STR-87")
class WaitsForRankZero(DDPStrategy):
    """``on_train_end`` takes a number from rank 0 through the store: rank 0 itself waits for nobody."""

    def on_train_end(self):
        super().on_train_end()
        store = dist.distributed_c10d._get_default_store()
        if self.is_global_zero:
            store.set("training_ended", "1")
        else:
            store.wait(["training_ended"], self.timeout)


@caught_by("PRE-16")
class ForgetsWhatConnectGave(SinglePrecision):
    """Feeds back what rounding lost of each parameter that ``connect`` saw, and saves nothing of it."""

    alias = "forgets_what_connect_gave"

    def __init__(self):
        self.lost = []

    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        self.lost = [torch.zeros_like(p) for optimizer in optimizers for p in self.main_params(optimizer)]
        return model, optimizers, lr_schedulers

    def optimizer_step(self, optimizer, closure=None):
        done = super().optimizer_step(optimizer, closure)
        with torch.no_grad():
            for lost, parameter in zip(self.lost, self.main_params(optimizer), strict=False):
                whole = parameter + lost
                parameter.copy_(whole.to(torch.bfloat16))
                lost.copy_(whole - parameter)
        return done
