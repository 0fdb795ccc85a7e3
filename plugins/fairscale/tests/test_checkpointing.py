"""Layers that are computed again train as they do otherwise: in every precision, with batch norms, in copies."""

import copy
import io

import fairscale_training as training
import pytest
import torch
from parity_models import Attention, Perceptron
from torch import nn
from torch.optim.swa_utils import AveragedModel

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(240)]


def equal(results, reference):
    for mine, other in zip(results, reference, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(mine["state"][name], value) for name, value in other["state"].items())


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *[(strategy, precision) for strategy in ("oss", "sdp") for precision in ("32-true", "bf16-mixed", "64-true")],
        ("oss", "16-mixed"),
    ],
)
def test_activation_checkpointing_equals_ddp(world2, strategy, precision):
    """fairscale computes a layer again without autocast on a CPU, and in float16 on a GPU."""
    options = {"precision": precision, "gradient_clip_val": 0.5}
    equal(
        world2.run(training.train, f"{strategy}_checkpointed", "Attention", options),
        world2.run(training.train, "ddp", "Attention", options),
    )


class Block(nn.Module):
    """A layer with a batch norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.linear(self.norm(x)))


class Blocks(Perceptron):
    """A model of such layers."""

    def build(self):
        return nn.Sequential(nn.Linear(64, 64), Block(), Block(), nn.Linear(64, 4))


for name, make in (("oss", training.oss), ("sdp", training.sdp)):
    training.STRATEGIES[f"{name}_blocks"] = lambda make=make: make(activation_checkpointing=Block)


def blocks(strategy):
    return training.fit(strategy, Blocks())


@pytest.mark.parametrize("strategy", ["oss", "sdp"])
def test_batch_norms_count_a_batch_once(world2, strategy):
    found, expected = world2.run(blocks, f"{strategy}_blocks"), world2.run(blocks, "ddp")
    equal(found[:1], expected[:1])  # running statistics are those of rank 0


def statistics_after_an_error():
    """Return whether batch norms follow their batches after a layer has raised, and what else is on the layers."""
    model = Blocks()

    def forward_that_fails(self, x):
        self.norm(x)
        raise ValueError("the cause")

    own, Block.forward = Block.forward, forward_that_fails
    try:
        training.fit("oss_blocks", model)
    except ValueError:
        pass
    finally:
        Block.forward = own
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
    names = ("forward", "_track_running_stats_backup")
    left = [name for layer in model.modules() for name in names if name in vars(layer)]
    hooks = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules())
    return [norm.track_running_stats for norm in norms], left, hooks


def test_an_error_in_a_layer_leaves_its_batch_norms_as_they_were(world2):
    """fairscale's hooks set ``track_running_stats`` back after a forward that succeeds."""
    assert world2.run(statistics_after_an_error) == [([True, True], [], 0)] * 2


class Copied(Attention):
    """Copies itself when training begins, by copy and by pickle, as an average of weights does."""

    def on_train_start(self):
        self.__dict__["copies"] = [copy.deepcopy(self.body), pickled(self.body), AveragedModel(self).module.body]


def pickled(layers):
    file = io.BytesIO()
    torch.save(layers, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def outputs_of_copies(strategy):
    """Return whether copies made in the run compute, and learn, with weights of their own; and train by themselves."""
    model = Copied()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    before = model.body(x).detach()
    training.fit(strategy, model)
    found = []
    for copied in model.copies:
        output = copied(x)
        output.sum().backward()
        found.append(torch.equal(output, before) and all(one.grad is not None for one in copied.parameters()))
    again = Attention()
    again.body = copy.deepcopy(model.copies[0])
    again.zero_grad()
    return found, training.fit(strategy, again)["losses"], training.fit(strategy, Attention())["losses"]


@pytest.mark.parametrize("strategy", ["oss_checkpointed", "sdp_checkpointed"])
def test_a_copy_of_the_model_made_in_a_run_has_its_own_weights(world2, strategy):
    for found, losses, expected in world2.run(outputs_of_copies, strategy):
        assert found == [True, True, True]
        assert losses == expected
