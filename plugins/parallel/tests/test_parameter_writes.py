"""What a forward, a step or a hook writes to parameters is right under every strategy, or refused by name."""

import pytest
import torch
from parameter_models import Block, Net, check_alike, fit, outcome
from tiers import slow
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from torchhal import Callback
from torchhal.errors import DistributedError
from torchhal_parallel import _plain_semantics as plain_semantics
from torchhal_parallel.hybrid import HybridStrategy

pytestmark = pytest.mark.timeout(120)


def final(name, strategy, devices):
    """The weights of a model of this file after a fit, or (the error's name, its words)."""
    return outcome(globals()[name], strategy, devices)


class Bounded(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=1.0)


class BoundedInPlan(Bounded):
    tensor_parallel_plan = {**Net.tensor_parallel_plan, "embed": "rowwise_rep"}


class BoundedByHand(Net):
    def forward(self, tokens):
        x = F.embedding(tokens, self.embed.weight, max_norm=0.5)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, scale_grad_by_freq=True)


class Clamping(Block):
    def forward(self, x):
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Clamping()


class WrittenByBatch(Net):
    """Each rank scales weights by what is in its batch, those of a block and those that the root holds."""

    def forward(self, tokens):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * tokens.float().mean())
        return super().forward(tokens)


class ClampedInStep(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return loss


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_an_embedding_that_bounds_its_rows_is_refused(world2, strategy):
    for kind, said in world2.run(final, "Bounded", strategy, 2):
        assert kind == "ModelError" and "'embed'" in said and "max_norm=1.0" in said and "renorm_(2.0, 0, 1.0)" in said


@pytest.mark.parametrize("strategy, who", [("zero3", "each of 2 replicas"), ("pipeline", "each microbatch")])
def test_an_embedding_that_counts_its_rows_is_refused(world2, strategy, who):
    for kind, said in world2.run(final, "Counting", strategy, 2):
        assert kind == "ModelError" and "'embed'" in said and "scale_grad_by_freq=True" in said and who in said


def test_max_norm_embedding_under_tensor_parallel(world2):
    """An embedding that bounds its rows is right where ranks share a batch."""
    check_alike(world2, final, "Bounded", "tensor_parallel", "one")
    for kind, said in world2.run(final, "BoundedInPlan", "tensor_parallel", 2):
        assert kind == "ConfigurationError" and "'embed'" in said and "max_norm" in said


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize(
    "name, parameter",
    [
        ("BoundedByHand", "'embed.weight'"),
        ("Clamped", "'blocks.1.up.weight'"),
        ("ClampedInStep", "'head.weight'"),
    ],
)
def test_a_write_that_would_be_lost_is_refused(world2, strategy, name, parameter):
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind in ("ModelError", "RankFailedError")
        assert parameter in said and "would lose" in said and strategy in said


def test_replicas_parted_by_a_forward(world2):
    """Replicas that a forward has parted are found after the fit."""
    for kind, said in world2.run(final, "BoundedByHand", "ddp", 2):
        assert kind == "DistributedError" and "'embed.weight'" in said and "ranks 0, 1" in said


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_batch_dependent_write_refused(world2, strategy):
    """A write by the batch to what is divided is refused."""
    for kind, said in world2.run(final, "WrittenByBatch", strategy, 2):
        assert kind == ("DistributedError" if strategy == "zero1" else "ModelError")
        assert "'blocks.1.up.weight'" in said
        assert ("before step 1 of its optimizer" if strategy == "zero1" else "has it in parts") in said


class WrittenLater(Net):
    """From its third step on, to a parameter of the root, which is gathered."""

    def training_step(self, batch, batch_idx):
        if self.global_step >= 2:
            with torch.no_grad():
                self.norm.bias.mul_(0.5)
        return super().training_step(batch, batch_idx)


class WrittenByNumber(Net):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * batch[0].float().mean().item())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("WrittenLater", "ModelError", ["'norm.bias'", "would lose"]),
        ("WrittenByNumber", "DistributedError", ["same numbers", "'zero3'"]),
    ],
)
def test_write_in_a_later_step_refused(world2, name, kind, words):
    """A write that the first step does not show is refused."""
    for found, said in world2.run(final, name, "zero3", 2):
        assert found in (kind, "RankFailedError") and all(word in said for word in words), said


class SavedWhenParted(WrittenByNumber):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        try:
            self.trainer.save_checkpoint("never.ckpt")
        except DistributedError as error:
            raise ValueError(f"{error} after step {self.global_step}") from error


def test_parts_that_do_not_belong_together_are_never_saved(world2):
    for found, said in world2.run(final, "SavedWhenParted", "zero3", 2):
        assert found == "ValueError" and "same numbers" in said and said.endswith("after step 1"), said


class Stepping(WrittenByNumber):
    steps = 0

    def on_train_batch_start(self, batch, batch_idx):
        Stepping.steps += 1


def steps_of_parted():
    Stepping.steps = 0
    with pytest.raises(DistributedError, match="same numbers"):
        fit(Stepping(), "zero3", 2)
    return Stepping.steps


def test_differing_shards_stop_after_an_epoch(world2):
    """Parts that do not belong together train no second epoch."""
    assert world2.run(steps_of_parted) == [4, 4]


@pytest.mark.parametrize("left_inside", [False, True])
def test_what_another_library_handles_stays_its_own(left_inside):
    """loss_parallel, entered or left in a step, is around its backward too, which comes after the step."""
    before = dict(plain_semantics._handlers())
    others = loss_parallel()
    if left_inside:
        others.__enter__()
    with plain_semantics.watched_writes(lambda *_: None):
        others.__exit__(None, None, None) if left_inside else others.__enter__()
    assert (plain_semantics._handlers() == before) is left_inside
    if not left_inside:
        others.__exit__(None, None, None)
    assert plain_semantics._handlers() == before


class RateByLoss(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 / (
            1 + float(outputs["loss"] if isinstance(outputs, dict) else outputs)
        )


class MomentumByBatch(Net):
    """Of the last batch of all alone."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch and batch_idx == 3:
            self.optimizers().param_groups[0]["momentum"] = torch.tensor(batch[0].float().mean().item() / 100)


class RateByEpoch(RateByLoss):
    """The same on each rank."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = torch.tensor(0.1 / (1 + batch_idx))


@pytest.mark.parametrize("name, key", [("RateByLoss", "'lr'"), slow("MomentumByBatch", "'momentum'")])
@pytest.mark.parametrize("strategy", ["zero1", slow("zero2"), "zero3", slow(HybridStrategy(shard=2))])
def test_differing_optimizer_settings_refused(world2, strategy, name, key):
    """Optimizers that step by other numbers on each rank are refused."""
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind == "DistributedError", said
        assert f"param_groups[0][{key}] of SGD is " in said and " on rank 0 and " in said and " on rank 1" in said


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_rate_shared_by_all_ranks_allowed(world2, strategy):
    """A rate that all ranks have is none of these."""
    check_alike(world2, final, "RateByEpoch", strategy, "ddp")


class ScaledGradients(Net):
    """By the loss of a rank's own batch, as a number."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.mean = batch[0].float().mean()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.mul_(1 + getattr(self, "mean", torch.zeros(())).item())


class ScaledByTensor(ScaledGradients):
    def on_before_optimizer_step(self, optimizer):
        torch._foreach_mul_([each.grad for each in self.parameters()], getattr(self, "mean", torch.ones(())))


class ScaledWeights(Net):
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(1 - 0.01 * batch[0].float().mean().item())


class ScalesInCallback(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.head.weight.data.mul_(1 - 0.01 * batch[0].float().mean().item())


class ScaledByCallback(Net):
    def configure_callbacks(self):
        return [ScalesInCallback()]


@pytest.mark.parametrize("strategy", ["zero1", slow("zero2"), "zero3", slow(HybridStrategy(shard=2))])
@pytest.mark.parametrize("name", ["ScaledGradients", "ScaledByTensor", "ScaledWeights", "ScaledByCallback"])
def test_differing_writes_of_hooks_refused(world2, strategy, name):
    """Hooks that write other numbers on each rank are refused."""
    for kind, said in world2.run(final, name, strategy, 2):
        assert kind == "DistributedError", (kind, said)
        assert ("before step 2 of its" if strategy == "zero1" else "did not write the same numbers") in said or (
            strategy == "zero1" and "before step 1 of its optimizer" in said
        ), said


class ScaledAlike(Net):
    """A number, a tensor, and what is no parameter's."""

    def on_before_optimizer_step(self, optimizer):
        factor = 1 / (1 + self.trainer.strategy.grad_norm(optimizer))
        for parameter in self.parameters():
            parameter.grad.clone().mul_(self.trainer.global_rank)
            parameter.grad.mul_(factor).mul_(0.9)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.head.weight.mul_(1 - self.trainer.strategy.reduce(batch[0].float().mean()).item() / 100)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_hooks_may_write_the_same_on_each_rank(world2, strategy):
    check_alike(world2, final, "ScaledAlike", strategy, "ddp")


class ReplacesWeight(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and batch_idx == 1:
            self.blocks[0].up.weight = nn.Parameter(torch.ones(12, 8))


class ReplacesLayer(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch and batch_idx == 1:
            self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3", "tensor_parallel", slow("pipeline")])
def test_replaced_parameter_refused(world2, strategy):
    """A parameter that is replaced while it is trained is refused."""
    for kind, said in world2.run(final, "ReplacesWeight", strategy, 2):
        assert (
            kind in ("ModelError", "RankFailedError") and "'blocks.0.up.weight' of ReplacesWeight is replaced" in said
        )


@pytest.mark.parametrize("strategy", ["zero3", slow("tensor_parallel")])
def test_layer_replaced_in_last_epoch_refused(world2, strategy):
    """A layer that is replaced in the last epoch is refused."""
    for kind, said in world2.run(final, "ReplacesLayer", strategy, 2):
        assert kind == "ModelError" and "'norm.weight' has come into ReplacesLayer" in said, said


def test_an_assignment_may_follow_a_fit():
    module = Net()
    fit(module, "zero3", 1)
    module.head.weight = nn.Parameter(torch.zeros(20, 8))


class Momentum(Net):
    """A teacher that follows by its blocks from the second step on, and a critic's clamp: by numbers that all have."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                if self.global_step:
                    teacher.mul_(0.9).add_(student, alpha=1 - 0.9)
            self.blocks[0].up.weight.data.clamp_(-0.3, 0.3)
        x = self.embed(batch[0])
        for block in self.teacher:
            x = block(x)
        return super().training_step(batch, batch_idx) + 0.01 * self.head(x).square().mean()


@pytest.mark.parametrize("strategy", ["zero2", slow("zero3")])
def test_momentum_teacher_matches_one_device(world2, strategy):
    """A momentum teacher and a clamp are those of one device."""
    check_alike(world2, final, "Momentum", strategy, "ddp")


def test_one_device_may_write_anything():
    """One device writes what it likes to its only part."""
    assert final("WrittenByBatch", "zero3", 1).keys() == Net().state_dict().keys()


class TwoOptimizers(Net):
    """The first one's parameters are written to by each rank from the second batch on."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.embed.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            self.embed.weight.add_(0.1 * self.trainer.global_rank * batch_idx)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_replicas_of_each_of_two_optimizers_are_compared(world2):
    for kind, said in world2.run(final, "TwoOptimizers", "zero1", 2):
        assert kind == "DistributedError" and "before step 2 of its optimizer" in said and "'embed.weight'" in said


class Drifting(Net):
    """Layers that nothing divides, written to by each rank."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.norm.bias.add_(0.1 * self.trainer.global_rank)


def test_ranks_of_one_layer_that_came_apart_are_found(world2):
    for kind, said in world2.run(final, "Drifting", "tensor_parallel", 2):
        assert kind == "DistributedError" and "'norm.bias'" in said
