"""A loop by hand divides the arguments of ``strategy.model`` among the devices."""

import pytest
import torch
import torch.utils.checkpoint
from batch_parts import two_devices
from torch import nn
from torch.nn import functional as F

from torchhal.errors import ConfigurationError
from torchhal.resolve import Request, resolve
from torchhal_parallel.data_parallel import DataParallelStrategy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


class Sizes(nn.Module):
    """Notes how many samples, and where, each of its forwards has got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen = []

    def forward(self, x, scale=1.0, *, shift=None):
        self.seen.append((len(x), str(x.device)))
        output = self.layers(x) * scale
        return output if shift is None else output + shift

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0], 2.0, shift=batch[0][:, :2]), batch[1])


def loop_by_hand(place, name, how):
    """(weights, what the forwards have got) of the loop in the README, by ``strategy.model`` or by a step."""
    strategy = resolve(Request(accelerator=place[0], strategy=name, devices=place[1])).build()

    def run():
        strategy.setup_environment()
        try:
            model = Sizes()
            strategy.connect(model)
            strategy.setup_model()
            optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1)
            strategy.setup_optimizers([optimizer])

            def by_model(batch, index):
                return F.cross_entropy(strategy.model(batch[0], 2.0, shift=batch[0][:, :2]), batch[1])

            step = strategy.with_precision(by_model) if how == "model" else strategy.step_function("training_step")
            for index, batch in enumerate(by_hand_data()):
                optimizer.zero_grad()
                strategy.backward(step(strategy.batch_to_device(batch), index))
                strategy.optimizer_step(optimizer)
            return {name: tensor.cpu().clone() for name, tensor in strategy.module_state_dict().items()}, model.seen
        finally:
            strategy.teardown()

    return strategy.make_launcher().launch(run)


def by_hand_data():
    x = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(1))
    return [(part, (part.sum(1) > 0).long()) for part in x]


@two_devices
@pytest.mark.parametrize("how", ["model", "step"])
@pytest.mark.parametrize("name", ["dp", "ddp2"])
def test_a_loop_by_hand_computes_on_every_device(place, name, how):
    model = Sizes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in by_hand_data():
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    state, seen = loop_by_hand(place, name, how)
    devices = ["cpu", "cpu"] if place[0] == "cpu" else ["sim:0", "sim:1"]
    assert seen == list(zip([4, 3] * 6, devices * 6, strict=True))
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_a_split_of_batches_does_not_divide_arguments():
    strategy = resolve(
        Request(accelerator="cpu", devices=2, strategy=DataParallelStrategy(split=split_in_rows))
    ).build()
    strategy.setup_environment()
    try:
        strategy.connect(Sizes())
        strategy.setup_model(training=False)
        with pytest.raises(ConfigurationError, match=r"'split' .* divides batches.*step_function"):
            strategy.model(torch.zeros(4, 4))
    finally:
        strategy.teardown()


def split_in_rows(batch, parts):
    return [batch[start::parts] for start in range(parts)]
