"""A strategy that averages gradients itself trains as ddp does, with what its base class gives it."""

import averaging_training
import parity_models
import pytest
import torch
from averaging_training import Manual, ReadsBuffers, Unused
from parity_models import Perceptron
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError
from torchhal.strategies import DDPStrategy
from torchhal.strategies.gradient_averaging import GradientAveragingStrategy


class AveragesAfterBackward(GradientAveragingStrategy):
    """Averages all gradients when backward has ended."""

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        if self.world_size == 1 or self.averaging_is_paused:
            return
        ignored = set(self.parameters_to_ignore())
        named = {name: each for name, each in self.module.named_parameters() if name not in ignored}
        lacking = [name for name, each in named.items() if each.requires_grad and each.grad is None]
        if lacking and not self.find_unused_parameters:
            raise self.explain_unused(lacking)
        with self.guard("averaging of the gradients"):
            collectives.average_gradients(list(named.values()))


KINDS = {"own": AveragesAfterBackward, "ddp": DDPStrategy}


def fit(kind, model, options=None, **arguments):
    return averaging_training.fit(KINDS[kind](**arguments), model(), **(options or {}))


def parity(name):
    return parity_models.trained(name, AveragesAfterBackward())


@pytest.mark.parametrize("name", parity_models.MODELS)
def test_five_models_are_those_of_a_plain_loop(world2, name):
    parity_models.same(world2.run(parity, name), parity_models.plain(name))


def same(results, reference, but=()):
    """Fail unless the ranks have the same losses and weights; running statistics are each rank's own."""
    for mine, other in zip(results, reference, strict=True):
        assert mine["losses"] == other["losses"]
        for name, value in other["state"].items():
            assert name in but or torch.equal(mine["state"][name], value), name


@pytest.mark.parametrize("accumulate", [1, 4])
def test_buffers_of_steps_and_of_validation_are_those_of_ddp(world2, accumulate):
    """Rank 0's before each step of an accumulation but the later ones, each rank's own in evaluation, rank 0's last."""
    options = {"accumulate_grad_batches": accumulate, "val_check_interval": 3}
    results = world2.run(fit, "own", ReadsBuffers, options)
    names = [name for name, _ in ReadsBuffers().named_buffers()]
    same(results, world2.run(fit, "ddp", ReadsBuffers, options), names)
    for name in names:
        if name in results[0]["state"]:
            assert torch.equal(results[0]["state"][name], results[1]["state"][name]), name


class OwnCenter(ReadsBuffers):
    """Each rank keeps a mean of its own, and a bias."""

    _ddp_params_and_buffers_to_ignore = ("center", "body.3.bias")


def test_what_ddp_is_to_ignore_is_each_ranks_own(world2):
    results = world2.run(fit, "own", OwnCenter)
    same(results, world2.run(fit, "ddp", OwnCenter), ["steps", "body.1.running_mean", "body.1.running_var"])
    for name in OwnCenter._ddp_params_and_buffers_to_ignore:
        assert not torch.equal(results[0]["state"][name], results[1]["state"][name]), name


def test_manual_optimization_averages_after_each_backward(world2):
    same(world2.run(fit, "own", Manual), world2.run(fit, "ddp", Manual))


class TwoPasses(Perceptron):
    """Its backward runs twice through the graph of a step, half of the loss each time."""

    def backward(self, loss):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


class TwoPassesOwnBias(TwoPasses):
    """Each rank has a bias of its own."""

    _ddp_params_and_buffers_to_ignore = ("body.4.bias",)


def test_passes_leave_out_what_each_rank_has_of_its_own(world2):
    for kind in KINDS:
        one, other = (each["state"] for each in world2.run(fit, kind, TwoPassesOwnBias))
        assert torch.equal(one["body.4.weight"], other["body.4.weight"])
        assert not torch.equal(one["body.4.bias"], other["body.4.bias"])


class OwnBiasByHand(Manual):
    _ddp_params_and_buffers_to_ignore = ("body.4.bias",)


@pytest.mark.parametrize("kind", KINDS)
def test_manual_optimization_leaves_out_what_each_rank_has_of_its_own(world2, kind):
    one, other = (each["state"] for each in world2.run(fit, kind, OwnBiasByHand))
    assert torch.equal(one["body.4.weight"], other["body.4.weight"])
    assert not torch.equal(one["body.4.bias"], other["body.4.bias"])


class TwoPassesOfTheStrategy(TwoPasses):
    def backward(self, loss):
        self.trainer.strategy.backward(loss / 2, retain_graph=True)
        self.trainer.strategy.backward(loss / 2)


@pytest.mark.parametrize("model", [TwoPasses, TwoPassesOfTheStrategy])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_several_passes_through_one_graph(world2, kind, model, accumulate):
    """DistributedDataParallel averages what the first computes, and no more (torch 2.13)."""
    options = {"accumulate_grad_batches": accumulate}
    for mine, reference in zip(
        world2.run(fit, kind, model, options), world2.run(fit, "ddp", Perceptron, options), strict=True
    ):
        for name, value in reference["state"].items():
            assert torch.allclose(mine["state"][name], value, rtol=1e-4, atol=1e-5), name


def unused(allowed):
    return averaging_training.error_of(fit, "own", Unused, find_unused_parameters=allowed)


def test_unused_parameters_are_named(world2):
    told = world2.run(unused, False)
    assert any(
        "'idle.weight'" in each and "AveragesAfterBackward(find_unused_parameters=True)" in each for each in told
    )
    assert world2.run(unused, True) == ["", ""]
    with pytest.raises(ConfigurationError, match=r"'find_unused_parameters' must be a bool \(got 1\)"):
        AveragesAfterBackward(find_unused_parameters=1)


def pauses():
    """Enter one pause twice, and another inside; return whether gradients are averaged inside and after each exit."""
    seen = []

    class Enters(Perceptron):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            strategy = self.trainer.strategy
            if batch_idx == 0:
                outer, inner = strategy.no_backward_sync(), strategy.no_backward_sync()
                with outer:
                    with outer, inner:
                        seen.append(strategy.averaging_is_paused)
                    seen.append(strategy.averaging_is_paused)
                seen.append(strategy.averaging_is_paused)

    fit("own", Enters, {"max_epochs": 1})
    return seen


def test_pauses_nest(world2):
    assert world2.run(pauses) == [[True, True, False]] * 2


def test_a_world_of_one_averages_nothing():
    model = Perceptron()
    strategy = AveragesAfterBackward()
    Trainer(
        strategy=strategy, **{**averaging_training.QUIET, "devices": 1}, max_epochs=1, enable_checkpointing=False
    ).fit(model, DataLoader(model.dataset(), batch_size=4))
    assert strategy.no_backward_sync() is None and len(model.losses) == 12
