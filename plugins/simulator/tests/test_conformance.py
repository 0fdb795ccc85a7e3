"""The simulated device runs the conformance kit as any hardware does; core's parts run it on the simulated device."""

import pytest
import torch

from torchhal_conformance import CHECKS, ComponentUnderTest, Session, conformance_suite
from torchhal_simulator import load, simulate
from torchhal_simulator.accelerator import SimAccelerator


@pytest.fixture(autouse=True, scope="module")
def three_devices():
    """One for each rank of the larger world, here and in the processes that the kit starts."""
    load("sim")  # before the variable says three: it stays what it is for the other files of this process
    with simulate(devices=3):
        yield


TestSim = conformance_suite("accelerator", "sim", features={"memory_stats", "readme", "threads", "wheel"})
TestMixed = conformance_suite("precision", "16-mixed", accelerator="sim", features={"fused"})
TestDDP = pytest.mark.slow(
    conformance_suite("strategy", "ddp", accelerator="sim", features={"groups", "portable", "sync_grads"})
)


# What only a device with memory of its own can show; core's zoo of broken parts runs on the CPU.


class SelectsNothing(SimAccelerator):
    def setup_device(self, device):
        assert device.type == "sim", ValueError


class OpensTheFirst(SimAccelerator):
    def setup_device(self, device):
        self.context = torch.zeros(1000, device="sim:0")
        super().setup_device(device)


class Leaks(SimAccelerator):
    kept = []

    def setup(self, trainer=None):
        self.kept.append(torch.zeros(100_000, device="sim"))


class CountsKilobytes(SimAccelerator):
    def memory_stats(self, device):
        return {name: value // 1024 for name, value in super().memory_stats(device).items()}


@pytest.mark.parametrize(
    ("id", "part"),
    [
        ("ACC-08", SelectsNothing),
        ("ACC-09", OpensTheFirst),
        ("ACC-11", Leaks),
        ("ACC-18", CountsKilobytes),
    ],
)
def test_broken_device(id, part):
    with Session(ComponentUnderTest.of("accelerator", part, features={"memory_stats"})) as session:
        result = session.run(CHECKS[id])
    assert result.outcome == "failed" and not result.error and "Traceback" not in result.reason, result.reason
