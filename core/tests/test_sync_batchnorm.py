"""Batch norms over the batches of all ranks, against one process on the whole batch."""

import copy
import pickle

import hardware
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from world import joined, rank, size

from torchhal import Callback, Module, Trainer
from torchhal.errors import ModelError, UnsupportedCombinationError
from torchhal.strategies import DDPStrategy, ParallelStrategy
from torchhal.strategies._sync_batchnorm import restore_batchnorms, synchronize_batchnorms

pytestmark = pytest.mark.usefixtures("accelerator")

SIZES = [3, 5, 2]  # samples of each rank: uneven
LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "of sequences": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 4, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "without weights": (lambda: nn.BatchNorm2d(3, affine=False), (3, 4, 4)),
    "with a cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "without running statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
    "in a model, frozen": (lambda: nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.Linear(3, 2)), (3,)),
}


def close(found, expected, tolerance=2e-5):
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def one_layer(name):
    make, shape = LAYERS[name]
    sizes = SIZES[: size()]
    own = slice(sum(sizes[: rank()]), sum(sizes[: rank() + 1]))
    torch.manual_seed(0)
    alone = make()
    for parameter in alone.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    with joined() as strategy:
        device = strategy.root_device
        mine = copy.deepcopy(alone).to(device)
        layers = synchronize_batchnorms(mine, dist.group.WORLD)
        for _ in range(2):
            whole = (3 * torch.randn(sum(sizes), *shape) + 10).requires_grad_()
            expected = alone(whole)
            weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
            (expected * weights).sum().backward()
            part = whole.detach()[own].to(device).requires_grad_()
            found = mine(part)
            (found * weights[own].to(device)).sum().backward()
            close(found, expected[own].detach())
            close(part.grad, whole.grad[own], 1e-4)
        for trained, reference in zip(mine.parameters(), alone.parameters(), strict=True):
            if reference.grad is None:
                assert trained.grad is None
            else:
                close(strategy.reduce(trained.grad, "sum"), reference.grad, 1e-4)
        for buffer, reference in zip(mine.buffers(), alone.buffers(), strict=True):
            close(buffer, reference)
        if list(alone.buffers()):
            mine.eval()
            alone.eval()
            close(mine(whole.detach()[own].to(device)), alone(whole)[own].detach())
        restore_batchnorms(layers)
        assert len(layers) == 1 and "forward" not in layers[0].__dict__


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_the_whole_batch(world3, name):
    """Its output, the gradients, the running statistics; with other numbers of samples on each rank."""
    world3.run(one_layer, name)


def in_half():
    with joined() as strategy:
        layer = nn.BatchNorm1d(3).to(strategy.root_device)
        synchronize_batchnorms(layer, dist.group.WORLD)
        values = torch.randn(4, 3, device=strategy.root_device).bfloat16()
        assert layer(values).dtype is torch.bfloat16
        assert layer.running_mean.dtype is torch.float32


def second_order():
    """A gradient penalty: the gradient of the gradient."""

    def penalty(layer, values, weights):
        (grad,) = torch.autograd.grad((layer(values).tanh() * weights).sum(), values, create_graph=True)
        return grad.square().sum()

    torch.manual_seed(0)
    whole, weights = torch.randn(8, 3, requires_grad=True), torch.randn(8, 3)
    own = slice(4 * rank(), 4 * rank() + 4)
    with joined():
        alone, mine = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        synchronize_batchnorms(mine, dist.group.WORLD)
        penalty(alone, whole, weights).backward()
        part = whole.detach()[own].requires_grad_()
        penalty(mine, part, weights[own]).backward()
        close(part.grad, whole.grad[own], 1e-4)


def test_half_precision_stays(world2):
    world2.run(in_half)


@pytest.mark.one_accelerator
def test_a_gradient_of_a_gradient(world2, accelerator):
    world2.run(second_order)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.remembered = [self.body[1]]  # a reference that no walk over the model finds

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        assert self.remembered[0] is self.body[1]
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def data():
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(36, 4, generator=generator) + 1
    return TensorDataset(x, (x.sum(1) > 4).long())


class Copies(Callback):
    """What an average of the weights does: a copy of the model, in the midst of a run."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.copied = copy.deepcopy(module.body)
        for copied in (self.copied, pickle.loads(pickle.dumps(module.body))):
            copied(torch.ones(2, 4, device=module.device) * (1 + trainer.global_rank))  # alone, and no rank waits


def fitted(sync, model=None, copies=None):
    trainer = Trainer(
        accelerator=hardware.name(), strategy="ddp", devices=size(), max_epochs=2, sync_batchnorm=sync, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[copies or Copies()],
    )  # fmt: skip
    model = model or Net()
    trainer.fit(model, DataLoader(data(), 12 // size()))
    assert "forward" not in model.body[1].__dict__
    state = _state(model)
    if trainer.is_global_zero:
        model.train().body(torch.randn(4, 4))  # on no other rank: the layer is its own again
    return state


def _state(model):
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.fixture
def plain():
    """The state after the same epochs in one process, without a Trainer."""
    model = Net()
    optimizer = model.configure_optimizers()
    for _ in range(2):
        for index, batch in enumerate(DataLoader(data(), 12)):
            optimizer.zero_grad()
            model.training_step(batch, index).backward()
            optimizer.step()
    return _state(model)


def test_a_fit_is_that_of_one_process(world, plain):
    for state in world.run(fitted, True):
        assert list(state) == list(plain)
        for name, value in plain.items():
            close(state[name], value)
    first = world.run(fitted, False)[0]
    assert not torch.allclose(first["body.0.weight"], plain["body.0.weight"], atol=1e-3), "it makes a difference"


class Own(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def copy_fitted():
    """Train with a copy that was made in a run, and with its like made before."""
    copies, states = Copies(), []
    fitted(True, copies=copies)
    fresh = Net().body
    fresh.load_state_dict(copies.copied.state_dict())
    for body in (copies.copied, fresh):
        model = Net()
        model.body, model.remembered = body, [body[1]]
        states.append(fitted(True, model))
    return states


def test_copied_model_is_synchronized(world2):
    """A copy of the model is synchronized in a fit of its own."""
    for of_copy, of_fresh in world2.run(copy_fitted):
        assert all(torch.equal(of_copy[name], value) for name, value in of_fresh.items())


def refused(kind):
    """What a fit with such a layer says: of torch's own also where nothing was asked for."""
    model = Net()
    model.body[1] = {"own": Own, "torch's": nn.SyncBatchNorm}[kind](6)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=size(), max_epochs=1, sync_batchnorm=kind == "own", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(model, DataLoader(data(), 12))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.one_accelerator
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("own", "'body.1' is a Own with a forward of its own"),
        ("torch's", "'body.1' is a torch.nn.SyncBatchNorm, which torch runs on GPUs alone"),
    ],
)
def test_unsynchronizable_layer_refused(world2, accelerator, kind, message):
    """A layer that can't be synchronized is refused before the first step."""
    assert all(message in said for said in world2.run(refused, kind))


@pytest.mark.one_accelerator
def test_strategy_without_sync_refused(accelerator):
    """A strategy that can't synchronize is refused before anything starts."""

    class Partly(ParallelStrategy):
        pass

    with pytest.raises(UnsupportedCombinationError, match=r"'Partly' can't let batch norms.*use one .* such as 'ddp'"):
        Trainer(accelerator="cpu", devices=2, strategy=Partly(), sync_batchnorm=True)
    assert Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(), sync_batchnorm=True).sync_batchnorm
    assert Trainer(accelerator="cpu", devices=1, sync_batchnorm=True).sync_batchnorm  # the batch is whole
