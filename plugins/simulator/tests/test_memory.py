"""A device's memory: statistics, the limit, storages that shrink and grow, and nothing that stays behind."""

import gc

import pytest
import torch
from torch import nn

from torchhal_simulator import simulate
from torchhal_simulator._device_types import flavour_named


@pytest.fixture
def module(device):
    return torch.get_device_module(device)


@pytest.fixture
def balanced(device, module):
    """What a test allocates is free again at its end."""
    gc.collect()
    before = module.memory_allocated()
    yield before
    gc.collect()
    assert module.memory_allocated() == before


def test_statistics(device, module, balanced):
    module.reset_peak_memory_stats()
    module.reset_accumulated_memory_stats()
    x = torch.empty(1000, device=device)  # rounded up to blocks of 512 bytes
    y = torch.empty(1, dtype=torch.uint8, device=device)
    assert module.memory_allocated() - balanced == 4096 + 512
    del x
    assert module.memory_allocated() - balanced == 512
    assert module.max_memory_allocated() - balanced == 4096 + 512
    stats = module.memory_stats()
    assert stats["allocated_bytes.all.current"] == module.memory_allocated() == module.memory_reserved()
    assert stats["allocated_bytes.all.peak"] == module.max_memory_allocated() == module.max_memory_reserved()
    assert stats["allocated_bytes.all.allocated"] == 4096 + 512
    assert stats["allocated_bytes.all.freed"] == 4096
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() - balanced == 512
    free, total = module.mem_get_info()
    assert total - free == module.memory_allocated()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == module.memory_allocated()
    del y


def test_each_device_has_its_own(device, second, module, balanced):
    before = module.memory_allocated(second)
    x = torch.empty(128, device=second)
    assert module.memory_allocated(second) - before == 512
    assert module.memory_allocated(device) == balanced
    del x


def test_a_view_takes_no_memory_and_keeps_its_base(device, module, balanced):
    view = torch.empty(128, device=device)[:2].view(1, 2)
    assert module.memory_allocated() - balanced == 512
    del view


@pytest.mark.parametrize("work", [
    lambda device: torch.ones(300, device=device) @ torch.ones(3, device=device),
    lambda device: torch.linalg.cholesky(-torch.eye(30, device=device)),
    lambda device: torch.ones(3, device=device) + torch.ones(3),
    lambda device: nn.functional.embedding(torch.tensor([7], device=device), torch.ones(3, 3, device=device)),
    lambda device: torch.cat([torch.ones(3, 3, device=device), torch.ones(2, 2, device=device)]),
    lambda device: torch.ones(3, 3, device=device).to_sparse(),
], ids=["mv", "cholesky", "mixture", "embedding", "cat", "to_sparse"])  # fmt: skip
def test_an_operator_that_raises_leaves_nothing(work, device, balanced):
    with pytest.raises((RuntimeError, IndexError)):
        work(device)


def test_training_leaves_nothing(device, balanced):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(5, 1, 4, 4, device=device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_limit(device, module, balanced):
    refusals = module.memory_stats()["num_ooms"]
    with simulate(memory=balanced + 2**20):
        x = torch.ones(100_000, device=device)
        attempts = [
            lambda: x * 2 * 2 * 2,
            lambda: torch.cat([x, x, x]),
            lambda: torch.empty(10**7, device=device),
            lambda: x.resize_(10**6),
            lambda: x.untyped_storage().resize_(10**7),
            x.nonzero,
            lambda: torch.ones(300_000).to(device),
            lambda: torch.mm(x[:1000, None], x[None, :1000]),
            lambda: torch.add(x, 1, out=torch.empty(0, dtype=torch.float64, device=device)),
            lambda: torch.nn.functional.conv1d(x[None], torch.ones(8, 1, 3, device=device)),
        ]
        for attempt in attempts:
            with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate"):
                attempt()
            gc.collect()
            assert module.memory_allocated() == balanced + 400_384
            assert x.shape == (100_000,) and x.sum() == 100_000
        x * 2  # there is room for this
    assert module.memory_stats()["num_ooms"] == refusals + len(attempts)
    (x * 2 * 2 * 2).sum()


def test_a_device_that_runs_out_in_backward(device, module, balanced):
    with simulate(memory=balanced + 5 * 2**20):
        x = torch.ones(2**18, device=device, requires_grad=True)
        y = x
        for _ in range(3):
            y = y.exp()
        with pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()
        del x, y


def test_fresh_memory_can_be_poisoned(device):
    with simulate(poison=True):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert torch.empty(5, dtype=dtype, device=device).isnan().all()
        x = torch.ones(2, device=device)
        assert torch.empty_like(x).isnan().all()
        assert x.new_empty(3).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2), device=device).isnan().all()
        assert x.resize_(64)[2:].isnan().all()
        assert x[:2].sum() == 2
        assert torch.zeros(3, device=device).sum() == 0
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        assert model(torch.ones(2, 3, device=device)).isfinite().all()


def test_a_storage_goes_and_comes_back(device, module, balanced):
    """As FSDP frees and restores parameters."""
    x = torch.ones(1024, device=device)
    view = x[:3]
    storage = x.untyped_storage()
    storage.resize_(0)
    assert module.memory_allocated() == balanced
    assert storage.nbytes() == 0
    storage.resize_(4096)
    assert module.memory_allocated() == balanced + 4096
    x.fill_(2)
    assert view.sum() == 6
    del x, view, storage


def test_a_storage_keeps_what_fits(device, balanced):
    x = torch.arange(4.0, device=device)
    x.untyped_storage().resize_(64)
    assert x.tolist() == [0, 1, 2, 3]


def test_out_is_resized(device, balanced):
    x = torch.arange(3.0, device=device)
    out = torch.empty(0, device=device)
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == [1, 2, 3]
    torch.cat([x, x], out=out.resize_(0))
    assert out.tolist() == [0, 1, 2, 0, 1, 2]
    values, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.long, device=device)
    torch.sort(-x, out=(values, indices))
    assert indices.tolist() == [2, 1, 0]
    transposed = torch.zeros(2, 3, device=device).t()
    torch.mm(torch.ones(3, 1, device=device), torch.ones(1, 2, device=device), out=transposed)
    assert transposed.stride() == (1, 3)
    assert transposed.sum() == 6
    some = torch.zeros(6, device=device)
    torch.add(x, 1, out=some[::2])
    assert some.tolist() == [1, 0, 2, 0, 3, 0]


def test_overlapping_memory(device):
    x = torch.zeros(1, device=device).expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)
    y = torch.arange(5.0, device=device)
    with pytest.raises(RuntimeError, match="single memory location"):
        y[1:].mul_(y[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.add(y[:-1], 1, out=y[1:])
    assert y.mul_(y).tolist() == [0, 1, 4, 9, 16]
    assert y.t().add_(y).sum() == 60


def test_set_(device, second, balanced):
    x, y = torch.zeros(2, device=device), torch.arange(6.0, device=device)
    x.set_(y)
    assert x.data_ptr() == y.data_ptr()
    x.set_(y.untyped_storage(), 1, (2, 2), (1, 2))
    assert x.tolist() == [[1, 3], [2, 4]]
    with pytest.raises(RuntimeError, match="different device"):
        x.set_(torch.ones(2).untyped_storage())
    with pytest.raises(RuntimeError, match="different device"):
        x.set_(torch.ones(2, device=second).untyped_storage())
    x.set_()
    assert x.shape == (0,)
    assert x.device == device


def test_results_that_are_views_stay_views(device, balanced):
    x = torch.arange(6.0, device=device)
    for view in (x.view(2, 3), x[1:], x.reshape(3, 2), x.as_strided((2,), (2,)), x.unfold(0, 2, 2), x.detach(), x.real):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x.contiguous() is x
    assert x.clone().data_ptr() != x.data_ptr()
    x.view(2, 3)[1].zero_()
    assert x.tolist() == [0, 1, 2, 0, 0, 0]
    halves = x.split(3)
    halves[0].fill_(7)
    assert x.sum() == 21


def test_conjugate_and_negative_views(device):
    x = torch.tensor([1 + 2j, 3 - 4j], device=device)
    conjugate = x.conj()
    assert conjugate.is_conj() and conjugate.data_ptr() == x.data_ptr()
    assert conjugate.tolist() == [1 - 2j, 3 + 4j]
    assert conjugate.imag.is_neg()
    assert conjugate.imag.tolist() == [-2, 4]
    assert (conjugate * x).tolist() == [5, 25]
    assert torch.equal(conjugate.cpu(), x.cpu().conj())
    y = torch.empty_like(x).copy_(conjugate)
    assert not y.is_conj() and y.tolist() == [1 - 2j, 3 + 4j]
    conjugate.copy_(x)  # through the conjugate view
    assert x.tolist() == [1 - 2j, 3 + 4j]
    torch.view_as_real(x)[:, 0] = 0
    assert x.tolist() == [-2j, 4j]
    assert torch.vdot(x, x) == 20
    assert (x[None].conj() @ x).tolist() == [20]


def test_nothing_and_one_thing(device):
    assert torch.empty(0, 3, device=device).sum() == 0
    assert torch.zeros((), device=device).item() == 0
    assert nn.Linear(3, 2).to(device)(torch.empty(0, 3, device=device)).shape == (0, 2)
    assert (torch.ones(3, 0, device=device) @ torch.ones(0, 2, device=device)).tolist() == [[0, 0]] * 3
    assert torch.cat([torch.empty(0, device=device), torch.ones(2, device=device)]).sum() == 2
    assert torch.empty(0, device=device).cpu().to(device).shape == (0,)
    assert torch.ones(2, 0, device=device).nonzero().shape == (0, 2)


def test_zeros_that_autograd_makes_have_no_memory(device, balanced):
    """The gradient of sign is an efficient zero tensor, whose memory nobody may read."""
    x = torch.randn(3, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sgn().sum(), x)
    assert gradient.tolist() == [0, 0, 0]
    assert (gradient + 1).sum() == 3
    assert torch.func.jvp(lambda x: x.sgn() * x, (x.detach(),), (torch.ones_like(x),))[1].cpu().isfinite().all()


def test_an_operator_in_place_knows_its_input(device):
    x = torch.ones(5, 1, device=device)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        x.logical_and_(torch.ones(5, 5, device=device))
    assert x.shape == (5, 1)


def test_a_kernel_may_leave_its_result_conjugated(device):
    matrix = torch.tensor([[2 + 1j, 1j], [1, 3 - 1j]])
    factors, pivots = torch.linalg.lu_factor(matrix)
    expected = torch.linalg.lu_solve(factors, pivots, matrix, left=False)
    result = torch.linalg.lu_solve(factors.to(device), pivots.to(device), matrix.to(device), left=False)
    assert torch.equal(result.cpu(), expected)


READERS = {
    "an operator": lambda x, view: x + 1,
    "in place": lambda x, view: x.mul_(2),
    "out=": lambda x, view: torch.add(torch.ones_like(x), 1, out=x),
    "a view": lambda x, view: view.sum(),
    "a list": lambda x, view: torch.cat([x, x]),
    "cpu": lambda x, view: x.cpu(),
    "item": lambda x, view: view[0, 3].item(),
    "copy to it": lambda x, view: x.copy_(torch.ones(1024)),
    "fill_": lambda x, view: x.fill_(1),
    "a kernel of the device's own": lambda x, view: nn.functional.dropout(x),
    "convolution": lambda x, view: nn.functional.conv1d(view, x.new_ones(1, 1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0, 8])
@pytest.mark.parametrize("reader", READERS)
def test_memory_that_is_gone_is_not_read(reader, nbytes, device, balanced):
    """As after FSDP has freed a parameter that somebody kept."""
    x = torch.ones(1024, device=device)
    view = x[None]
    x.untyped_storage().resize_(nbytes)
    # The second is torch's own, for a view of what is gone.
    words = rf"\(\d+ bytes, .*freed or shrunk to {nbytes} bytes|out of bounds for storage of size {nbytes}"
    with pytest.raises(RuntimeError, match=words):
        READERS[reader](x, view)
    if nbytes:
        assert (x[:2] + 1).shape == (2,)  # what is still there may be read
    assert (x[:0] + 1).shape == (0,)
    x.untyped_storage().resize_(x.nbytes)
    READERS[reader](x, view)


def test_two_tensors_of_one_memory(device, module):
    """An operator may give the same memory twice, as a constant that it keeps."""
    library = torch.library.Library("simulator_tests", "FRAGMENT")
    library.define("constant(Tensor like) -> Tensor")
    kept = torch.arange(4.0)
    library.impl("constant", lambda like: kept, "CPU")
    like = torch.ones(1, device=device)
    for which in (0, 1):
        both = [torch.ops.simulator_tests.constant(like) for _ in range(2)]
        address = both[0].data_ptr()
        assert address == both[1].data_ptr()
        del both[which]
        gc.collect()
        assert flavour_named(device.type).ops.device_of(address) == device.index
        assert both[0].tolist() == [0, 1, 2, 3]
        del both
