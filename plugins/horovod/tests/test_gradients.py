"""What travels of a gradient, and in which form, with something in Horovod's place that answers as it does."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchhal_horovod import _sdk as sdk
from torchhal_horovod._gradients import GradientAverager


class InternalError(RuntimeError):
    """In the place of HorovodInternalError."""


class FakeHorovod:
    """Two ranks, the other with the same gradients; a message ``fails``, ``hangs``, or is ``refused`` at once."""

    Sum, Max, HorovodInternalError = "sum", "max", InternalError

    def __init__(self, what=""):
        self.what, self.sent = what, {}

    def size(self):
        return 2

    def allreduce_async_(self, tensor, name, op):
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        if self.what == "refused":
            raise InternalError("Horovod has been shut down")
        self.sent[name] = tensor.clone()
        if op == self.Sum:
            tensor.mul_(2)
        return name

    def poll(self, handle):
        return self.what != "hangs"

    def synchronize(self, handle):
        if self.what == "fails":
            raise InternalError("connection closed")


@contextmanager
def guard(what):
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"<{what}> {error}") from error


def averager(module, hvd, *, compressed=False, timeout=60.0):
    return GradientAverager(
        hvd, module, devices=sdk.device_types(SimpleNamespace(nccl_built=lambda: 0)), compressed=compressed,
        ignored=(), is_paused=lambda: False, finds_unused=False, timeout=timeout, guard=guard,
        explain_unused=lambda names: ValueError(str(names)),
    )  # fmt: skip


@pytest.mark.parametrize(("version", "types"), [(0, {"cpu"}), (21903, {"cpu", "cuda"})])
def test_tensors_of_a_gpu_are_for_a_horovod_with_nccl(version, types):
    assert sdk.device_types(SimpleNamespace(nccl_built=lambda: version)) == types


def test_gradients_of_a_device_that_horovod_lacks_travel_through_host_memory():
    simulator = pytest.importorskip("torchhal_simulator")
    simulator.load("sim")
    layer = nn.Linear(3, 2).to("sim")
    hvd = FakeHorovod()
    averages = averager(layer, hvd)
    layer(torch.ones(4, 3, device="sim")).sum().backward()
    averages.finish()
    assert torch.equal(hvd.sent["gradient.weight"], torch.full((2, 3), 2.0))  # half of it
    assert layer.weight.grad.device.type == "sim"
    assert torch.equal(layer.weight.grad.cpu(), torch.full((2, 3), 4.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("compressed", [False, True])
def test_is_divided_before_it_travels(dtype, compressed):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    hvd = FakeHorovod()
    averages = averager(module, hvd, compressed=compressed)
    given = torch.tensor([1.0, 30000.0, -40000.0]).to(dtype)
    if dtype.is_complex:
        given = given * torch.tensor([1.0, 0.5j, 0.25 - 1j])
    product = module.weight * given
    (product.real if dtype.is_complex else product).sum().backward()
    before = hvd.sent["gradient.weight"].clone()
    averages.finish()
    gradient = given.conj().resolve_conj()
    half = torch.view_as_real(gradient / 2) if dtype.is_complex else gradient / 2  # complex numbers travel as pairs
    torch.testing.assert_close(before.to(half.dtype), half, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(module.weight.grad, gradient, rtol=1e-3, atol=0.0)
    sent = {torch.bfloat16: torch.float32, torch.complex64: torch.float32}.get(dtype, dtype)
    assert before.dtype is (torch.float16 if compressed and dtype in (torch.float32, torch.complex64) else sent)


@pytest.mark.parametrize("what", ["refused", "fails", "hangs"])
def test_an_error_names_what_was_waited_for(what):
    layer = nn.Linear(3, 2)
    averages = averager(layer, FakeHorovod(what), timeout=0.05)
    with pytest.raises(RuntimeError, match=r"<averaging of the gradient of '(weight|bias)'> .* gradient of '"):
        layer(torch.ones(4, 3)).sum().backward()
        averages.finish()
