"""Copies on a stream of their own, on the simulated accelerator, which has streams and memory of its own."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer, seed_everything
from torchhal_conformance import ComponentUnderTest, Session, checks_for
from torchhal_gpu._stream_transfer import SideStreamAccelerator
from torchhal_simulator._counters import counting
from torchhal_simulator.accelerator import SimAccelerator

pytestmark = pytest.mark.simulator


class SideStreamSim(SideStreamAccelerator, SimAccelerator):
    pass


@pytest.fixture(scope="module")
def device():
    accelerator = SideStreamSim()
    accelerator.require_available()
    return torch.device("sim", 0)


Pair = namedtuple("Pair", "x y")


class MovesItself:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        self.streams = torch.accelerator.current_stream(device).stream_id
        return MovesItself(self.tensor.to(device))


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_batch_arrives_whole(device, non_blocking):
    x = torch.arange(12.0).reshape(3, 4)
    batch = {
        "pair": Pair(x.T, x[::2]), "empty": torch.empty(0), "name": "n", "own": MovesItself(x), "zero": x[0, 0],
        "expanded": x[0].expand(5, 4), "windows": x[0].unfold(0, 2, 1), "imaginary": (x + 1j).conj().imag,
        "channels last": x.reshape(1, 3, 2, 2).to(memory_format=torch.channels_last), "float8": x.to(torch.float8_e5m2),
        "complex leaf": torch.full((2,), 1j, requires_grad=True),
    }  # fmt: skip
    moved = SideStreamSim().batch_to_device(batch, device, non_blocking=non_blocking)
    assert type(moved["pair"]) is Pair and moved["name"] == "n"
    for there, here in (
        (moved["pair"].x, x.T),
        (moved["pair"].y, x[::2]),
        (moved["empty"], torch.empty(0)),
        (moved["own"].tensor, x),
        (moved["zero"], x[0, 0]),
        (moved["expanded"], x[0].expand(5, 4)),
        (moved["windows"], x[0].unfold(0, 2, 1)),
        (moved["imaginary"], (x + 1j).conj().imag),
        (moved["channels last"], x.reshape(1, 3, 2, 2)),
        (moved["complex leaf"].detach(), torch.full((2,), 1j)),
        (moved["float8"].view(torch.uint8), x.to(torch.float8_e5m2).view(torch.uint8)),
    ):
        assert there.device == device
        assert torch.equal(there.cpu(), here)
    assert batch["pair"].x.device.type == "cpu"


def test_what_is_there_already_is_neither_copied_nor_waited_for(device):
    x = torch.ones(3, device=device)
    accelerator = SideStreamSim()
    with counting() as counts:
        moved = accelerator.batch_to_device([x], device, non_blocking=True)
    assert moved[0] is x
    assert counts.h2d == 0 and not accelerator._copying


def test_copies_run_on_one_other_stream(device, monkeypatch):
    seen = []
    to = torch.Tensor.to

    def recorded(self, *args, **kwargs):
        seen.append(torch.accelerator.current_stream(device).stream_id)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    accelerator = SideStreamSim()
    outside = torch.accelerator.current_stream(device).stream_id
    own = MovesItself(torch.ones(2))
    for _ in range(2):
        accelerator.batch_to_device([torch.ones(2), own], device, non_blocking=True)
    side = accelerator._copying[device].stream_id
    assert side != outside
    # what moves itself does so where its memory is safe: on the stream that uses it
    assert seen == [side, outside, side, outside] and own.streams == outside
    assert torch.accelerator.current_stream(device).stream_id == outside
    accelerator.teardown()
    assert not accelerator._copying


class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_training_is_the_same_to_the_bit(tmp_path):
    weights = []
    for accelerator in (SimAccelerator(), SideStreamSim()):
        seed_everything(0)
        model, x = Line(), torch.randn(64, 4)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
        Trainer(
            accelerator=accelerator, devices=1, max_epochs=2, default_root_dir=tmp_path, enable_progress_bar=False
        ).fit(model, data)
        weights.append(model.layer.weight.detach().cpu())
    assert torch.equal(*weights)


def test_the_kit_finds_nothing():
    """A GPU is seldom here: the kit's checks of accelerators, on streams and pinned memory that behave as a GPU's."""
    with Session(ComponentUnderTest.of("accelerator", SideStreamSim)) as session:
        results = [session.run(one) for one in checks_for("accelerator") if one.id.startswith("ACC")]
    assert not [f"{result.check.id}: {result.reason}" for result in results if result.outcome == "failed"]
    assert sum(result.outcome == "passed" for result in results) > 25
