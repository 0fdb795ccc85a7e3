"""What is unusual in a model, or asked of it, under every sharded strategy: as right as anything else."""

import models
import pytest
import torch
import training
import wrong
from parity import check, label, world

from torchhal_parallel._module_restore import ForwardOverride, recompute

pytestmark = pytest.mark.timeout(170)

CASES = [
    ("zero2", 2, "Odd", None),
    ("zero3", 4, "Odd", None),
    ("tensor_parallel", 2, "Odd", None),
    ("hybrid", 4, "Odd", {"shard": 2, "tensor": 2}),
    ("tensor_parallel", 2, "DividedNorms", None),
    ("zero3", 2, "ComplexWeights", None),
    ("hybrid", 2, "ComplexWeights", {"data": 2}),
    ("zero3", 2, "Recurrent", None),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=label)
def test_parity(request, case):
    alias, size, model, arguments = case
    check(world(request, size).run(training.train, alias, size, model, arguments, timeout=150), model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "alias, model", [("zero2", "Recurrent"), ("zero3", "Recurrent"), ("tensor_parallel", "DividedNorms")]
)
def test_model_called_in_hooks_of_two_runs(world2, alias, model):
    """An LSTM computes with the trained weights, which it lists for itself."""
    expected = training.asked_for_more("single_device", 1, model)
    assert len(expected) == 2 * (2 * (1 + 2) + 1 + 1), "two epochs, the first of which ends in a hook's call"
    for found in world2.run(training.asked_for_more, alias, 2, model, timeout=100):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["tensor_parallel", "pipeline"])
def test_workers_of_one_batch_agree(world2, alias):
    """Data workers of ranks with one batch draw the same."""
    first, second = world2.run(training.augmented, alias, 2, timeout=100)
    assert first == second
    assert len(set(first)) == len(first) == 8, "each batch, each epoch other numbers"


@pytest.mark.slow
def test_workers_agree_after_a_resume(world2, tmp_path):
    """A resumed run's data workers draw what those of the unbroken run drew."""
    unbroken = world2.run(training.resumed_with_a_worker, tmp_path / "unbroken", None, timeout=100)
    path = tmp_path / "unbroken" / "epoch=0.ckpt"
    resumed = world2.run(training.resumed_with_a_worker, tmp_path / "resumed", path, timeout=100)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after == {1: before[1]} and before[0] != before[1]


def test_dropout_between_layers_matches_one_device(world2):
    """The ranks of a layer were seeded differently; rank 0's numbers count."""
    expected = training.dropped_out("single_device", 1)
    for losses in world2.run(training.dropped_out, "tensor_parallel", 2, timeout=100):
        assert losses == pytest.approx(expected, rel=2e-5)


def test_the_norm_is_as_exact_as_its_gradients(world2):
    for found in world2.run(training.norms, timeout=60):
        for (got, dtype, wanted), digits in zip(found, (1e-14, 1e-6, 1e-6, 1e-6), strict=True):
            assert got == pytest.approx(wanted, rel=digits), dtype
        assert [dtype for _, dtype, _ in found] == ["torch.float64"] + ["torch.float32"] * 3


class Running(wrong.TwoOptimizers):
    """An attribute of its own is called as one of what runs the steps of other models is."""

    def __init__(self):
        super().__init__()
        self.running = True

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.in_step = self.trainer.strategy._inner_backward.in_step()


def in_step():
    module = Running()
    trainer = training.small("zero3", 2, max_epochs=1)
    module.train_dataloader = lambda: training.loader(trainer, models.Transformer, batches=1)
    trainer.fit(module)
    return module.in_step


def test_user_attribute_named_like_a_flag(world2):
    """An attribute of the user's says nothing of a step."""
    assert world2.run(in_step, timeout=60) == [False, False]


class Changing(models.ConvNet):
    """What it has in its second epoch is not what it had in its first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("once", torch.ones(3))
        self.register_buffer("later", None)
        self.extra = torch.nn.Linear(2, 2).requires_grad_(False)
        self.other = torch.nn.BatchNorm1d(2).requires_grad_(False)

    def on_train_epoch_end(self):
        self.once, self.later = None, torch.arange(3)
        self.other = torch.nn.Linear(2, 2).requires_grad_(False)
        self.extra.bias = None


def changed(strategy, devices):
    module = Changing()
    trainer = training.small(strategy, devices)
    module.train_dataloader = lambda: training.loader(trainer, models.ConvNet, batches=2)
    trainer.fit(module)
    kinds = {name: type(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
    return set(kinds.values()), sorted(kinds), module(torch.ones(1, 1, 8, 8)).shape


@pytest.mark.parametrize("alias", ["zero3", "tensor_parallel"])
def test_a_model_that_training_has_changed_stays_so(world2, alias):
    for kinds, names, shape in world2.run(changed, alias, 2, timeout=60):
        assert kinds == {torch.nn.Parameter, torch.Tensor} and shape == (1, 5)
        assert {"later", "extra.weight", "other.weight", "other.bias"} <= set(names)
        assert not {"once", "extra.bias", "other.running_mean"} & set(names)


def test_blocks_that_share_parameters_are_recomputed_too():
    module = models.Odd()
    calls = []
    for layer in module.layers:
        layer.register_forward_hook(lambda *_: calls.append("outside"))
        layer.up.register_forward_hook(lambda *_: calls.append("inside"))
    recompute(module, "blocks")
    tokens = torch.randint(0, 20, (2, 8))
    module(tokens).sum().backward()
    assert calls.count("outside") == 3 and calls.count("inside") == 6
    gradient = module.layers[0].down.weight.grad.clone()
    for layer in module.layers:
        ForwardOverride.remove(layer)
    assert not any("forward" in vars(layer) for layer in module.layers)
    module.zero_grad()
    module(tokens).sum().backward()
    assert torch.equal(module.layers[0].down.weight.grad, gradient)
    assert len(calls) == 15
