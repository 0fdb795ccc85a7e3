"""Accelerators that are each broken in one way. Most are the CPU; an extra `xpu` stands for hardware that is absent."""

import os
import time
import warnings

import torch
from zoo import caught_by

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability


@caught_by("ACC-01")
class BareBool(CPUAccelerator):
    @classmethod
    def availability(cls):
        return False


@caught_by("ACC-01")
class Raising(CPUAccelerator):
    @classmethod
    def availability(cls):
        raise OSError("libvendor.so: cannot open shared object file")


@caught_by("ACC-01")
class Fickle(CPUAccelerator):
    asked = 0

    @classmethod
    def availability(cls):
        cls.asked += 1
        return Availability(True) if cls.asked < 2 else Availability(False, "someone has it now")


@caught_by("ACC-02")
class StringsAreIndices(CPUAccelerator):
    def parse_devices(self, devices):
        if isinstance(devices, str) and devices.isdigit():
            return (int(devices),)
        return super().parse_devices(devices)


@caught_by("ACC-02")
class MinusOneIsOne(CPUAccelerator):
    def parse_devices(self, devices):
        return (0,) if devices in (-1, "-1") and self.device_count() > 0 else super().parse_devices(devices)

    def device_count(self):
        return 2


@caught_by("ACC-03")
class TrueIsOne(CPUAccelerator):
    def parse_devices(self, devices):
        return super().parse_devices(int(devices) if devices is True else devices)


@caught_by("ACC-03")
class TakesAnyIndex(CPUAccelerator):
    oversubscribable = False

    def parse_devices(self, devices):
        return (
            tuple(devices)
            if isinstance(devices, list) and devices and devices[0] > 0
            else super().parse_devices(devices)
        )


@caught_by("ACC-03")
class SaysNothing(CPUAccelerator):
    def parse_devices(self, devices):
        try:
            return super().parse_devices(devices)
        except ValueError:
            raise ConfigurationError("bad devices") from None


@caught_by("ACC-04")
class EmptiesTheList(CPUAccelerator):
    def parse_devices(self, devices):
        parsed = super().parse_devices(devices)
        if isinstance(devices, list):
            devices.clear()
        return parsed


@caught_by("ACC-04")
class SetsAVariable(CPUAccelerator):
    def parse_devices(self, devices):
        os.environ["SETS_A_VARIABLE"] = str(os.environ.get("SETS_A_VARIABLE", "")) + "x"
        return super().parse_devices(devices)


class Indexed(CPUAccelerator):
    """Three devices that are told apart by an index."""

    indexed = True
    oversubscribable = False

    def device_count(self):
        return 3


@caught_by("ACC-05")
class Renumbers(Indexed):
    def get_parallel_devices(self, indices):
        return [torch.device("cpu", number) for number in range(len(indices))]


@caught_by("ACC-05")
class Sorts(Indexed):
    def parse_devices(self, devices):
        return tuple(sorted(super().parse_devices(devices)))


@caught_by("ACC-06")
class CountsWhatIsNotThere(CPUAccelerator):
    @classmethod
    def availability(cls):
        return Availability(False, "the driver is too old")


@caught_by("ACC-06")
class AutoDisagrees(CPUAccelerator):
    def auto_device_count(self):
        return 2

    def parse_devices(self, devices):
        return (0,) if devices == "auto" else super().parse_devices(devices)


@caught_by("ACC-07")
class PhysicalNumbers(CPUAccelerator):
    visible_devices = "ACME_VISIBLE_DEVICES"

    def device_count(self):
        return 2


@caught_by("ACC-08")
class AnyDeviceWillDo(CPUAccelerator):
    def setup_device(self, device):
        pass


@caught_by("ACC-08")
class OnlyOnce(CPUAccelerator):
    done = False

    def setup_device(self, device):
        super().setup_device(device)
        if self.done:
            raise RuntimeError("already set up")
        self.done = True


class Counting(Indexed):
    """Says that it counts memory."""

    now: dict = {}

    def memory_stats(self, device):
        allocated = self.now.get(device.index or 0, 0)
        return {"allocated": allocated, "peak": allocated}


@caught_by("ACC-09")
class ContextOnFirst(Counting):
    def setup_device(self, device):
        self.now[0] = self.now.get(0, 0) + 300_000_000


@caught_by("ACC-10")
class TeardownNeedsSetup(CPUAccelerator):
    def setup_device(self, device):
        super().setup_device(device)
        self.handle = object()

    def teardown(self):
        del self.handle


@caught_by("ACC-10")
class TeardownOnce(CPUAccelerator):
    open = False
    closed = False

    def setup_device(self, device):
        super().setup_device(device)
        self.open = True

    def teardown(self):
        if self.closed:
            raise RuntimeError("the handle is closed")
        self.closed = self.open


@caught_by("ACC-11")
class Leaks(Counting):
    now: dict = {}

    def setup_device(self, device):
        self.now[0] = self.now.get(0, 0) + 4096


@caught_by("ACC-12")
class IgnoresStrides(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        def copy(tensor):
            memory = tensor.untyped_storage()
            flat = torch.empty(0, dtype=tensor.dtype).set_(memory, 0, (len(memory) // tensor.element_size(),))
            return flat[: tensor.numel()].reshape(tensor.shape).clone() if tensor.numel() <= len(flat) else tensor

        if isinstance(batch, dict):
            return {key: copy(tensor) for key, tensor in batch.items()}
        return super().batch_to_device(batch, device)


def changed(batch, change):
    if isinstance(batch, dict):
        return {key: changed(value, change) for key, value in batch.items()}
    return change(batch) if isinstance(batch, torch.Tensor) and batch.dtype == torch.float32 else batch


@caught_by("ACC-12")
class HalfWidthTransfer(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        return changed(super().batch_to_device(batch, device), lambda tensor: tensor.bfloat16().float())


@caught_by("ACC-17")
class AnotherOrder(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        return changed(super().batch_to_device(batch, device), lambda tensor: tensor.flip(0))


@caught_by("ACC-13")
class TuplesBecomeLists(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        moved = super().batch_to_device(batch, device)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in moved.items()}


@caught_by("ACC-13")
class WritesToTheBatch(CPUAccelerator):
    def batch_to_device(self, batch, device, *, non_blocking=False):
        batch["sample"].image = batch["sample"].image.clone()
        return dict(batch)


@caught_by("ACC-14")
class SeedsNothing(CPUAccelerator):
    def manual_seed(self, seed):
        pass


@caught_by("ACC-14")
class StateIsIgnored(CPUAccelerator):
    def set_rng_state(self, state, device):
        pass


@caught_by("ACC-15", says="positional argument")
class SynchronizesWithoutDevice(CPUAccelerator):
    def synchronize(self):
        pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)

    @caught_by("ACC-16", says="'8-true'")
    class ListsAnUnknownPrecision(CPUAccelerator):
        precisions = frozenset({"32-true", "8-true"})


@caught_by("ACC-16", says="'float12'")
class ComputesInAnUnknownDtype(CPUAccelerator):
    capabilities = CPUAccelerator.capabilities | {"compute:float12"}


@caught_by("ACC-16", says="'compute:float8_e5m2', which fails with")
class ComputesWhatItCannot(CPUAccelerator):
    capabilities = CPUAccelerator.capabilities | {"compute:float8_e5m2"}


@caught_by("ACC-16", says="'store:int64', which fails with")
class StoresIntegers(CPUAccelerator):
    capabilities = CPUAccelerator.capabilities | {"store:int64"}


@caught_by("ACC-16", says="under autocast to torch.float64")
class AutocastsToFloat64(CPUAccelerator):
    capabilities = CPUAccelerator.capabilities | {"autocast:float64"}


@caught_by("ACC-16", says="must be a frozenset of words")
class DeclaresOneWord(CPUAccelerator):
    capabilities = "compute:float32"


@caught_by("ACC-18")
class Kilobytes(Counting):
    def memory_stats(self, device):
        return {"allocated": 1, "peak": 1.5}


@caught_by("ACC-18")
class NoPeak(Counting):
    def memory_stats(self, device):
        return {"allocated": 1}


class Absent(Accelerator):
    """Hardware that this machine doesn't have."""

    name = "xpu"
    device_type = "xpu"


@caught_by("ACC-19")
class NoReasonGiven(Absent):
    def setup_device(self, device):
        torch.xpu.set_device(device)


@caught_by("ACC-19")
class CountsAnyway(Absent):
    def parse_devices(self, devices):
        return (0,)


@caught_by("SYS-06", kind="accelerator")
class ReadyWithoutHardware(Absent):
    """Whatever is asked of it, it is there."""

    def __init_subclass__(cls):
        cls.availability = classmethod(lambda cls: Availability(True))

    def device_count(self):
        return 1


@caught_by("ACC-20", says="exited unexpectedly")
class DiesInAFork(CPUAccelerator):
    def setup_device(self, device):
        super().setup_device(device)
        # not at once: torch raises in a signal handler, and where that meets Queue.put() between taking its lock and
        # the with block, the loader waits for the lock for ever when it ends
        os.register_at_fork(after_in_child=lambda: (time.sleep(0.2), os._exit(3)))


@caught_by("ACC-51")
class CopiesByAddress(CPUAccelerator):
    """Spares the copies of batches that come again, by their addresses."""

    def setup_device(self, device):
        super().setup_device(device)
        self.copies = {}

    def batch_to_device(self, batch, device, *, non_blocking=False):
        if not isinstance(batch, torch.Tensor):
            return super().batch_to_device(batch, device, non_blocking=non_blocking)
        key = (batch.data_ptr(), batch.shape, batch.dtype, batch.stride())
        if key not in self.copies:
            self.copies[key] = batch.clone()
        return self.copies[key]


@caught_by("ACC-21")
class TwoNames(CPUAccelerator):
    name = "another"
    alias = "one"


@caught_by("ACC-21")
class LongRepr(CPUAccelerator):
    def __repr__(self):
        return "an\naccelerator"


@caught_by("ACC-22")
class OneDeviceForAll(Indexed):
    """The current device is kept on the class."""

    current = None

    def setup_device(self, device):
        type(self).current = device


@caught_by("ACC-71")
class KnowsItsOwnErrorOnly(CPUAccelerator):
    def is_out_of_memory(self, error):
        return isinstance(error, torch.OutOfMemoryError | MemoryError)


@caught_by("ACC-71")
class TakesAnyRuntimeError(CPUAccelerator):
    def is_out_of_memory(self, error):
        return super().is_out_of_memory(error) or isinstance(error, RuntimeError)


@caught_by("ACC-72")
class AvailableInGibibytes(CPUAccelerator):
    def available_memory(self, device):
        return super().available_memory(device) >> 30


@caught_by("ACC-72")
class AvailableAsShare(CPUAccelerator):
    def available_memory(self, device):
        return 0.75


class Reference(CPUAccelerator):
    """Accelerator that declares nothing beyond the core level."""

    name = "reference"
