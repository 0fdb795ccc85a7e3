"""Training on the device gives the CPU's losses: the same kernels, another memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhal_simulator import counting


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def conv_net():
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(
            3, 8, 2, padding=1, bias=False
        ),  # no influence before the norm, so AdamW would follow rounding errors
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(3, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.cells(x.unflatten(1, (4, 3)))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(self.embed(x.unflatten(1, (4, 3)))).mean(1))


MODELS = {
    "mlp": mlp,
    "conv": conv_net,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Transformer,
}
OPTIMIZERS = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=0.01, **how),
}


def train(model, optimizer, device, steps=12, step=None, prepare=None):
    """The losses, and the model and optimizer afterwards."""
    torch.manual_seed(0)
    model = MODELS[model]().to(device)
    optimizer = OPTIMIZERS[optimizer](model.parameters(), **(prepare or {}))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 12, generator=generator)
        x, y = x.to(device), x[:, -4:].argmax(1).to(device)
        optimizer.zero_grad()
        losses.append((step or plain)(model, optimizer, x, y).item())
    return losses, model, optimizer


def plain(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_the_cpus(model, optimizer, how, device):
    if how == "foreach" and device.type == "hpu":
        pytest.skip("torch has no foreach optimizers for HPU")
    options = {"foreach": False} if how == "for-loop" else {how: True}
    losses, trained, used = train(model, optimizer, device, prepare=options)
    expected, reference, _ = train(model, optimizer, "cpu", prepare=options)
    assert losses[-1] < losses[0]
    # Attention and the recurrent cells are compositions here and kernels on the CPU. All else is equal to the bit where
    # the backward's thread has as many threads to sum with as this one, which earlier tests may have changed.
    tolerance = {"mlp": 2e-6, "conv": 2e-6}.get(model, 1e-5)
    assert losses == pytest.approx(expected, rel=tolerance, abs=0)
    for name, value in trained.state_dict().items():
        assert value.device == device
        if "in_proj_bias" not in name:  # a key's bias has no influence: AdamW scales the rounding errors up
            torch.testing.assert_close(value.cpu(), reference.state_dict()[name], rtol=0, atol=10 * tolerance)
    for state in used.state.values():
        for name, value in state.items():
            if name != "step":  # on the CPU, unless the optimizer is fused
                assert value.device == device


def test_an_optimizers_state_goes_to_the_cpu_and_back(device):
    _, model, optimizer = train("mlp", "adamw", device)
    state = copy.deepcopy(optimizer.state_dict())
    cpu_state = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    resumed = OPTIMIZERS["adamw"](twin.parameters())
    resumed.load_state_dict(cpu_state)
    assert resumed.state[twin[0].weight]["exp_avg"].device == device
    x, y = torch.randn(6, 12, device=device), torch.zeros(6, dtype=torch.long, device=device)
    assert plain(model, optimizer, x, y) == plain(twin, resumed, x, y)
    assert torch.equal(model[0].weight, twin[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_with_a_scaled_loss(dtype, device):
    def run(place):
        scaler = torch.amp.GradScaler(torch.device(place).type, init_scale=2.0**10, enabled=dtype == torch.float16)

        def step(model, optimizer, x, y):
            with torch.autocast(x.device.type, dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.device == x.device
            scaler.step(optimizer)
            scaler.update()
            return loss

        return train("mlp", "adamw", place, step=step)[0]

    # The lists of autocast differ: layer_norm is float32 on the device, as on CUDA, and lower precision on the CPU.
    assert run(device) == pytest.approx(run("cpu"), rel=0.05)


def test_a_scaler_skips_a_step_that_overflowed(device):
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    before = model[0].weight.clone()
    scaler.scale(model(torch.full((2, 12), float("inf"), device=device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping(foreach, device):
    def norms(place):
        torch.manual_seed(0)
        model = mlp().to(place)
        model(torch.ones(2, 12, device=place)).pow(2).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 5.0, foreach=foreach)
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        return [before.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]

    before, after = norms(device)
    assert [before, after] == pytest.approx(norms("cpu"), rel=1e-6)
    assert before > 0.5 and after == pytest.approx(0.5, rel=1e-4)


def test_a_step_has_no_hidden_synchronization(device):
    _, model, optimizer = train("conv", "adamw", device, steps=1)
    x, y = torch.randn(6, 12, device=device), torch.zeros(6, dtype=torch.long, device=device)
    with counting(device.type) as counted:
        plain(model, optimizer, x, y)
    assert counted.synchronizations == counted.h2d == counted.d2h == 0
    assert counted.operators > 50


def test_packed_sequences(device):
    torch.manual_seed(0)
    cells = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)

    def run(place):
        model = copy.deepcopy(cells).to(place)
        packed = nn.utils.rnn.pack_padded_sequence(x.to(place), torch.tensor([5, 2]))
        output, lengths = nn.utils.rnn.pad_packed_sequence(model(packed)[0])
        output.sum().backward()
        return output, lengths, model.weight_ih_l0.grad

    for result, expected in zip(run(device), run("cpu"), strict=True):
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_recurrent_cells(kind, bias, device):
    torch.manual_seed(0)
    cells = kind(3, 4, bias=bias).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def gradients(place):
        model, inputs = copy.deepcopy(cells).to(place), x.to(place).requires_grad_()
        output, state = model(inputs)
        (output.pow(2).sum() + sum(part.sum() for part in state)).backward()
        return [inputs.grad, *(parameter.grad for parameter in model.parameters())]

    for result, expected in zip(gradients(device), gradients("cpu"), strict=True):
        assert result.device == device
        torch.testing.assert_close(result.cpu(), expected)


def test_parameters_are_replaced_when_a_module_moves(device):
    """As torch does for every PrivateUse1 device: an optimizer made before would step the old ones. HPU keeps them."""
    model = nn.Linear(2, 2)
    before = model.weight
    assert (model.to(device).weight is before) == (device.type == "hpu")
