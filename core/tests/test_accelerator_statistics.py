"""Test readings of sensors, the profiler's seam, and what `torchhal doctor` shows of devices and components."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import hardware
import pytest
import torch
from torch.profiler import ProfilerActivity

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.cli import _doctor as doctor
from torchhal.precision import SinglePrecision
from torchhal.strategies import SingleDeviceStrategy

CPU = torch.device("cpu")


class Sensors(Accelerator):
    name = "sensors"
    device_type = "sensors"
    module = SimpleNamespace()

    def _module(self):
        return self.module


def missing_library(device=None):
    raise ModuleNotFoundError("pynvml does not seem to be installed")


def failing(device=None):
    raise RuntimeError("not permitted")


# -- device_stats ------------------------------------------------------------------------------------------------


def test_units():
    """torch's milliwatts are watts here; everything else has torch's unit in its name."""
    accelerator = Sensors()
    accelerator.module = SimpleNamespace(
        utilization=lambda device: 40, memory_usage=lambda device: 30, temperature=lambda device: 50 + device.index,
        power_draw=lambda device: 65_500, clock_rate=lambda device: 1410,
    )  # fmt: skip
    assert accelerator.device_stats(torch.device("meta", 1)) == {
        "utilization_percent": 40.0, "memory_utilization_percent": 30.0, "temperature_celsius": 51.0,
        "power_watts": 65.5, "clock_mhz": 1410.0,
    }  # fmt: skip


@pytest.mark.parametrize("broken", [missing_library, failing, lambda device=None: math.inf, lambda device=None: None])
def test_unreadable_is_left_out(broken):
    accelerator = Sensors()
    accelerator.module = SimpleNamespace(utilization=broken, temperature=lambda: 50)
    assert accelerator.device_stats(torch.device("meta")) == {"temperature_celsius": 50.0}


def test_no_module():
    """A device type that torch doesn't know has no readings, and is no error."""

    class Unknown(Accelerator):
        name = device_type = "unknown"

    assert Unknown().device_stats(torch.device("meta")) == {}
    assert CPUAccelerator().device_stats(CPU) == {}


def test_simulator_reads_something(accelerator):
    device = hardware.device()
    stats = hardware.accelerator().device_stats(device)
    if accelerator == "sim":
        tensor = torch.ones(1 << 20, device=device)
        later = hardware.accelerator().device_stats(device)
        assert later["operators_total"] > stats["operators_total"]
        assert 0 <= stats["memory_used_percent"] <= later["memory_used_percent"] <= 100
        del tensor
    else:
        assert stats == {}


# -- the profiler ------------------------------------------------------------------------------------------------


def test_activities(monkeypatch):
    """The CPU's, and the one named after the device type, if this build of torch can record it."""
    assert CPUAccelerator().profiler_activities() == {ProfilerActivity.CPU}
    named = type("Named", (Accelerator,), {"name": "xpu", "device_type": "xpu"})()
    private = type("Private", (Accelerator,), {"name": "mine", "device_type": "mine"})()
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "mine")
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CPU})
    assert named.profiler_activities() == private.profiler_activities() == {ProfilerActivity.CPU}
    everything = set(ProfilerActivity.__members__.values())
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: everything)
    assert named.profiler_activities() == {ProfilerActivity.CPU, ProfilerActivity.XPU}
    assert private.profiler_activities() == {ProfilerActivity.CPU, ProfilerActivity.PrivateUse1}


def fit_by_hand(accelerator, **options):
    """A loop of a few steps with regions, as a profiler of the Trainer would have them."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator.profile(**options) as profiled:
        for _ in range(3):
            with accelerator.profile_region("training_step"):
                with accelerator.profile_region("forward"):
                    loss = model(torch.ones(2, 4)).sum()
                with accelerator.profile_region("backward"):
                    loss.backward()
                optimizer.step()
            profiled.step()
    return profiled


def test_trace_has_regions():
    """Each region is there once per step, around the operators that ran in it."""
    events = fit_by_hand(CPUAccelerator()).events()
    names = [event.name for event in events]
    assert [names.count(name) for name in ("training_step", "forward", "backward")] == [3] * 3
    forward = [event for event in events if event.name == "forward"]
    assert all(event.cpu_parent.name == "training_step" for event in forward)
    assert all("aten::linear" in {child.name for child in event.cpu_children} for event in forward)


def test_profile_passes_options():
    seen = []
    fit_by_hand(
        CPUAccelerator(), schedule=torch.profiler.schedule(wait=1, warmup=0, active=1, repeat=1),
        on_trace_ready=lambda profiled: seen.append({event.key for event in profiled.key_averages()}),
    )  # fmt: skip
    (names,) = seen
    assert "training_step" in names


def test_vendor_regions():
    """A vendor's region takes the place of torch's, and needs no profile of torch's."""
    entered = []

    class Vendor(CPUAccelerator):
        @contextmanager
        def profile(self, **options):
            yield SimpleNamespace(step=lambda: entered.append("step"))

        @contextmanager
        def profile_region(self, name):
            entered.append(name)
            yield

    fit_by_hand(Vendor())
    assert entered == ["training_step", "forward", "backward", "step"] * 3


# -- doctor ------------------------------------------------------------------------------------------------------


class Talks(SingleDeviceStrategy):
    @classmethod
    def diagnostics(cls):
        return ["The driver is 1.2, and 1.3 is twice as fast.", "ACME_DEBUG=1 slows every kernel down."]


class Raises(CPUAccelerator):
    @classmethod
    def diagnostics(cls):
        raise SystemExit("no licence")


class OneText(SinglePrecision):
    @classmethod
    def diagnostics(cls):
        return "not a list"


def test_diagnostics(registry):
    """Each line names its component; an error costs the lines of its own component, and shows as that."""
    for kind, alias, cls in (
        ("strategy", "talks", Talks),
        ("accelerator", "raises", Raises),
        ("precision", "text", OneText),
    ):
        registry.register(kind, alias, cls)
    found = {part["name"]: part for part in doctor.diagnostics(registry)}
    found["user/raises"]["problem"] = found["user/raises"]["problem"].partition(" (")[0]  # the place follows
    assert found == {
        "user/talks": {"kind": "strategy", "name": "user/talks", "sentences": Talks.diagnostics(), "problem": ""},
        "user/raises": {
            "kind": "accelerator", "name": "user/raises", "sentences": [], "problem": "SystemExit: no licence",
        },
        "user/text": {
            "kind": "precision", "name": "user/text", "sentences": [],
            "problem": "diagnostics() must return a list of str (got 'not a list')",
        },
    }  # fmt: skip


def test_doctor_lines():
    """A line for each device and for each sentence."""
    found = {
        "versions": {}, "environment": {}, "plugins": [], "accelerators": [], "cluster_environments": [],
        "recommendations": [], "unavailable": [],
        "devices": [
            {"name": "acme/board board:0", "stats": {"utilization_percent": 37.0, "temperature_celsius": 54.5}},
            {"name": "torchhal/cpu cpu", "stats": {}},
        ],
        "diagnostics": [
            {"kind": "strategy", "name": "acme/fast", "sentences": ["One.", "Two."], "problem": ""},
            {"kind": "precision", "name": "acme/fp8", "sentences": [], "problem": "OSError: gone"},
        ],
    }  # fmt: skip
    lines = list(doctor._examination(found))
    assert lines[lines.index("devices:") + 1 :][:2] == [
        "  acme/board board:0 utilization_percent 37, temperature_celsius 54.5",
        "  torchhal/cpu cpu has no readings",
    ]
    assert lines[lines.index("diagnostics:") + 1 :] == [
        "  strategy acme/fast: One.", "  strategy acme/fast: Two.", "  precision acme/fp8 failed: OSError: gone",
    ]  # fmt: skip


def test_doctor_reads_devices(registry):
    class Board(CPUAccelerator):
        def device_stats(self, device):
            return {"temperature_celsius": 40.0}

    class Broken(CPUAccelerator):
        def device_stats(self, device):
            raise RuntimeError("against the contract")

    registry.register("accelerator", "board", Board)
    registry.register("accelerator", "broken", Broken)
    entries = {entry.qualified_name: entry for entry in registry.entries("accelerator")}
    (found,) = doctor._devices(entries["user/board"])
    assert found == {"name": "user/board cpu", "stats": {"temperature_celsius": 40.0}}
    assert doctor._devices(entries["user/broken"]) == []


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)"), True),
        (RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (caused(KeyError("the step"), MemoryError()), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x2 and 3x1)"), False),
        (RuntimeError("Expected all tensors to be on the same memory format"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_for_too_little_memory(error, expected):
    assert CPUAccelerator().is_out_of_memory(error) is expected


def test_an_error_that_is_its_own_cause():
    error = RuntimeError("a circle")
    error.__cause__ = caused(KeyError(), error)
    assert not CPUAccelerator().is_out_of_memory(error)
