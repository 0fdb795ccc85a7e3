"""ACC: random state, memory counts, threads and teardown of an accelerator."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state


@check("ACC-10")
def repeated_teardown(context: CheckContext) -> None:
    """teardown() may be called before a set-up, after one that failed, and twice; the object works again after it.

    Why: it runs on the way out of an error; when it raises itself, its error is what the user sees.
    Fix: release only what was taken, and note that it is released.
    """
    accelerator = context.accelerator()
    accelerator.teardown()
    try:
        accelerator.setup_device(torch.device("meta"))
    except Exception:
        pass
    accelerator.teardown()
    if type(accelerator).availability():
        device = accelerator.get_parallel_devices([0])[0]
        for life in (1, 2):
            accelerator.setup_device(device)
            accelerator.setup(None)
            moved = accelerator.batch_to_device(torch.arange(3.0), device)
            same(f"a sum on the device in life {life}", float((moved + 1).sum()), 6.0)
            accelerator.teardown()
            accelerator.teardown()


@check("ACC-11", features=["memory_stats"], needs=["device"])
def no_leak(context: CheckContext) -> None:
    """After a set-up, work and teardown(), no more memory is allocated than after the ones before.

    Why: a second fit in one process runs out of memory that the first one never gave back.
    Fix: drop what the accelerator holds in teardown(), then empty the cache.
    """
    accelerator, device = context.setup_accelerator()

    def live() -> None:
        accelerator.setup_device(device)
        accelerator.setup(None)
        work = torch.ones(256, 256, device=device)
        (work @ work).sum().item()
        del work
        accelerator.teardown()

    live()  # a library's first product takes a workspace for the life of the process: 32 MiB for cuBLAS on Hopper
    baseline = accelerator.memory_stats(device)["allocated"]
    for _ in range(3):
        live()
    left = accelerator.memory_stats(device)["allocated"]
    require(left <= baseline + 1024, f"{left - baseline} bytes more are allocated after teardown() than before")


@check("ACC-14", needs=["device"])
def random_state(context: CheckContext) -> None:
    """manual_seed makes the device's random numbers repeat; get_rng_state and set_rng_state replay the stream.

    The state is a uint8 tensor on the CPU.

    Why: without the device's state in a checkpoint, dropout after a resume is another one and no run can be repeated.
    Fix: seed every generator of the device type; return the generator's state as torch's own modules do.
    """
    accelerator, device = context.setup_accelerator()

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
    for seed in (0, 2**40 + 9, 2**64 - 1, -5):  # torch.manual_seed takes these
        accelerator.manual_seed(seed)
        numbers = draw()
        require(not torch.equal(numbers, first), f"seed {seed} gives the numbers of seed 7")
        accelerator.manual_seed(seed)
        same(f"the first draw after seed {seed} again", draw(), numbers)
    state = accelerator.get_rng_state(device)
    kept, after = state.clone(), draw()
    accelerator.get_rng_state(device)
    same("the state, after another one was read", state, kept)
    accelerator.set_rng_state(state, device)
    same("the state, after it was set", state, kept)
    same("the draw after it was set", draw(), after)
    draw()
    same("the state, after another draw", state, kept)


@check("ACC-31", since="0.2", needs=["device"])
def process_left_alone(context: CheckContext) -> None:
    """setup_device(), setup() and teardown() leave torch's switches and the CPU's random numbers as they were.

    Why: a default dtype, a matmul precision or a draw that one accelerator changes makes the same run another one.
    Fix: leave them to the user and to the precision; warm up under torch.random.fork_rng, or with zeros.
    """
    accelerator = context.accelerator()
    device = accelerator.get_parallel_devices([0])[0]
    before, numbers = torch_state(), torch.get_rng_state()
    for name, arguments in (("setup_device", (device,)), ("setup", (None,)), ("teardown", ())):
        getattr(accelerator, name)(*arguments)
        for what, value in torch_state().items():
            same(f"{what} after {name}()", value, before[what])
        require(torch.equal(torch.get_rng_state(), numbers), f"{name}() drew random numbers on the CPU")


@check("ACC-72", since="0.2", needs=["device"])
def available_memory(context: CheckContext) -> None:
    """available_memory is None, or an int of bytes that can be allocated: less while a tensor holds some of them.

    A tensor of 4 MiB that can be allocated is no more than what was available. Where the device counts its memory, that
    is at least 4 MiB less as long as the tensor is there.

    Why: strategy="auto" chooses by it, and takes what doesn't fit where it is too much, or divides a model that fits.
    Fix: return bytes, without what tensors of this process hold; None where the vendor's library doesn't say.
    """
    accelerator, device = context.setup_accelerator()
    size = 4 << 20
    before = accelerator.available_memory(device)
    if before is None:
        return
    require(type(before) is int and before >= 0, f"available_memory must be an int of at least 0 (got {before!r})")
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    accelerator.synchronize(device)
    require(size <= before, f"a tensor of {size} bytes was allocated where available_memory was {before}")
    during = accelerator.available_memory(device)
    if "memory_stats" in accelerator.features:
        require(
            type(during) is int and during <= before - size,
            f"available_memory was {before}, and is {during} while a tensor has {size} bytes",
        )
    del tensor


@check("ACC-18", features=["memory_stats"], needs=["device"])
def memory_stats(context: CheckContext) -> None:
    """memory_stats counts bytes as ints, with ``allocated`` and ``peak`` at least.

    A tensor of 4 MiB adds 4 MiB, the peak is never below the current allocation, and reset_peak_memory_stats starts
    it anew.

    Why: kilobytes in one place and missing keys in another make monitors and memory estimates wrong.
    Fix: override memory_stats and convert the vendor's units.
    """
    accelerator, device = context.setup_accelerator()
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


@check("ACC-22", features=["threads"], needs=["two devices"])
def two_threads(context: CheckContext) -> None:
    """Two instances, each set up on its own device in its own thread, don't disturb each other.

    Why: a current device kept in a global moves one thread's work to the other's device.
    Fix: keep no state of the device on the class or the module; torch's current device is per thread already.
    """
    devices = context.accelerator().get_parallel_devices([0, 1])
    found: dict[int, list[Any]] = {0: [], 1: []}
    meet = threading.Barrier(2, timeout=20)

    def work(index: int) -> None:
        accelerator = context.accelerator()
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
