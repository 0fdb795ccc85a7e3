"""Test the checkpoints of a strategy: the CheckpointIO, state of another model, accumulated gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from regression import Regression, adam, batches, close, plain, same_everywhere, sgd, share
from world import compose, joined, rank, size

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import (
    CheckpointError,
    CheckpointMismatchError,
)
from torchhal.strategies import SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]


class SpyIO(TorchCheckpointIO):
    def __init__(self):
        super().__init__()
        self.calls = []

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.calls.append(("save", storage_options))
        if checkpoint.get("fail"):
            raise OSError("no space left")

    def load_checkpoint(self, path, *, map_location=None, weights_only=True):
        self.calls.append(("load", str(map_location), weights_only))
        return {}

    def remove_checkpoint(self, path):
        self.calls.append(("remove", path))
        if path == "busy":
            raise OSError("in use")


def through_the_io():
    r = rank()
    with joined() as strategy:
        strategy.checkpoint_io = spy = SpyIO()
        strategy.save_checkpoint({}, "somewhere", storage_options={"key": 1})
        strategy.load_checkpoint("somewhere", weights_only=False)
        strategy.remove_checkpoint("somewhere")
        load = ("load", "cpu", False)
        assert spy.calls == ([("save", {"key": 1}), load, ("remove", "somewhere")] if r == 0 else [load]), spy.calls
        try:
            strategy.save_checkpoint({"fail": True}, "somewhere")
        except OSError as error:
            assert r == 0 and "no space left" in str(error)
        except CheckpointError as error:
            assert r != 0 and "'somewhere' was not written: rank 0: OSError: no space left" in str(error)
        else:
            raise AssertionError(f"rank {r} thinks that it was saved")
        try:
            strategy.remove_checkpoint("busy")
        except OSError as error:
            assert r == 0 and "in use" in str(error)
        except CheckpointError as error:
            assert r != 0 and "'busy' was not removed: rank 0: OSError: in use" in str(error)
        else:
            raise AssertionError(f"rank {r} thinks that it was removed")


def test_checkpoints_go_through_the_given_io(world):
    """Checkpoints go through the given CheckpointIO.

    On rank 0, and its failure is everybody's.

    Checks: STR-24.
    """
    world.run(through_the_io)


def test_state_of_another_model_is_refused():
    """The state of another model is refused.

    Checks: STR-25, STR-26.
    """
    strategy = compose(SingleDeviceStrategy())
    model = Regression()
    strategy.connect(model)
    strategy.setup_model()
    state = copy.deepcopy(strategy.module_state_dict())
    state["body.9.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)Regression.*body.9.weight"):
        strategy.load_module_state_dict(state)
    result = strategy.load_module_state_dict(state, strict=False)
    assert result.unexpected_keys == ["body.9.weight"]
    state = Regression().state_dict()
    state["body.0.weight"] = torch.zeros(1, 2)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)body.0.weight.*\[1, 2\]"):
        strategy.load_module_state_dict(state, strict=False)
    optimizer = adam(model.parameters())
    with pytest.raises(CheckpointMismatchError, match="Adam"):
        strategy.load_optimizer_state(optimizer, sgd([model.body[0].weight]).state_dict())


def gradients_in_the_midst():
    """A checkpoint between two micro-batches: what was accumulated is the same on all ranks, and goes on right."""
    n, r = size(), rank()
    data = batches(2, 4, n)
    reference = Regression()
    plain(reference, sgd(reference.parameters()), data, accumulate=2)
    with joined() as strategy:
        model = Regression()
        strategy.connect(model)
        strategy.setup_model()
        optimizer = sgd(model.parameters())
        strategy.setup_optimizers([optimizer])
        step = strategy.step_function("training_step")
        first, second = (strategy.batch_to_device(share(batch, r, 4)) for batch in zip(*data, strict=True))
        with strategy.no_backward_sync():
            strategy.backward(step(first, 0) / 2)
        saved = {name: gradient.clone() for name, gradient in strategy.accumulated_gradients().items()}
        same_everywhere(strategy, saved)
        optimizer.zero_grad()
        strategy.load_accumulated_gradients(saved)
        strategy.backward(step(second, 1) / 2)
        strategy.optimizer_step(optimizer)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted)


def test_accumulated_gradients_are_saved_and_continued(world):
    """Accumulated gradients are saved and continued.

    Checks: STR-22.
    """
    world.run(gradients_in_the_midst)
