"""ACC: readings of a device's sensors, and the profiler's seam."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Final
from unittest import mock

import torch
from torch.profiler import ProfilerActivity

from torchhal.accelerators import Accelerator
from torchhal_conformance._assertions import close, raises, require
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext

_REGION = "torchhal_conformance.region"


@check("ACC-26", since="0.2", needs=["device"])
def device_stats(context: CheckContext) -> None:
    """device_stats gives finite floats by strings, and never raises: not before a set-up, nor for an absent device.

    A share whose name ends in ``_percent`` is from 0 to 100. Ten readings take less than five seconds. The readings of
    torch's module for the device are among them, each in the unit of its name, and infinite ones are left out.
    memory_stats gives ints by strings, and reset_peak_memory_stats returns, also where the device keeps no counts.

    Why: readings are shown and logged in the midst of runs, which a missing driver's library must not end.
    Fix: add the vendor's readings, in their units, to super().device_stats(); catch what the vendor's library raises.
    """
    accelerator = context.accelerator()
    (first,) = accelerator.get_parallel_devices([0])
    absent = torch.device(first.type, 99) if accelerator.indexed else first
    started = time.monotonic()
    for when, device in (("before a set-up", first), ("for an absent device", absent)):
        _require_readings(f"device_stats {when}", accelerator.device_stats(device))
    accelerator.setup_device(first)
    tensor = torch.ones(4, device=first)
    for _ in range(8):
        _require_readings("device_stats", accelerator.device_stats(first))
    took = time.monotonic() - started
    require(took < 5, f"ten readings took {took:.1f} s")
    accelerator.reset_peak_memory_stats(first)
    counts = accelerator.memory_stats(first)
    require(type(counts) is dict, f"memory_stats must return a dict (got {counts!r})")
    wrong = {key: count for key, count in counts.items() if type(key) is not str or type(count) is not int}
    require(not wrong, f"memory_stats must give ints by names (got {wrong!r})")
    del tensor
    _require_readings_of_torch(accelerator, first)


_OF_TORCH: Final = {
    "utilization": ("utilization_percent", 37, 37.0),
    "memory_usage": ("memory_utilization_percent", 21, 21.0),
    "temperature": ("temperature_celsius", 54, 54.0),
    "power_draw": ("power_watts", 120_000, 120.0),  # torch documents milliwatts
    "clock_rate": ("clock_mhz", 1410, 1410.0),
}
"""Function of torch's device module -> name of its reading, what it returns in the check, what that is by the name."""


def _require_readings_of_torch(accelerator: Accelerator, device: torch.device) -> None:
    """Fail unless readings of torch's module, which stand-ins give here, are in device_stats()."""
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # torch has none for the device
        return
    own = accelerator.device_stats(device)
    if device.type == "cuda" and torch.version.hip:  # where torch passes on what AMD's library gives: watts
        own = {**own, "power_watts": 0.0}
    with contextlib.ExitStack() as stack:
        for function, (_, given, _) in _OF_TORCH.items():
            read = mock.Mock(return_value=given)
            stack.enter_context(mock.patch.object(module, function, read, create=True))
        stats = accelerator.device_stats(device)
        for name, _, expected in _OF_TORCH.values():
            if name not in own:  # else the vendor may read it by itself
                close(f"{name}, which torch's module for the device reads", stats.get(name, math.nan), expected, 1e-6)
        stack.enter_context(mock.patch.object(module, "temperature", mock.Mock(return_value=math.inf)))
        _require_readings("device_stats of an infinite temperature", accelerator.device_stats(device))


def _require_readings(what: str, stats: object) -> None:
    require(type(stats) is dict, f"{what} must return a dict (got {stats!r})")
    assert isinstance(stats, dict)
    for key, value in stats.items():
        require(type(key) is str and key, f"{what}: a name must be a str (got {key!r})")
        finite = type(value) is float and math.isfinite(value)
        require(finite, f"{what}: {key!r} must be a finite float (got {value!r})")
        require(not key.endswith("_percent") or 0 <= value <= 100, f"{what}: {key!r} is no share: {value!r}")


@check("ACC-27", since="0.2", needs=["device"])
def profiler(context: CheckContext) -> None:
    """profile() records work and has step(); profile_region() names it there, nests, and is harmless outside of it.

    profiler_activities() is a set with the CPU's activity. A trace by ``torch.profiler`` holds the region; what the
    region's body raises passes.

    Why: a profiler that is bound to one vendor's activities records nothing on another's hardware, in silence.
    Fix: inherit these, or return a context whose object has step(), and enter the vendor's region beside torch's.
    """
    accelerator, device = context.setup_accelerator()
    activities = accelerator.profiler_activities()
    known = isinstance(activities, set) and all(isinstance(each, ProfilerActivity) for each in activities)
    require(known, f"profiler_activities() must be a set of ProfilerActivity (got {activities!r})")
    require(ProfilerActivity.CPU in activities, f"profiler_activities() leaves the CPU out: {activities!r}")
    for _ in range(2):  # outside of a profile, and again
        with accelerator.profile_region("outer"), accelerator.profile_region("inner"):
            torch.ones(4, device=device).sum()
    with accelerator.profile() as profiled:
        with accelerator.profile_region(_REGION):
            torch.ones(4, device=device).sum()
        require(callable(getattr(profiled, "step", None)), f"what profile() enters has no step(): {profiled!r}")
        profiled.step()
        raises("a profile_region() whose body raises", KeyError, lambda: _fail_inside(accelerator))
    if isinstance(profiled, torch.profiler.profile):
        names = {event.key for event in profiled.key_averages()}
        require(_REGION in names, f"the trace has no region {_REGION!r}")


def _fail_inside(accelerator: Accelerator) -> None:
    with accelerator.profile_region("raises"):
        raise KeyError("inside")
