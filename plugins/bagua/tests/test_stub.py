"""The stub by itself: how it quantizes, and where it waits as Bagua does."""

import pytest
import torch
from torch import nn

from bagua_stub.buckets import Backend, Bucket, gradient
from bagua_stub.quantization import compress, decompress


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_a_value_comes_back_within_a_step(scale):
    torch.manual_seed(0)
    values = torch.randn(3, 1000) * scale + scale * torch.tensor([[0.0], [7.0], [-7.0]])
    bounds, levels = compress(values)
    assert levels.dtype is torch.uint8 and bounds.shape == (3, 2)
    step = (bounds[:, 1:] - bounds[:, :1] + 1e-7) / 255
    wrong = (decompress(bounds, levels) - values).abs()
    rounding = values.abs().max() * 1e-6
    assert (wrong <= step + rounding).all()
    assert (wrong <= step / 2 + rounding).float().mean() > 0.99
    assert levels.unique().numel() > 200


def test_a_constant_and_what_is_not_finite():
    same = torch.full((1, 5), 3.0)
    assert (decompress(*compress(same)) - same).abs().max() < 1e-6
    for bad in (float("inf"), float("nan")):
        values = torch.tensor([[1.0, bad, 2.0]])
        assert not decompress(*compress(values)).isfinite().any()


def test_a_bucket_waits_for_all_its_tensors_and_holds_up_the_next():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    entries = [gradient(str(index), parameter) for index, parameter in enumerate(parameters)]
    first, second = Bucket(entries[:2], flatten=True, alignment=3), Bucket(entries[2:], flatten=False)
    assert first.flat.shape == (6,) and parameters[0].grad.data_ptr() == first.flat.data_ptr()
    sent = []
    first.operations = [lambda flat: sent.append("first"), lambda flat: flat.add_(1)]
    second.operations = [lambda flat: sent.append("second"), lambda flat: flat.add_(2)]
    backend = Backend()
    backend.register([first, second])
    backend.mark_ready("2")
    backend.mark_ready("0")
    assert not sent
    backend.mark_ready("1")
    assert sent == ["first", "second"]
    assert parameters[1].grad.tolist() == [1, 1] and parameters[2].grad.tolist() == [2, 2]
    parameters[1].grad = torch.zeros(2)  # as zero_grad leaves it to be: no longer in the bucket
    for name in "012":
        backend.mark_ready(name)
    assert parameters[1].grad.tolist() == [1, 1] and parameters[0].grad.tolist() == [2, 2]


def test_a_parameter_at_the_top_has_two_names():
    """Bagua's own: the wrapping's runner keeps clear of it."""
    from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel

    module = nn.Linear(2, 2)
    made = object.__new__(BaguaDistributedDataParallel)
    made.module, made.parameters_to_ignore = module, []
    assert [name for name, _ in made.bagua_build_params()] == [".weight", ".bias"]
