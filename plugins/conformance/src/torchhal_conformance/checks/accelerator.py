"""ACC: what an accelerator declares is true, and a tensor that goes there comes back."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.errors import AcceleratorUnavailableError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.pytree import move_module
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext

TOLERANCE = 1e-3
"""Of a float32 result against the CPU's, times the greatest value: hardware may add up in another order and width."""


@check("ACC-01")
def availability(bench: CheckContext) -> None:
    """availability() never raises, is an Availability with a reason when false, and says the same when asked again.

    Why: a bare False, or a driver's exception, tells a user nothing, and "auto" would fall back without a word.
    Fix: catch what the vendor's import raises and return Availability(False, "what is missing").
    """
    first = bench.subject.part.availability()
    require(isinstance(first, Availability), f"availability() must return an Availability (got {first!r})")
    require(first.ok or first.reason.strip(), "availability() is false without a reason")
    for _ in range(3):
        same("availability() asked again", bench.subject.part.availability(), first)


@check("ACC-02", needs=["device"])
def equivalent_requests(bench: CheckContext) -> None:
    """parse_devices means the same by n and "n", by [0, 1] and "0,1", by -1, "-1" and all, and knows "auto".

    Why: a command line gives strings where a script gives numbers, and both must get the same devices.
    Fix: override device_count or auto_device_count and inherit parse_devices.
    """
    accelerator = bench.accelerator()
    count = accelerator.device_count()
    everything = tuple(range(count))
    pairs: list[tuple[Any, Any]] = [(1, "1"), (count, str(count)), (-1, "-1"), ([0], "0,")]
    if count > 1:
        pairs.append((list(everything), ",".join(map(str, everything))))
    for one, other in pairs:
        got = accelerator.parse_devices(one)
        require(isinstance(got, tuple), f"parse_devices({one!r}) must return a tuple (got {got!r})")
        same(f"parse_devices({other!r})", accelerator.parse_devices(other), got)
    same("parse_devices(1)", accelerator.parse_devices(1), (0,))
    same("parse_devices(-1)", accelerator.parse_devices(-1), everything)
    same("parse_devices('auto')", accelerator.parse_devices("auto"), tuple(range(accelerator.auto_device_count())))


@check("ACC-03", needs=["device"])
def nonsense(bench: CheckContext) -> None:
    """parse_devices refuses what can't be meant (-2, 0, [], "", "0,0", True, 1.5, "a", [-1], an index beyond the last)
    with a ValueError or TypeError that names the value and how many devices there are.

    Why: a job that starts on other devices than were asked for is noticed days later, if at all.
    Fix: inherit parse_devices, or raise ConfigurationError with the value's repr and device_count().
    """
    accelerator = bench.accelerator()
    count = accelerator.device_count()
    values: list[Any] = [-2, 0, [], "", "0,0", [0, 0], True, 1.5, "a", [-1]]
    if not accelerator.oversubscribable:
        values += [[count], str(count + 1), count + 1]
    for value in values:
        ask = partial(accelerator.parse_devices, value)
        raises(f"parse_devices({value!r})", (ValueError, TypeError), ask, repr(value), str(count))


@check("ACC-04", needs=["device"])
def parsing_is_pure(bench: CheckContext) -> None:
    """parse_devices leaves its argument and the environment alone, and takes its own result to mean itself.

    Why: resolve asks several times; a list that was emptied, or a variable set on the way, changes the next answer.
    Fix: build a new tuple; don't sort or pop the caller's list, don't write os.environ.
    """
    accelerator = bench.accelerator()
    request = list(range(accelerator.device_count()))[::-1]
    before, environ = list(request), dict(os.environ)
    once = accelerator.parse_devices(request)
    same("the caller's list", request, before)
    same("os.environ", dict(os.environ), environ)
    same("parse_devices of its own result", accelerator.parse_devices(once), once)
    same("parse_devices asked again", accelerator.parse_devices(request), once)


@check("ACC-05", needs=["device"])
def parallel_devices(bench: CheckContext) -> None:
    """get_parallel_devices([2, 0]) is device 2, then device 0, each of device_type; without an index if not indexed.

    Why: renumbered devices put two jobs on one device and leave another idle.
    Fix: inherit it, or return torch.device(device_type, index) for each index in the order given.
    """
    accelerator = bench.accelerator()
    for indices in ([2, 0], [0], [1, 2, 0]):
        expected = [
            torch.device(accelerator.device_type, i) if accelerator.indexed else torch.device(accelerator.device_type)
            for i in indices
        ]
        same(f"get_parallel_devices({indices})", list(accelerator.get_parallel_devices(indices)), expected)
    request = [1, 0] if accelerator.device_count() > 1 else [0]
    same(f"parse_devices({request})", accelerator.parse_devices(request), tuple(request))


@check("ACC-06")
def auto_count(bench: CheckContext) -> None:
    """auto_device_count() is at least 1 exactly where the accelerator is available, and "auto" means that many devices.

    Why: a count that disagrees with the availability makes "auto" choose hardware that isn't there, or ignore it.
    Fix: return 0 from device_count() unless availability() is true.
    """
    accelerator = bench.accelerator()
    available, count = type(accelerator).availability().ok, accelerator.auto_device_count()
    require((count >= 1) is available, f"auto_device_count() is {count}, but availability() says {available}")
    require(accelerator.device_count() >= 1 or not available, "available, but device_count() is 0")
    same("len(parse_devices('auto'))", len(accelerator.parse_devices("auto")), count)


@check("ACC-07", features=["visible_devices"], needs=["two devices"])
def visible_devices(bench: CheckContext) -> None:
    """With the vendor's variable set to one device, one device is counted, and it has the logical index 0.

    The variable is the class attribute ``visible_devices``: without it the kit couldn't know which one to set.

    Why: schedulers hand out devices by this variable; physical numbers in its place point at other people's devices.
    Fix: count and number what the vendor's runtime shows, never what the machine has.
    """
    variable = bench.subject.part.visible_devices
    require(variable, "the class attribute 'visible_devices' must name the vendor's variable")
    bench.fresh()
    count, indices = bench.elsewhere(_count_visible, bench.subject, variable)
    bench.fresh()
    same(f"device_count() with {variable}=1", count, 1)
    same(f"parse_devices(-1) with {variable}=1", indices, (0,))


def _count_visible(subject: Any, variable: str) -> tuple[int, tuple[int, ...]]:
    os.environ[variable] = "1"
    accelerator = subject.make_accelerator()
    accelerator.setup_device(accelerator.get_parallel_devices([0])[0])
    return accelerator.device_count(), accelerator.parse_devices(-1)


@check("ACC-08", needs=["device"])
def setup_device(bench: CheckContext) -> None:
    """setup_device makes the device the current one, may be called again, and refuses another type with a ValueError.

    Why: code that says device="x" without an index works on device 0 by luck, and on every rank but one against it.
    Fix: compare device.type first, then call the vendor's set_device.
    """
    accelerator = bench.accelerator()
    raises(
        "setup_device of the meta device", ValueError, lambda: accelerator.setup_device(torch.device("meta")), "meta"
    )
    last = max(accelerator.parse_devices(-1)) if accelerator.indexed else 0
    for index in dict.fromkeys((last, 0)):
        device = accelerator.get_parallel_devices([index])[0]
        for _ in range(2):
            accelerator.setup_device(device)
        made = torch.empty(1, device=accelerator.device_type).device
        same("device type of a tensor made after setup_device", made.type, device.type)
        if accelerator.indexed:
            same(f"index of a tensor made after setup_device({device})", made.index, index)


@check("ACC-09", features=["memory_stats"], needs=["two devices"])
def other_devices(bench: CheckContext) -> None:
    """A process that is set up on device 1 allocates nothing on device 0.

    Why: every rank that opens a context on device 0 takes hundreds of megabytes of it, and rank 0 runs out first.
    Fix: call set_device before anything that makes a tensor, a stream or a handle.
    """
    if not bench.accelerator().indexed:
        raise NotApplicable("a process of this accelerator has one device")
    bench.fresh()
    allocated = bench.elsewhere(_allocated_on_first, bench.subject)
    bench.fresh()
    same("bytes allocated on device 0 by work on device 1", allocated, 0)


def _allocated_on_first(subject: Any) -> int:
    accelerator = subject.make_accelerator()
    first, second = accelerator.get_parallel_devices([0, 1])
    accelerator.setup_device(second)
    accelerator.setup(None)
    torch.ones(1000, device=second).sum()
    accelerator.synchronize(second)
    return int(accelerator.memory_stats(first).get("allocated", 0))


@check("ACC-10")
def teardown(bench: CheckContext) -> None:
    """teardown() may be called before a set-up, after one that failed, and twice.

    Why: it runs on the way out of an error; when it raises itself, its error is what the user sees.
    Fix: release only what was taken, and note that it is released.
    """
    accelerator = bench.accelerator()
    accelerator.teardown()
    try:
        accelerator.setup_device(torch.device("meta"))
    except Exception:
        pass
    accelerator.teardown()
    if type(accelerator).availability():
        accelerator.setup_device(accelerator.get_parallel_devices([0])[0])
        accelerator.teardown()
        accelerator.teardown()


@check("ACC-11", features=["memory_stats"], needs=["device"])
def no_leak(bench: CheckContext) -> None:
    """After a set-up, work and teardown(), no more memory is allocated than before.

    Why: a second fit in one process runs out of memory that the first one never gave back.
    Fix: drop what the accelerator holds in teardown(), then empty the cache.
    """
    accelerator, device = bench.ready()
    baseline = accelerator.memory_stats(device)["allocated"]
    for _ in range(3):
        accelerator.setup_device(device)
        accelerator.setup(None)
        work = torch.ones(256, 256, device=device)
        (work @ work).sum().item()
        del work
        accelerator.teardown()
    left = accelerator.memory_stats(device)["allocated"]
    require(left <= baseline + 1024, f"{left - baseline} bytes more are allocated after teardown() than before")


_DTYPES = {"32": torch.float32, "64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}


def _declared_dtypes(accelerator: Accelerator) -> list[torch.dtype]:
    names = {alias.partition("-")[0] for alias in accelerator.precisions}
    return [dtype for name, dtype in _DTYPES.items() if name in names]


@check("ACC-12", needs=["device"])
def round_trip(bench: CheckContext) -> None:
    """What batch_to_device puts on the device comes back bit for bit: every dtype of the declared precisions, integers
    and booleans; 0-d, empty, strided, expanded tensors, and views that share memory.

    Why: a transfer that ignores strides or the offset into shared memory trains on other numbers, silently.
    Fix: make a view contiguous before its memory is copied, or leave the copy to Tensor.to.
    """
    accelerator, device = bench.ready()
    base = torch.randn(6, 8, generator=bench.generator()) * 50
    for dtype in [*_declared_dtypes(accelerator), torch.int64, torch.int32, torch.uint8, torch.bool]:
        full = (base > 0) if dtype is torch.bool else base.abs().to(dtype)
        shapes = {
            "dense": full, "0-d": full[0, 0], "empty": full[:0], "strided": full[:, ::2], "transposed": full.t(),
            "expanded": full[:1].expand(5, 8), "a view of the middle": full[2:4],
        }  # fmt: skip
        moved = accelerator.batch_to_device(shapes, device)
        accelerator.synchronize(device)
        for name, tensor in shapes.items():
            same(
                f"device of a {name} {dtype} tensor",
                moved[name].device,
                device if accelerator.indexed else moved[name].device,
            )
            same(f"device type of a {name} {dtype} tensor", moved[name].device.type, device.type)
            same(f"a {name} {dtype} tensor that went to {device} and back", moved[name].cpu(), tensor)


_Pair = namedtuple("_Pair", "x label")


@dataclass
class _Sample:
    image: torch.Tensor
    name: str


class _Moves:
    """An object that moves itself, into a new one, and knows none of torch's keywords."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> _Moves:
        return _Moves(self.tensor.to(device))


@check("ACC-13", needs=["device"])
def batch_structure(bench: CheckContext) -> None:
    """batch_to_device keeps dicts, lists, tuples, named tuples and dataclasses what they are, calls an object's own
    ``.to``, and leaves strings, numbers and None alone; the batch that was given is not written to.

    Why: users' collate functions return anything, and a step that unpacks it fails far from the cause.
    Fix: inherit batch_to_device, or move leaves with torchhal.pytree.map_tensors.
    """
    accelerator, device = bench.ready()
    one = torch.arange(3.0)
    batch = {
        "list": [one, "text", None], "pair": _Pair(one, 7), "sample": _Sample(one, "a"), "moves": _Moves(one),
        "deep": ({"x": (one,)}, 1.5, True),
    }  # fmt: skip
    moved = accelerator.batch_to_device(batch, device)
    same("keys", list(moved), list(batch))
    same("types", [type(moved[key]) for key in batch], [type(value) for value in batch.values()])
    for name, got in (
        ("a list", moved["list"][0]), ("a named tuple", moved["pair"].x), ("a dataclass", moved["sample"].image),
        ("an object with .to", moved["moves"].tensor), ("a nest", moved["deep"][0]["x"][0]),
    ):  # fmt: skip
        same(f"device type of the tensor in {name}", got.device.type, device.type)
        same(f"the tensor in {name}", got.cpu(), one)
    same("what isn't a tensor", (moved["list"][1:], moved["pair"].label, moved["sample"].name, moved["deep"][1:]),
         (["text", None], 7, "a", (1.5, True)))  # fmt: skip
    require(
        batch["list"][0] is one and batch["sample"].image is one and batch["moves"].tensor is one,  # type: ignore[index, attr-defined]
        "the caller's batch was written to",
    )


@check("ACC-14", needs=["device"])
def random_state(bench: CheckContext) -> None:
    """manual_seed makes the device's random numbers repeat; get_rng_state and set_rng_state replay the stream. The
    state is a uint8 tensor on the CPU.

    Why: without the device's state in a checkpoint, dropout after a resume is another one and no run can be repeated.
    Fix: seed every generator of the device type; return the generator's state as torch's own modules do.
    """
    accelerator, device = bench.ready()

    def draw() -> torch.Tensor:
        return torch.rand(8, device=device).cpu()

    accelerator.manual_seed(7)
    first, second = draw(), draw()
    require(not torch.equal(first, second), "two draws after manual_seed are the same numbers")
    accelerator.manual_seed(7)
    same("the first draw after the same seed", draw(), first)
    state = accelerator.get_rng_state(device)
    same("the state's dtype and device", (state.dtype, state.device.type), (torch.uint8, "cpu"))
    kept = state.clone()
    same("the second draw", draw(), second)
    draw()
    accelerator.set_rng_state(kept, device)
    same("the draw after set_rng_state", draw(), second)
    accelerator.manual_seed(8)
    require(not torch.equal(draw(), first), "another seed gives the same numbers")


@check("ACC-15", needs=["device"])
def synchronize(bench: CheckContext) -> None:
    """After synchronize(device) the host reads what the device wrote before, also through a copy that didn't wait.
    It takes a device and works without one.

    Why: a loss that is read before the device has finished is an older one, or garbage.
    Fix: wait for all of the device's streams.
    """
    accelerator, device = bench.ready()
    for step in range(5):
        on_device = torch.zeros(200_000, device=device)
        for _ in range(10):
            on_device += 1
        on_device *= step
        on_host = _pinned(200_000).copy_(on_device, non_blocking=True)
        accelerator.synchronize(device) if step % 2 else accelerator.synchronize()
        expected = torch.full((200_000,), 10.0 * step)
        wrong = int((on_host != expected).sum())
        require(not wrong, f"{wrong} of 200000 numbers are not what the device had written before synchronize()")


def _pinned(size: int) -> torch.Tensor:
    """Host memory that a copy doesn't wait for, where the device has such."""
    try:
        return torch.zeros(size).pin_memory()
    except (RuntimeError, NotImplementedError):  # no device here that could
        return torch.zeros(size)


@check("ACC-16", needs=["device"])
def declared_precisions(bench: CheckContext) -> None:
    """Each precision that the class lists multiplies matrices forward and backward on the device; one that it doesn't
    list is refused before a launch by an error that names both.

    Why: a dtype that is listed and missing fails in the first step, after minutes of loading.
    Fix: list in ``precisions`` what the device computes, under aliases that exist.
    """
    accelerator, device = bench.ready()
    for alias in sorted(accelerator.precisions):
        try:
            precision = registry.find("precision", alias).create()
        except LookupError as error:
            raise CheckFailed(f"'precisions' lists {alias!r}: {error}") from error
        precision.setup(accelerator, device)
        dtype = precision.compute_dtype
        left, right = (torch.randn(8, 8, generator=bench.generator(i)) for i in range(2))
        one = left.to(dtype).to(device).requires_grad_()
        (one @ right.to(dtype).to(device)).sum().backward()  # type: ignore[no-untyped-call]
        expected = right.to(dtype).float().sum(1).expand(8, 8)
        assert one.grad is not None
        close(f"the gradient of a product in {dtype} ({alias})", one.grad.float(), expected, 0.02)
        precision.teardown()
    others = [alias for alias in ("64-true", "16-mixed", "bf16-true") if alias not in accelerator.precisions]
    for alias in others[:1]:
        request = Request(accelerator=accelerator, precision=alias, strategy="single_device", devices=1)
        what = f"precision {alias!r}, which {accelerator.name!r} doesn't list"
        raises(what, UnsupportedCombinationError, partial(resolve, request), alias, accelerator.name)


@check("ACC-17", needs=["device"])
def numerics(bench: CheckContext) -> None:
    """A small network (convolution, normalization, linear) computes on the device what it computes on the CPU, forward
    and backward, up to 1e-3.

    Why: wrong kernels exist, and a model that trains a little worse is not noticed.
    Fix: report the operator to the vendor; until then declare the check as an expected failure with its name.
    """
    accelerator, device = bench.ready()
    results = []
    for where in (torch.device("cpu"), device):
        torch.default_generator.manual_seed(bench.subject.seed)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        batch = torch.randn(5, 2, 6, 6, generator=bench.generator())
        if where is device:
            move_module(model, device)
            batch = accelerator.batch_to_device(batch, device)
        output = model(batch)
        output.square().mean().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    names = ["the output", *(f"the gradient of {name}" for name, _ in model.named_parameters())]
    for name, expected, got in zip(names, *results, strict=True):
        close(name, got, expected, TOLERANCE)


@check("ACC-18", features=["memory_stats"], needs=["device"])
def memory_stats(bench: CheckContext) -> None:
    """memory_stats counts bytes as ints, with ``allocated`` and ``peak`` at least; a tensor of 4 MiB adds 4 MiB, the
    peak is never below the current allocation, and reset_peak_memory_stats starts it anew.

    Why: kilobytes in one place and missing keys in another make monitors and memory estimates wrong.
    Fix: override memory_stats and convert the vendor's units.
    """
    accelerator, device = bench.ready()
    size = 4 << 20
    accelerator.reset_peak_memory_stats(device)
    before = accelerator.memory_stats(device)
    require({"allocated", "peak"} <= before.keys(), f"'allocated' and 'peak' must be there (got {sorted(before)})")
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    accelerator.synchronize(device)
    during = accelerator.memory_stats(device)
    for name, value in during.items():
        require(type(value) is int and value >= 0, f"{name!r} must be an int of at least 0 (got {value!r})")
    grown = during["allocated"] - before["allocated"]
    require(size <= grown <= 2 * size, f"a tensor of {size} bytes made 'allocated' grow by {grown}")
    require(
        during["peak"] >= during["allocated"], f"'peak' {during['peak']} is below 'allocated' {during['allocated']}"
    )
    del tensor
    after = accelerator.memory_stats(device)
    require(after["allocated"] <= during["allocated"] - size, "freeing the tensor didn't lower 'allocated'")
    require(after["peak"] >= during["allocated"], "freeing the tensor lowered 'peak'")
    accelerator.reset_peak_memory_stats(device)
    reset = accelerator.memory_stats(device)["peak"]
    require(reset <= after["allocated"] + 1024, f"reset_peak_memory_stats left the peak at {reset}")


@check("ACC-19")
def without_hardware(bench: CheckContext) -> None:
    """Where the hardware is missing, require_available, setup_device and parse_devices(1) raise
    AcceleratorUnavailableError with the reason. On a machine that has it, this is tried on a subclass that says it is
    missing.

    Why: "'NoneType' object has no attribute ..." from inside a vendor's library is no answer to "why not here".
    Fix: call super().setup_device(device), or require_available() first; return 0 from device_count() then.
    """
    part = bench.subject.part
    if part.device_type == "cpu" and part.oversubscribable:
        raise NotApplicable("the host's processors are always there")
    reason = part.availability().reason
    if not reason:
        reason = "taken away for a check"
        members = {"availability": classmethod(lambda cls: Availability(False, reason)), "device_count": lambda self: 0}
        part = type(part.__name__, (part,), members)
    accelerator = part(**{**bench.subject.entry.component.defaults, **bench.subject.arguments})
    calls = {
        "require_available()": part.require_available,
        "setup_device()": lambda: accelerator.setup_device(torch.device(part.device_type)),
        "parse_devices(1)": lambda: accelerator.parse_devices(1),
    }
    for what, call in calls.items():
        raises(f"{what} without hardware", AcceleratorUnavailableError, call, reason)
    same("auto_device_count() without hardware", accelerator.auto_device_count(), 0)


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


@check("ACC-20", needs=["device", "posix"])
def data_workers(bench: CheckContext) -> None:
    """A DataLoader with two workers works after the device was set up and used, by the cheapest way in
    ``start_methods``: fork, else forkserver, else spawn.

    Why: a worker forked from a process that holds a driver's handles hangs or crashes, in the first epoch.
    Fix: leave "fork" out of ``start_methods`` when the vendor's runtime doesn't survive it.
    """
    methods = bench.subject.part.start_methods
    method = next((name for name in ("fork", "forkserver", "spawn") if name in methods), None)
    require(method is not None, f"'start_methods' must hold fork, forkserver or spawn (got {sorted(methods)})")
    got = bench.elsewhere(_load_data, bench.subject, method, timeout=120)
    bench.fresh()
    same("what two workers loaded", got, [index * index for index in range(8)])


def _load_data(subject: Any, method: str) -> list[int]:
    accelerator = subject.make_accelerator()
    device = accelerator.get_parallel_devices([0])[0]
    accelerator.setup_device(device)
    torch.ones(3, device=device).sum().item()
    loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method, timeout=60)
    return [int(number) for batch in loader for number in batch]


@check("ACC-21")
def one_name(bench: CheckContext) -> None:
    """The alias, ``name`` and the type of its devices agree, and repr() is one line.

    Why: messages name the accelerator by ``name`` and users ask for it by alias: two names send them looking.
    Fix: set ``name`` to the alias of the record, and ``device_type`` to torch's word for the device.
    """
    part, entry = bench.subject.part, bench.subject.entry
    names = {name.lower() for name in entry.names}
    require(part.name in names, f"'name' is {part.name!r}, but the record says {', '.join(sorted(names))}")
    text = repr(bench.make())
    require(text.strip() and "\n" not in text, f"repr() must be one line (got {text!r})")
    if part.availability():
        device = bench.ready()[1]
        same("the type of its devices", device.type, part.device_type)
        same("the type of a tensor there", torch.empty(1, device=device).device.type, part.device_type)


@check("ACC-22", features=["threads"], needs=["two devices"])
def two_threads(bench: CheckContext) -> None:
    """Two instances, each set up on its own device in its own thread, don't disturb each other.

    Why: a current device kept in a global moves one thread's work to the other's device.
    Fix: keep no state of the device on the class or the module; torch's current device is per thread already.
    """
    devices = bench.accelerator().get_parallel_devices([0, 1])
    found: dict[int, list[Any]] = {0: [], 1: []}
    meet = threading.Barrier(2, timeout=20)

    def work(index: int) -> None:
        accelerator = bench.accelerator()
        accelerator.setup_device(devices[index])
        for _ in range(5):
            meet.wait()
            found[index].append(torch.full((4,), float(index), device=accelerator.device_type).sum().device.index)
        accelerator.teardown()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, device in enumerate(devices):
        same(f"devices that thread {index} worked on", found[index], [device.index] * 5)
