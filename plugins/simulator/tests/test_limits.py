"""The device without what some hardware lacks."""

import pytest
import torch

from torchhal_simulator import restrict


@pytest.fixture
def without(device):
    restrict(device.type, float64=False, int64=False)
    yield device
    restrict(device.type)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_no_wide_numbers(without, dtype):
    makers = (
        lambda: torch.zeros(2, dtype=dtype, device=without),
        lambda: torch.zeros(2, dtype=dtype).to(without),
        lambda: torch.zeros(2, device=without).to(dtype),
        lambda: torch.linspace(0, 1, 3, dtype=dtype, device=without),
    )
    for make in makers:
        with pytest.raises(TypeError, match=f"{without.type} has no tensors of dtype"):
            make()
    assert (torch.ones(2, device=without) * 0.5).dtype == torch.float32


def test_whole_numbers_lose_their_upper_half_on_the_way(without):
    host = torch.tensor([7, -7, 2**31, 2**40 + 3])
    there = host.to(without)
    assert there.dtype == torch.int64 and there.cpu().tolist() == [7, -7, -(2**31), 3]
    restrict(without.type)
    assert host.to(without).cpu().equal(host) and torch.zeros(2, dtype=torch.float64, device=without).sum() == 0
