"""Test where a checkpoint has the epoch of the collaboration: in the strategy's state, formerly in the optimizer's."""

import pytest
import torch

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointMismatchError
from torchhal.precision import SinglePrecision
from torchhal_hivemind import HivemindStrategy


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.setattr("torchhal_hivemind._sdk.check", lambda *args: None, raising=False)
    made = HivemindStrategy(target_batch_size=8)
    made.configure(
        accelerator=CPUAccelerator(), precision=SinglePrecision(), checkpoint_io=TorchCheckpointIO(),
        cluster_environment=None, devices=[torch.device("cpu")], num_nodes=1,
    )  # fmt: skip
    return made


def stepped():
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_epoch_is_part_of_the_strategys_state(strategy):
    strategy.epoch = 7
    optimizer = stepped()
    state, own = strategy.optimizer_state(optimizer), strategy.state_dict()
    assert set(state) == {"state", "param_groups"} and own["collaboration_epoch"] == 7
    strategy.epoch = 0
    strategy.load_state_dict(own)
    strategy.load_optimizer_state(optimizer, state)
    assert strategy.epoch == 7 and not strategy._from_elsewhere


def test_checkpoint_with_the_epoch_in_the_optimizers_state_resumes(strategy):
    """As releases before 0.2 have written it, with an empty state of the strategy."""
    optimizer = stepped()
    state = {**optimizer.state_dict(), "collaboration_epoch": 5}
    strategy.load_state_dict({})
    strategy.load_optimizer_state(optimizer, state)
    assert strategy.epoch == 5 and not strategy._from_elsewhere


def test_checkpoint_of_another_strategy_has_no_epoch(strategy):
    optimizer = stepped()
    strategy.epoch = 3
    strategy.load_state_dict({"ddp_bucket_order": ["a"]})
    strategy.load_optimizer_state(optimizer, optimizer.state_dict())
    assert strategy.epoch == 0 and strategy._from_elsewhere


@pytest.mark.parametrize("epoch", [-1, True, "3", 2.0])
def test_impossible_epoch_is_refused(strategy, epoch):
    with pytest.raises(
        CheckpointMismatchError, match=f"'collaboration_epoch' must be an int of at least 0 .got {epoch!r}"
    ):
        strategy.load_state_dict({"collaboration_epoch": epoch})
