"""Accelerators, strategies and other components whose hooks, readings, loaders or reports are broken in one way."""

import contextlib
import queue
import threading
import time

from zoo import caught_by

from torchhal.accelerators import CPUAccelerator
from torchhal.precision import SinglePrecision
from torchhal.strategies import SingleDeviceStrategy


@caught_by("ACC-26", says="no driver")
class NeedsDriver(CPUAccelerator):
    def device_stats(self, device):
        raise RuntimeError("no driver")


@caught_by("ACC-26", says="finite float")
class NotANumber(CPUAccelerator):
    def device_stats(self, device):
        return {"temperature_celsius": float("nan")}


@caught_by("ACC-26", says="finite float")
class WholeDegrees(CPUAccelerator):
    def device_stats(self, device):
        return {"temperature_celsius": 54}


@caught_by("ACC-26", says="no share")
class Milliwatts(CPUAccelerator):
    def device_stats(self, device):
        return {"utilization_percent": 3700.0}


@caught_by("ACC-26", says="power_watts")
class PassesMilliwattsOn(CPUAccelerator):
    def device_stats(self, device):
        stats = super().device_stats(device)
        if "power_watts" in stats:
            stats["power_watts"] *= 1000
        return stats


@caught_by("ACC-26", says="an infinite temperature")
class PassesInfinityOn(CPUAccelerator):
    def device_stats(self, device):
        read = getattr(self._module(), "temperature", None)
        own = {} if read is None else {"temperature_celsius": float(read(device))}
        return {**super().device_stats(device), **own}


@caught_by("ACC-26", says="memory_stats must return a dict")
class HasNoCounts(CPUAccelerator):
    def memory_stats(self, device):
        return None


@caught_by("ACC-27", says="leaves the CPU out")
class OnlyItself(CPUAccelerator):
    def profiler_activities(self):
        return set()


@caught_by("ACC-27", says="no step")
class NoSteps(CPUAccelerator):
    def profile(self, **options):
        return contextlib.nullcontext()


@caught_by("ACC-27", says="has no region")
class OwnRegions(CPUAccelerator):
    def profile_region(self, name):
        return contextlib.nullcontext()


@caught_by("ACC-27", says="whose body raises")
class Swallows(CPUAccelerator):
    @contextlib.contextmanager
    def profile_region(self, name):
        with contextlib.suppress(Exception), super().profile_region(name):
            yield


class Wrapped:
    """A sound wrapper, for others to break."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


def wrapping(cls):
    class Wraps(CPUAccelerator):
        def process_dataloader(self, loader, device):
            return cls(loader)

    Wraps.__name__ = Wraps.__qualname__ = cls.__name__
    return Wraps


def put_in(**options):
    return lambda cls: caught_by("ACC-28", **options)(wrapping(cls))


@put_in(says="the first epoch")
class LosesTheLast(Wrapped):
    def __iter__(self):
        batches = list(self.loader)
        return iter(batches[:-1])


@put_in(says="the second epoch")
class OneEpoch(Wrapped):
    def __init__(self, loader):
        super().__init__(loader)
        self.batches = iter(loader)

    def __iter__(self):
        yield from self.batches


@put_in(says="two iterators at once")
class OneIterator(Wrapped):
    def __iter__(self):
        self.current = iter(self.loader)
        while (batch := next(self.current, None)) is not None:
            yield batch


@put_in(says="before an error")
class EndsEarly(Wrapped):
    """Takes an error for the end, an epoch early, as a queue does whose thread has died."""

    def __iter__(self):
        with contextlib.suppress(LookupError):
            yield from self.loader


@put_in(says="len()")
class WrongLength(Wrapped):
    def __len__(self):
        return 1


@put_in(says="after a state of four")
class ForwardsState(Wrapped):
    """Reads one ahead, and has the state of the loader behind it."""

    def __getattr__(self, name):
        return getattr(self.__dict__["loader"], name)

    def __iter__(self):
        batches = iter(self.loader)
        before = next(batches)
        while before is not None:
            try:
                following = next(batches, None)
            except LookupError:
                yield before
                raise
            yield before
            before = following


@put_in(says="threads are left")
class LeavesThreads(Wrapped):
    def __iter__(self):
        read = queue.Queue(1)

        def fetch(batches):
            try:
                for batch in batches:
                    read.put((batch, None))
                read.put((None, None))
            except BaseException as error:
                read.put((None, error))

        threading.Thread(target=fetch, args=(iter(self.loader),), daemon=True).start()

        def batches():
            while True:
                batch, error = read.get()
                if error is not None:
                    raise error
                if batch is None:
                    return
                yield batch

        return batches()


@caught_by("GEN-30", kind="accelerator", says="no board")
class Raises(CPUAccelerator):
    @classmethod
    def diagnostics(cls):
        raise OSError("no board")


@caught_by("GEN-30", kind="precision", says="must return a list")
class OneText(SinglePrecision):
    @classmethod
    def diagnostics(cls):
        return "the driver is old"


@caught_by("GEN-30", kind="strategy", says="one line for each")
class Report(SingleDeviceStrategy):
    @classmethod
    def diagnostics(cls):
        return ["the driver is old\nthe board is new"]


@caught_by("GEN-30", kind="accelerator", says="took")
class Slow(CPUAccelerator):
    @classmethod
    def diagnostics(cls):
        time.sleep(2.1)
        return []


@caught_by("STR-55", says="called twice")
class CallsItself(SingleDeviceStrategy):
    """Makes in a hook what its set-up needs, and calls it from there."""

    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self.on_train_start()


@caught_by("STR-55", says="before a start")
class SecondRun(SingleDeviceStrategy):
    """Makes once what each of its ends takes away."""

    def __init__(self, **options):
        super().__init__(**options)
        self.open = [1]

    def on_train_end(self):
        if not self.open:
            raise RuntimeError("end before a start")
        self.open.pop()


@caught_by("STR-55", says="hooks raised after the failure")
class HidesTheError(SingleDeviceStrategy):
    def on_train_batch_start(self, batch, batch_idx):
        self.batch = batch

    def on_train_batch_end(self, outputs, batch, batch_idx):
        del self.batch

    def on_evaluation_batch_start(self, stage, batch, batch_idx, dataloader_idx):
        self.batch = batch

    def on_evaluation_batch_end(self, stage, outputs, batch, batch_idx, dataloader_idx):
        del self.batch

    def on_evaluation_end(self, stage):
        assert "batch" not in vars(self), "a batch is open"


@caught_by("STR-55", says="leaves failure set")
class KeepsFailure(SingleDeviceStrategy):
    def teardown(self):
        failure = self.failure
        super().teardown()
        self.failure = failure
