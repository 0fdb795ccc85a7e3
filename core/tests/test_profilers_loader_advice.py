"""What is said of a loader that a step waits for."""

import pytest
import torch
from torch.utils.data import DataLoader

from torchhal.trainer import _slow_loader as slow_loader
from torchhal.trainer._slow_loader import LoaderWait, advice

CPU, OTHER = torch.device("cpu"), torch.device("meta")
DATA = list(range(8))


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(slow_loader, "_cores", lambda: 4)


@pytest.mark.parametrize(
    ("loader", "device", "processes", "there", "absent"),
    [
        (DataLoader(DATA), CPU, 1, ["num_workers=4", "persistent_workers=True"], ["pin_memory", "prefetch"]),
        (DataLoader(DATA), OTHER, 2, ["num_workers=2", "pin_memory=True"], []),
        (DataLoader(DATA, num_workers=2), CPU, 1, ["num_workers=4", "prefetch_factor=4"], []),
        (
            DataLoader(DATA, num_workers=4, persistent_workers=True, prefetch_factor=8, pin_memory=True),
            OTHER, 1, ["Do less in the dataset's __getitem__"], ["num_workers=", "pin_memory"],
        ),
        ([1, 2], CPU, 1, ["Let a torch.utils.data.DataLoader with num_workers"], ["pin_memory"]),
    ],
)  # fmt: skip
def test_advice(cores, loader, device, processes, there, absent):
    said = advice(loader, device, processes)
    assert all(word in said for word in there) and not any(word in said for word in absent), said


@pytest.mark.parametrize(
    ("waited", "total", "named"), [(0.01, 0.02, True), (0.01, 0.1, False), (0.0001, 0.0002, False)]
)
def test_share_and_wait_that_count(waited, total, named):
    """A wait counts from 30 % of the step and from a millisecond on."""
    wait = LoaderWait()
    for _ in range(slow_loader.SKIPPED + slow_loader.STEPS):
        done = wait.add(waited, total, first=False)
    assert done
    assert (wait.describe([], CPU, 1) is not None) is named


def test_few_batches_say_nothing_of_their_start():
    wait = LoaderWait()
    for _ in range(slow_loader.SKIPPED):
        wait.add(9.0, 9.0, first=True)
    assert wait.describe([], CPU, 1) is None
    wait.add(9.0, 9.0, first=True)
    assert "most of it at the start of an epoch" in wait.describe([], CPU, 1)
