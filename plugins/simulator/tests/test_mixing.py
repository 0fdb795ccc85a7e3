"""Tensors of two devices in one operator: what CUDA refuses is refused, what CUDA allows works.

Each probe gets ``here``, on the device, and ``there``, on the CPU or on another device. What CUDA does with it was
written down from its kernels' checks.
"""

import pytest
import torch
from torch.nn import functional as F

from torchhal_simulator import load


class Inputs:
    """Fresh operands on one device."""

    def __init__(self, device):
        def draw(*shape):
            return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)

        self.device = torch.device(device)
        self.number = torch.tensor(2.0, device=device)
        self.index = torch.tensor([2, 0, 1], device=device)
        self.mask = torch.tensor([True, False, True], device=device)
        self.vector = draw(3)
        self.matrix = draw(3, 3)
        self.batch = draw(2, 3, 3)
        self.images = draw(2, 3, 4, 4)
        self.filters = draw(5, 3, 2, 2)
        self.square = draw(3, 3) + 5 * torch.eye(3, device=device)


def assign(tensor, index, value):
    tensor[index] = value
    return tensor


# What CUDA refuses, whether the other tensor is on the CPU or on another device.
REFUSED = {
    "add": lambda here, there: here.vector + there.vector,
    "add, the other way round": lambda here, there: there.vector + here.vector,
    "add in place": lambda here, there: here.vector.add_(there.vector),
    "add in place to the other": lambda here, there: there.vector.add_(here.vector),
    "add a device's number in place to the other": lambda here, there: there.vector.add_(here.number),
    "add a device's number to the other": lambda here, there: there.vector + here.number,
    "add out=": lambda here, there: torch.add(here.vector, here.vector, out=there.vector),
    "maximum": lambda here, there: torch.maximum(here.vector, there.vector),
    "pow": lambda here, there: here.vector**there.vector,
    "eq": lambda here, there: here.vector == there.vector,
    "clamp": lambda here, there: here.vector.clamp(min=there.vector),
    "lerp": lambda here, there: here.vector.lerp(here.vector, there.vector),
    "addcmul": lambda here, there: torch.addcmul(here.vector, there.vector, here.vector),
    "where, the condition": lambda here, there: torch.where(there.mask, here.vector, here.vector),
    "where, a value": lambda here, there: torch.where(here.mask, here.vector, there.vector),
    "mm": lambda here, there: here.matrix @ there.matrix,
    "mm, the other way round": lambda here, there: there.matrix @ here.matrix,
    "mm out=": lambda here, there: torch.mm(here.matrix, here.matrix, out=there.matrix),
    "addmm": lambda here, there: torch.addmm(there.vector, here.matrix, here.matrix),
    "bmm": lambda here, there: torch.bmm(here.batch, there.batch),
    "mv": lambda here, there: torch.mv(here.matrix, there.vector),
    "dot": lambda here, there: torch.dot(here.vector, there.vector),
    "outer": lambda here, there: torch.outer(here.vector, there.vector),
    "einsum": lambda here, there: torch.einsum("ij,jk->ik", here.matrix, there.matrix),
    "linalg.solve": lambda here, there: torch.linalg.solve(here.square, there.vector),
    "cdist": lambda here, there: torch.cdist(here.matrix, there.matrix),
    "equal": lambda here, there: torch.equal(here.vector, there.vector),
    "allclose": lambda here, there: torch.allclose(here.vector, there.vector),
    "cat": lambda here, there: torch.cat([here.vector, there.vector]),
    "cat, the other first": lambda here, there: torch.cat([there.vector, here.vector]),
    "stack": lambda here, there: torch.stack([here.vector, there.vector]),
    "stack of numbers": lambda here, there: torch.stack([here.number, there.number]),
    "index_select": lambda here, there: here.vector.index_select(0, there.index),
    "index_select from the other": lambda here, there: there.vector.index_select(0, here.index),
    "gather": lambda here, there: here.vector.gather(0, there.index),
    "scatter, the index": lambda here, there: here.vector.scatter(0, there.index, here.vector),
    "scatter, the source": lambda here, there: here.vector.scatter(0, here.index, there.vector),
    "scatter_add_": lambda here, there: here.vector.scatter_add_(0, there.index, here.matrix[0]),
    "index_add_": lambda here, there: here.vector.index_add_(0, there.index, here.matrix[0]),
    "index_copy_": lambda here, there: here.vector.index_copy_(0, here.index, there.vector),
    "index_fill_": lambda here, there: here.vector.index_fill_(0, there.index, 1.0),
    "take": lambda here, there: here.vector.take(there.index),
    "masked_fill": lambda here, there: here.vector.masked_fill(there.mask, 1.0),
    "masked_fill, a mask of no dimension": lambda here, there: here.vector.masked_fill(there.mask[0], 1.0),
    "masked_fill of the other": lambda here, there: there.vector.masked_fill(there.mask, here.number),
    "masked_select": lambda here, there: here.vector.masked_select(there.mask),
    "masked_scatter_": lambda here, there: here.vector.masked_scatter_(there.mask, here.vector),
    "x[i] of the other": lambda here, there: there.vector[here.index],
    "x[i] = v": lambda here, there: assign(here.vector, here.index, there.vector),
    "searchsorted": lambda here, there: torch.searchsorted(here.vector, there.vector),
    "bucketize": lambda here, there: torch.bucketize(here.vector, there.vector),
    "bincount": lambda here, there: torch.bincount(here.index, weights=there.vector),
    "quantile": lambda here, there: torch.quantile(here.vector, there.vector.sigmoid()),
    "linear, the weight": lambda here, there: F.linear(here.vector, there.matrix),
    "linear, the bias": lambda here, there: F.linear(here.matrix, here.matrix, there.vector),
    "linear, the input": lambda here, there: F.linear(there.matrix, here.matrix),
    "bilinear": lambda here, there: F.bilinear(here.matrix, here.matrix, there.batch),
    "conv2d, the weight": lambda here, there: F.conv2d(here.images, there.filters),
    "conv2d, the input": lambda here, there: F.conv2d(there.images, here.filters),
    "conv2d, the bias": lambda here, there: F.conv2d(here.images, here.filters, there.images[0, 0, 0].new_zeros(5)),
    "conv_transpose2d": lambda here, there: F.conv_transpose2d(here.images, there.filters.transpose(0, 1)),
    "embedding, the index": lambda here, there: F.embedding(there.index, here.matrix),
    "embedding, the weight": lambda here, there: F.embedding(here.index, there.matrix),
    "embedding_bag": lambda here, there: F.embedding_bag(there.index[None], here.matrix),
    "cross_entropy, the target": lambda here, there: F.cross_entropy(here.matrix, there.index),
    "cross_entropy, the weight": lambda here, there: F.cross_entropy(here.matrix, here.index, weight=there.vector),
    "nll_loss": lambda here, there: F.nll_loss(here.matrix, there.index),
    "mse_loss": lambda here, there: F.mse_loss(here.matrix, there.matrix),
    "smooth_l1_loss": lambda here, there: F.smooth_l1_loss(here.matrix, there.matrix),
    "bce_with_logits": lambda here, there: F.binary_cross_entropy_with_logits(here.matrix, there.matrix.sigmoid()),
    "kl_div": lambda here, there: F.kl_div(here.matrix, there.matrix),
    "batch_norm, the weight": lambda here, there: F.batch_norm(
        here.images, here.vector, here.vector.abs(), there.vector, there.vector
    ),
    "batch_norm, the statistics": lambda here, there: F.batch_norm(
        here.images, there.vector, there.vector.abs(), training=True
    ),
    "layer_norm": lambda here, there: F.layer_norm(here.matrix, (3,), there.vector, there.vector),
    "group_norm": lambda here, there: F.group_norm(here.images, 3, there.vector, there.vector),
    "prelu": lambda here, there: F.prelu(here.images, there.vector),
    "attention": lambda here, there: F.scaled_dot_product_attention(here.batch, there.batch, there.batch),
    "attention, the mask": lambda here, there: F.scaled_dot_product_attention(
        here.batch, here.batch, here.batch, attn_mask=there.matrix
    ),
    "grid_sample": lambda here, there: F.grid_sample(here.images, there.images[..., :2], align_corners=False),
    "lstm, the state": lambda here, there: torch.nn.LSTM(3, 3, device=here.device)(
        here.batch, (there.batch[:1], there.batch[:1])
    ),
    "lstm, the input": lambda here, there: torch.nn.LSTM(3, 3, device=here.device)(there.batch),
    "lstm_cell": lambda here, there: torch.nn.LSTMCell(3, 3, device=here.device)(
        here.matrix, (there.matrix, there.matrix)
    ),
    "gru_cell": lambda here, there: torch.nn.GRUCell(3, 3, device=here.device)(here.matrix, there.matrix),
    "stft": lambda here, there: torch.stft(
        here.images.reshape(-1), 8, window=there.images.reshape(-1)[:8], return_complex=True
    ),
    "a gradient of backward()": lambda here, there: here.vector.requires_grad_().mul(2).backward(there.vector),
    "an assigned gradient": lambda here, there: setattr(here.vector.requires_grad_(), "grad", there.vector),
    "set_": lambda here, there: here.vector.set_(there.vector),
    "foreach": lambda here, there: torch._foreach_add([here.vector], [there.vector]),
    "unscaling gradients": lambda here, there: torch._amp_foreach_non_finite_check_and_unscale_(
        [here.vector], here.number.clone(), there.number.clone()
    ),
}

# What CUDA allows with tensors on the CPU only: numbers, indices, copies.
ALLOWED_WITH_CPU = {
    "add a number": lambda here, there: here.vector + there.number,
    "add to a number": lambda here, there: there.number + here.vector,
    "multiply in place by a number": lambda here, there: here.vector.mul_(there.number),
    "raise to a number": lambda here, there: here.vector.abs() ** there.number,
    "compare with a number": lambda here, there: here.vector > there.number,
    "where, a number": lambda here, there: torch.where(here.mask, here.vector, there.number),
    "where, a condition of no dimension": lambda here, there: torch.where(there.mask[0], here.vector, here.vector),
    "lerp by a number": lambda here, there: here.vector.lerp(here.vector * 2, there.number),
    "masked_fill with a number": lambda here, there: here.vector.masked_fill(here.mask, there.number),
    "index_fill_ with a number": lambda here, there: here.vector.index_fill_(0, here.index, there.number),
    "x[i]": lambda here, there: here.vector[there.index],
    "x[mask]": lambda here, there: here.vector[there.mask],
    "x[i] = v, the index": lambda here, there: here.vector.index_put_((there.index,), here.matrix[0]),
    "x[i] = number": lambda here, there: assign(here.vector, here.index, there.number),
    "foreach by a number": lambda here, there: torch._foreach_mul([here.vector], there.number)[0],
    "tensor_split": lambda here, there: torch.tensor_split(here.vector, there.index[:1])[1],
    "packed lengths": lambda here, there: (
        torch.nn.utils.rnn.pack_padded_sequence(here.batch, there.index.new_tensor([3, 2, 1])).data
    ),
}

# What CUDA allows with any other device: copies, and what reads a number to the host first.
ALLOWED = {
    "copy_": lambda here, there: here.vector.copy_(there.vector),
    "copy_ to the other": lambda here, there: there.vector.copy_(here.vector).to(here.device),
    "foreach copy": lambda here, there: torch._foreach_copy_([here.vector], [there.vector])[0],
    "x[slice] = v": lambda here, there: assign(here.vector, slice(1), there.vector[:1]),
    "ctc_loss, the lengths": lambda here, there: F.ctc_loss(
        here.batch.log_softmax(-1), here.index[None, :1].repeat(3, 1) * 0 + 1, there.index * 0 + 2, there.index * 0 + 1
    ),
    "fill_": lambda here, there: here.vector.fill_(there.number),
    "fill_ the other": lambda here, there: there.vector.fill_(here.number).to(here.device),
    "to(other)": lambda here, there: here.vector.to(there.vector),
    "full": lambda here, there: torch.full((2,), there.number.item(), device=here.device),
}


def test_there_are_enough_probes():
    assert len(REFUSED) + len(ALLOWED_WITH_CPU) + len(ALLOWED) > 100


@pytest.mark.parametrize("probe", REFUSED)
def test_refused_with_cpu(probe, device):
    if "mask of no dimension" not in probe:
        REFUSED[probe](Inputs(device), Inputs(device))  # with one device it works
    with pytest.raises(RuntimeError, match=r"device|type"):
        REFUSED[probe](Inputs(device), Inputs("cpu"))


@pytest.mark.parametrize("probe", REFUSED)
def test_refused_with_another_index(probe, device, second):
    with pytest.raises(RuntimeError, match=r"device|type"):
        REFUSED[probe](Inputs(device), Inputs(second))


@pytest.mark.parametrize("probe", ALLOWED_WITH_CPU | ALLOWED)
def test_allowed_with_cpu(probe, device):
    function = (ALLOWED_WITH_CPU | ALLOWED)[probe]
    expected = function(Inputs("cpu"), Inputs("cpu"))
    result = function(Inputs(device), Inputs("cpu"))
    assert result.device == (torch.device("cpu") if probe == "to(other)" else device)
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("probe", ALLOWED)
def test_allowed_with_another_index(probe, device, second):
    expected = ALLOWED[probe](Inputs("cpu"), Inputs("cpu"))
    assert torch.equal(ALLOWED[probe](Inputs(device), Inputs(second)).cpu(), expected)


@pytest.mark.parametrize("probe", ALLOWED_WITH_CPU)
def test_numbers_and_indices_of_another_index_are_refused(probe, device, second):
    with pytest.raises((RuntimeError, IndexError), match=r"device|cpu|CPU"):
        ALLOWED_WITH_CPU[probe](Inputs(device), Inputs(second))


def test_both_flavours_live_in_one_process_and_do_not_mix(second):
    load("hpu")
    for here, there in (("sim", "hpu"), ("hpu", "sim")):
        for probe, function in REFUSED.items():
            if "gradient" not in probe:
                with pytest.raises(RuntimeError):
                    function(Inputs(here), Inputs(there))
    sim, hpu = Inputs("sim").matrix.requires_grad_(), Inputs("hpu").matrix
    (sim @ sim).sum().backward()
    assert torch.equal((sim @ sim).cpu(), (hpu @ hpu).cpu())
    assert torch.equal(hpu.cpu().to("sim"), sim)


def test_a_gradient_goes_back_to_a_number_on_the_cpu(device):
    number = torch.tensor(3.0, requires_grad=True)
    (torch.ones(2, device=device) * number).sum().backward()
    assert number.grad.device.type == "cpu"
    assert number.grad == 2


@pytest.mark.parametrize("draw", [
    lambda device, generator: torch.empty(3, device=device).uniform_(generator=generator),
    lambda device, generator: torch.randn(3, device=device, generator=generator),
    lambda device, generator: torch.randperm(3, device=device, generator=generator),
    lambda device, generator: torch.multinomial(torch.ones(3, device=device), 2, generator=generator),
    lambda device, generator: torch.bernoulli(torch.ones(3, device=device), generator=generator),
    lambda device, generator: torch.normal(torch.ones(3, device=device), 1.0, generator=generator),
], ids=["uniform_", "randn", "randperm", "multinomial", "bernoulli", "normal"])  # fmt: skip
def test_a_generator_of_another_device_is_refused(draw, device):
    assert draw(device, torch.Generator(device)).device == device
    with pytest.raises(RuntimeError, match=r"Expected a .* device type for generator but found 'cpu'"):
        draw(device, torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        draw("cpu", torch.Generator(device))


def test_the_message_names_both_devices_and_the_argument(device):
    with pytest.raises(RuntimeError, match=f"at least two devices, {device} and cpu.*weight.*aten::nll_loss"):
        F.cross_entropy(torch.ones(2, 3, device=device), torch.zeros(2, dtype=torch.long, device=device), torch.ones(3))
