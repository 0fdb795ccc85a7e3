"""What ddp does beside averaging gradients is done under Horovod too: float16's range, buffers, pauses, timeouts."""

import time
from datetime import timedelta

import horovod_training as training
import pytest
import torch
from averaging_training import ReadsBuffers
from parity_models import Perceptron
from torch import nn
from torch.utils.data import TensorDataset

from torchhal import Module

pytestmark = [pytest.mark.usefixtures("horovod"), pytest.mark.timeout(240)]


class Steep(Module):
    """Has gradients of which a float16 can hold the mean, not the sum."""

    def __init__(self):
        super().__init__()
        self.weight, self.losses = nn.Parameter(torch.zeros(2)), []

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-14)

    @staticmethod
    def dataset():
        return TensorDataset(torch.tensor([[60000.0, 40000.0], [50000.0, -64000.0]]))


def steep(strategy, precision):
    return training.fit(strategy, Steep(), batch=1, max_epochs=1, precision=precision)["state"]["weight"]


@pytest.mark.parametrize(("strategy", "precision"), [("fp16", "32-true"), ("horovod", "16-true"), ("ddp", "16-true")])
def test_a_mean_that_is_a_float16_does_not_overflow(world2, strategy, precision):
    for weight in world2.run(steep, strategy, precision):
        assert torch.allclose(weight.float(), torch.tensor([-55000.0, 12000.0]) / 2**14, rtol=1e-3)


def horovods_own_average():
    """Return Horovod's average of two numbers in float16 whose sum is none."""
    found = []

    class Asks(Perceptron):
        def on_train_start(self):
            import horovod.torch as hvd

            found.append(float(hvd.allreduce(torch.tensor([60000.0], dtype=torch.float16), op=hvd.Average)))

    training.fit("horovod", Asks(), max_epochs=1)
    return found


def test_horovods_own_average_overflows_which_is_why_it_is_not_used(world2):
    """It divides the sum (0.28.1), so gradients are divided before they travel."""
    assert world2.run(horovods_own_average) == [[float("inf")]] * 2


def reads_buffers(strategy, accumulate, lbfgs=False):
    model = ReadsBuffers()
    if lbfgs:
        model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return training.fit(strategy, model, accumulate_grad_batches=accumulate, val_check_interval=4)


@pytest.mark.parametrize(("accumulate", "lbfgs"), [(1, False), (4, False), (1, True)])
def test_buffers_that_a_step_reads_are_those_of_ddp(world2, accumulate, lbfgs):
    """Rank 0's before each step of an accumulation but the later ones: to the bit, on both ranks."""
    ours = world2.run(reads_buffers, "horovod", accumulate, lbfgs)
    for mine, reference in zip(ours, world2.run(reads_buffers, "ddp", accumulate, lbfgs), strict=True):
        assert mine["losses"] == reference["losses"]
        for name, parameter in ReadsBuffers().named_parameters():
            assert torch.equal(mine["state"][name], reference["state"][name]), (name, parameter.shape)


class Sleeps(Perceptron):
    """Rank 1 takes longer over its second step than the others wait."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            time.sleep(8)
        return super().training_step(batch, batch_idx)


def sleeps():
    training.STRATEGIES["short"] = lambda: training.horovod(timeout=timedelta(seconds=3))
    try:
        training.fit("short", Sleeps(), max_epochs=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_time_out_names_the_parameter_and_the_rank(world2):
    waited = world2.run(sleeps, timeout=60)[0]
    assert "averaging of the gradient of 'body.4." in waited and "rank 1" in waited, waited
