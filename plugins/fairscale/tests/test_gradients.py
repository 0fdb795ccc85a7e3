"""What ddp does beside averaging gradients is done under fairscale_sdp: buffers, pauses, several backward passes."""

import fairscale_training as training
import pytest
import torch
import torch.distributed as dist
from averaging_training import ReadsBuffers
from parity_models import Perceptron
from torch import nn
from torch.nn import functional as F

from torchhal import Callback

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(240)]


def equal(results, reference, tolerance=0.0):
    for mine, other in zip(results, reference, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance, abs=tolerance)
        for name, value in other["state"].items():
            if not name.startswith(("center", "steps", "body.1.running")):
                assert torch.allclose(mine["state"][name], value, rtol=tolerance, atol=tolerance), name


def fit_model(strategy, cls, options=None):
    return training.fit(strategy, cls(), **(options or {}))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_buffers_that_steps_and_validation_read_are_those_of_ddp(world2, accumulate):
    """Rank 0's before each step of an accumulation but the later ones, each rank's own in evaluation."""
    options = {"accumulate_grad_batches": accumulate, "val_check_interval": 3}
    equal(world2.run(fit_model, "sdp", ReadsBuffers, options), world2.run(fit_model, "ddp", ReadsBuffers, options))


class KeepsAGraph(Perceptron):
    """Runs backward through a graph of the step before, which has saved a buffer."""

    def build(self):
        self.register_buffer("center", torch.ones(4))
        self.scale, self.kept = nn.Parameter(torch.ones(4)), None
        return super().build()

    def training_step(self, batch, batch_idx):
        kept, self.kept = self.kept, (self.center * self.scale).sum()
        loss = self.loss(batch) + (self.scale.sum() if kept is None else kept)
        self.losses.append(float(loss.detach()))
        return loss


def test_a_graph_that_has_saved_a_buffer_may_run_backward_later(world2):
    equal(world2.run(fit_model, "sdp", KeepsAGraph), world2.run(fit_model, "ddp", KeepsAGraph))


def pauses():
    """Enter one pause twice, and another inside; return in which backward passes gradients were sent."""
    found = []

    class Enters(Perceptron):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            strategy = self.trainer.strategy
            if batch_idx == 0:
                outer, inner = strategy.no_backward_sync(), strategy.no_backward_sync()
                with outer:
                    with outer, inner:
                        found.append(sends(self, batch))
                    found.append(sends(self, batch))
                found.append(sends(self, batch))

    def sends(module, batch):
        module.zero_grad()
        module.trainer.strategy.backward(module.loss(batch))
        return any(one.grad is None for one in module.parameters())  # as of what other ranks step

    training.fit("sdp", Enters(), max_epochs=1)
    return found


def test_pauses_nest(world2):
    assert world2.run(pauses) == [[False, False, True]] * 2


class GroupAddedInAnAccumulation(Perceptron):
    """Adds a parameter group between two batches of one step; notes which gradients backward has sent."""

    def on_train_start(self):
        self.sent = []

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.body[2:].parameters())})

    def on_after_backward(self):
        self.sent.append(any(one.grad is None for one in self.body[0].parameters()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.body[0].parameters(), lr=1e-2)


def sent_with_a_group_added():
    model = GroupAddedInAnAccumulation()
    training.fit("sdp", model, accumulate_grad_batches=3, max_epochs=1)
    return model.sent


def test_a_group_added_in_an_accumulation_does_not_end_its_pause(world2):
    assert world2.run(sent_with_a_group_added) == [[False, False, True, False, False, True]] * 2


class Penalized(Perceptron):
    """A penalty that has a backward of its own, before that of the loss, or is added to the loss."""

    apart = True

    def penalty(self):
        own = 1.0 + self.trainer.global_rank
        return own * sum(one.square().sum() for one in self.parameters())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.apart else loss + self.penalty()

    def on_before_backward(self, loss):
        if self.apart:
            self.trainer.strategy.backward(self.penalty())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class PenalizedAtOnce(Penalized):
    """The same with one backward."""

    apart = False


@pytest.mark.parametrize("strategy", ["sdp", "sdp_unused"])
def test_a_second_backward_of_a_step_is_reduced(world2, strategy):
    """ShardedDataParallel sends each gradient once after a forward, and leaves a second one as each rank has it."""
    found, expected = world2.run(fit_model, strategy, Penalized), world2.run(fit_model, "ddp", PenalizedAtOnce)
    equal(found, expected, 1e-5)


class InEvalMode(Perceptron):
    """Trains in evaluation mode, into which it puts the wrapper, too, and freezes a layer at times."""

    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.strategy.model.eval()
        self.body[2].requires_grad_(batch_idx != 2)


def test_gradients_are_reduced_in_evaluation_mode(world2):
    """ShardedDataParallel itself reduces none there."""
    equal(world2.run(fit_model, "sdp", InEvalMode), world2.run(fit_model, "ddp", InEvalMode))


class OwnClosure(Perceptron):
    """Steps with a closure in which one parameter's gradient overflows at times."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            if batch_idx == 1:
                loss = loss + self.body[4].bias.sum() * 1e37
            self.manual_backward(loss)
            return loss

        self.losses.append(float(self.trainer.strategy.optimizer_step(optimizer, closure).updated))


def test_all_ranks_skip_a_step_with_a_closure_whose_gradients_overflow(world2):
    options = {"precision": "16-mixed"}
    found = world2.run(fit_model, "oss", OwnClosure, options)
    assert found[0]["losses"] == found[1]["losses"] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0] * 2
    equal(found, world2.run(fit_model, "ddp", OwnClosure, options))


class LastLayerOverflows(Perceptron):
    """Trains a bias alone, which one rank steps, though the optimizer has all; its gradient overflows at times."""

    def on_train_start(self):
        self.body.requires_grad_(False)
        self.body[4].bias.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())
        return loss + self.body[4].bias.sum() * 1e37 if batch_idx == 1 else loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_a_rank_that_steps_nothing_skips_with_the_others(world2):
    options = {"precision": "16-mixed", "max_epochs": 1}
    found = world2.run(fit_model, "oss", LastLayerOverflows, options)
    equal(found, world2.run(fit_model, "ddp", LastLayerOverflows, options))
    assert found[0]["losses"] == found[1]["losses"] and len(set(found[0]["losses"])) == 2


class Averaged(Perceptron):
    """Keeps an average of the weights in a hook after the optimizer's step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.average = [torch.zeros_like(one) for one in self.parameters()]
        optimizer.register_step_post_hook(self.follow)
        return optimizer

    def follow(self, *_):
        for mean, one in zip(self.average, self.parameters(), strict=True):
            mean.lerp_(one.detach(), 0.5)


def average_in_a_hook(strategy):
    model = Averaged()
    return {**training.fit(strategy, model), "state": {str(i): one for i, one in enumerate(model.average)}}


@pytest.mark.parametrize("strategy", ["oss", "sdp"])
def test_hooks_after_a_step_see_the_weights_of_all_ranks(world2, strategy):
    equal(world2.run(average_in_a_hook, strategy), world2.run(average_in_a_hook, "ddp"))


class Kept(Perceptron):
    """Has one optimizer for all of its runs; the first layer is frozen in the first of them."""

    def configure_optimizers(self):
        if not hasattr(self, "optimizer"):
            self.optimizer = [torch.optim.Adam(self.parameters(), lr=1e-2)]
        return self.optimizer[0]


def two_runs(first, second):
    """Fit twice with the same optimizer, the second time with more parameters that are trained."""
    model = Kept()
    model.body[0].requires_grad_(False)
    training.fit(first, model, max_epochs=1)
    model.body[0].requires_grad_(True)
    return training.fit(second, model, max_epochs=1)


@pytest.mark.parametrize(("first", "second"), [("oss", "oss"), ("sdp", "sdp"), ("oss", "sdp"), ("ddp", "oss")])
def test_state_of_an_earlier_run_comes_to_the_rank_that_steps_the_parameter_now(world2, first, second):
    """OSS counts what is trained, so a second run gives parameters to other ranks, which have no state of them."""
    equal(world2.run(two_runs, first, second), world2.run(two_runs, "ddp", "ddp"))


class StateFromTheStart(Perceptron):
    """An optimizer that has state of all parameters before its first step."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=1e-2)

    def on_train_end(self):
        self.losses.append(len(self.trainer.optimizers[0].state))


@pytest.mark.parametrize("strategy", ["oss", "sdp"])
def test_a_rank_keeps_the_state_of_what_it_steps_alone(world2, strategy):
    found = world2.run(fit_model, strategy, StateFromTheStart)
    expected = world2.run(fit_model, "ddp", StateFromTheStart)
    assert (
        sum(each["losses"].pop() for each in found) == expected[0]["losses"].pop() == expected[1]["losses"].pop() == 6
    )
    equal(found, expected)


def object_broadcasts(folder):
    """Save a checkpoint; return how many objects were sent to all ranks by fairscale's way of doing it."""
    seen, own = [], dist.broadcast_object_list
    dist.broadcast_object_list = lambda *args, **options: seen.append(args) or own(*args, **options)
    try:
        training.save("oss", folder)
    finally:
        dist.broadcast_object_list = own
    return len(seen)


def test_state_is_gathered_on_rank_0_alone(world2, tmp_path):
    """OSS.consolidate_state_dict sends the whole state of each rank to all, with the number of its GPU."""
    assert world2.run(object_broadcasts, str(tmp_path)) == [0, 0]


def reduced_after_a_run():
    """Return how many gradients travel in a backward after the run, of which the wrapper and a graph are still there.

    ShardedDataParallel's hooks are on the nodes of a graph in which gradients are accumulated.
    """
    wrappers, nodes, sent = [], [], []

    class See(Callback):
        def on_train_start(self, trainer, module):
            wrappers.append(trainer.strategy.model)
            nodes.extend(trainer.strategy.model._grad_accs)

    model = Perceptron()
    training.fit("sdp", model, callbacks=[See()], max_epochs=1)
    wrapper = wrappers[0]
    wrapper._clear_counters()  # as before a step
    own, dist.reduce = dist.reduce, lambda *args, **options: sent.append(args)
    try:
        F.cross_entropy(model(torch.ones(2, 64)), torch.tensor([0, 1])).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.reduce = own
    return len(sent)


def test_no_hook_of_a_run_sends_gradients_after_it(world2):
    assert world2.run(reduced_after_a_run) == [0, 0]


def owners():
    """Return the estimated and the real owners of parameters of several dtypes."""
    from torchhal_fairscale._oss_base import estimated_owners

    model, found = training.MODELS["ManyKinds"](), []

    class See(Callback):
        def on_train_start(self, trainer, module):
            shards = trainer.strategy._shards[id(trainer.optimizers[0])]
            estimated = estimated_owners(trainer.optimizers[0], 2)
            found.extend(estimated[one] == shards.owner[one] for one in module.parameters())

    training.fit("oss", model, callbacks=[See()], max_epochs=1)
    return found


def test_the_estimate_divides_each_dtype_as_oss_does(world2):
    for found in world2.run(owners):
        assert len(found) > 4 and all(found), found
