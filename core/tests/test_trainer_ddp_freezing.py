"""Test ddp with layers that are frozen and unfrozen while the Trainer runs."""

import itertools
import re
from datetime import timedelta

import hardware
import pytest
import torch
from ddp_models import SaveAt, Thawed, rows
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from torchhal import Callback, Trainer
from torchhal.errors import DistributedError, ModelError
from torchhal.strategies import DDPStrategy

pytestmark = pytest.mark.slow_on_sim


def fit_in_ranks(optimizer):
    model = Thawed(optimizer)
    loader = torch.utils.data.DataLoader(rows(32), 4, shuffle=False)
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}, model.calls


def test_unfreezing_between_epochs(world2):
    """Gradients of a layer that is unfrozen between epochs are averaged."""
    (mine, _), (theirs, _) = world2.run(fit_in_ranks, "adam")
    model = Thawed()
    optimizer = model.configure_optimizers()
    for epoch in range(3):
        model.layers[0].requires_grad_(epoch > 0)
        for batch in rows(32).reshape(4, 4, 2, 3).transpose(1, 2).reshape(4, 8, 3):  # rank r has every second row
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
    for name, expected in model.state_dict().items():
        assert torch.equal(mine[name], theirs[name]), name
        torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=name)


class Changing(Thawed):
    """Layers are frozen and unfrozen in the midst of an epoch: ``plan`` says at which batch of all, and where."""

    PLANS = {
        "unfrozen between two batches": ("hook", [0], {3: (0, True)}),
        "unfrozen in a step": ("step", [0], {3: (0, True)}),
        "unfrozen in the first epoch, all": ("hook", [0, 2], {3: (0, True), 5: (2, True)}),
        "all unfrozen in a step": ("step", [0, 2], {3: (0, True), 5: (2, True)}),
        "frozen between two batches": ("hook", [], {3: (2, False), 5: (0, False), 6: (2, True)}),
    }

    def __init__(self, plan):
        super().__init__()
        self.where, frozen, self.plan = self.PLANS[plan]
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index not in frozen)

    def change(self):
        if self.calls in self.plan:
            index, trained = self.plan[self.calls]
            self.layers[index].requires_grad_(trained)

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "hook":
            self.change()

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch, batch_idx):
        if self.where == "step":
            self.change()
        loss = super().training_step(batch, batch_idx)
        return loss if loss.requires_grad else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_changing(strategy, plans, axes=None):
    if axes is not None:
        from torchhal_parallel.hybrid import HybridStrategy
    found = []
    for plan in plans:
        for accumulate in (1, 4):
            model = Changing(plan)
            loader = torch.utils.data.DataLoader(rows(64), 4, shuffle=False)
            trainer = Trainer(
                accelerator=hardware.name(), devices=2, max_epochs=1, logger=False,
                strategy=strategy if axes is None else HybridStrategy(**axes),
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                accumulate_grad_batches=accumulate,
            )  # fmt: skip
            trainer.fit(model, loader)
            found.append({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    return found


def changed_alone(plan, accumulate):
    model = Changing(plan)
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(rows(64).reshape(8, 4, 2, 3).transpose(1, 2).reshape(8, 8, 3)):
        model.on_train_batch_start(batch, index)
        loss = model.training_step(batch, index)
        if loss is not None:
            (loss / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "strategy, axes",
    [
        ("ddp", None), ("ddp_find_unused_parameters_true", None), ("zero1", None), ("zero2", None), ("zero3", None),
        ("hybrid", {"data": 2}), ("hybrid", {"shard": 2}),
    ],
)  # fmt: skip
def test_freezing_within_epoch(world2, strategy, axes):
    """Gradients of layers that are frozen or unfrozen within an epoch are averaged."""
    if not strategy.startswith("ddp"):
        pytest.importorskip("torchhal_parallel")
    found = zip(*world2.run(fit_changing, strategy, list(Changing.PLANS), axes), strict=True)
    for (plan, accumulate), (mine, theirs) in zip(itertools.product(Changing.PLANS, (1, 4)), found, strict=True):
        for name, expected in changed_alone(plan, accumulate).items():
            what = f"{name}, {plan}, {accumulate}"
            torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=what)
            assert torch.equal(mine[name], theirs[name]), what


class ByTurns(Thawed):
    """Two halves of which each step trains one, as a GAN's are."""

    def on_train_epoch_start(self):
        self.wrappers = set()

    def on_train_batch_start(self, batch, batch_idx):
        for index, layer in ((0, self.layers[0]), (1, self.layers[2])):
            layer.requires_grad_(batch_idx % 2 == index)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.wrappers.add(id(self.trainer.strategy.model))


def count_wrappers_by_turns():
    model = ByTurns()
    Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return len(model.wrappers)


def test_alternate_training_keeps_wrapper(world2):
    """Halves that are trained by turns keep a wrapper that allows unused parameters."""
    assert world2.run(count_wrappers_by_turns) == [1, 1]


class FrozenForGood(Thawed):
    """Its first layer is trained in the first epoch only."""

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(self.current_epoch == 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sent = self.trainer.strategy.comm_state.pop()


def send(sent, bucket):
    sent[-1:] = [sum(sent[-1:]) + bucket.buffer().numel()]
    return default_hooks.allreduce_hook(None, bucket)


def fit_frozen_for_good():
    class Sent(Callback):
        def on_train_epoch_end(self, trainer, module):
            by_epoch.append(module.sent)

    by_epoch, model = [], FrozenForGood()
    Trainer(
        accelerator=hardware.name(), devices=2, max_epochs=3, logger=False, callbacks=[Sent()],
        strategy=DDPStrategy(find_unused_parameters=True, comm_hook=send, comm_state=[]),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    first = sum(parameter.numel() for parameter in model.layers[0].parameters())
    return by_epoch, first


def test_frozen_gradients_are_not_sent(world2):
    """Gradients of parameters that an epoch did not train are no longer sent."""
    for (first, second, third), frozen in world2.run(fit_frozen_for_good):
        assert first == second == third + frozen


class GrowsAndFreezes(Thawed):
    """Gets a new last layer, of each rank's own random numbers, in the midst of an epoch, when it freezes the first."""

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(True)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            torch.manual_seed(self.trainer.global_rank)
            self.layers[0].requires_grad_(False)
            self.layers[2] = torch.nn.Linear(self.layers[2].in_features, self.layers[2].out_features)


def fit_growing():
    model = GrowsAndFreezes()
    Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, strategy="ddp",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return model.layers[2].weight.detach().clone()


def test_new_layer_equal_on_ranks(world2):
    """A layer that is made as another is frozen is the same on every rank."""
    mine, theirs = world2.run(fit_growing)
    assert torch.equal(mine, theirs)


class FrozenTooLate(Thawed):
    """What its step freezes, the averaging waits for."""

    def training_step(self, batch, batch_idx):
        self.layers[2].weight.requires_grad_(batch_idx < 2)
        return super().training_step(batch, batch_idx)


class UnfrozenApart(Thawed):
    """Each rank unfreezes another part of a layer."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            (self.layers[0].weight if self.trainer.global_rank else self.layers[0].bias).requires_grad_(True)


class MoreUnfrozen(Thawed):
    """One rank unfreezes more of a layer than the other."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.layers[0].weight.requires_grad_(True)
            self.layers[0].bias.requires_grad_(self.trainer.global_rank > 0)


class UnfrozenOnOneRank(Thawed):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank:
            self.layers[0].bias.requires_grad_(True)


def fail_on_one_rank():
    with pytest.raises(DistributedError) as caught:
        Trainer(
            accelerator=hardware.name(), devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=5)), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(UnfrozenOnOneRank(), torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return str(caught.value)


@pytest.mark.slow
def test_unfrozen_on_one_rank_is_named(world2):
    """The error for a parameter that one rank alone has unfrozen names it."""
    _, text = world2.run(fail_on_one_rank, timeout=60)
    assert "comparison of what is trained, as 'layers.0.bias' was unfrozen" in text, text


def fail_to_fit(strategy, kind):
    with pytest.raises((ModelError, DistributedError)) as caught:
        Trainer(
            accelerator=hardware.name(), devices=2, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(globals()[kind](), torch.utils.data.DataLoader(rows(32), 4))  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [
        ("ddp", "FrozenTooLate", "'layers.2.weight' of FrozenTooLate were frozen while a step ran"),
        ("ddp", "UnfrozenApart", r"comparison of what is trained, as 'layers\.0\.(weight|bias)' was unfrozen"),
        ("zero2", "UnfrozenApart", r"comparison of what is trained, as 'layers\.0\.(weight|bias)' was unfrozen"),
        ("zero3", "UnfrozenApart", r"comparison of what is trained, as 'layers\.0\.(weight|bias)' was unfrozen"),
        ("ddp", "MoreUnfrozen", "where rank 0 has .*'layers.0.bias', .*False.*, rank 1 has .*'layers.0.bias', .*True"),
        ("zero3", "MoreUnfrozen", "where rank 0 has .*'layers.0.bias', .*False.*, rank 1 has .*'layers.0.bias'"),
    ],
)
def test_unaverageable_freezing_refused(world2, strategy, kind, words):
    """Freezing that the ranks can't average is refused in the step."""
    if strategy != "ddp":
        pytest.importorskip("torchhal_parallel")
    for text in world2.run(fail_to_fit, strategy, kind):
        assert re.search(words, text), text


class ByHand(Thawed):
    def __init__(self, averaged):
        super().__init__()
        self.automatic_optimization = False
        self.averaged = averaged

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss) if self.averaged else loss.backward()
        optimizer.step()


def fit_by_hand_twice():
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(rows(32), 4)
    trainer.fit(ByHand(averaged=True), loader)
    trainer.fit_loop.max_epochs, model = 2, ByHand(averaged=False)
    with pytest.raises((ModelError, DistributedError), match=r"call self\.manual_backward\(loss\) instead"):
        trainer.fit(model, loader)
    return model.calls


def test_manual_optimization_must_average(world2):
    """Each fit that steps by hand has to average its gradients."""
    assert world2.run(fit_by_hand_twice) == [1, 1]


def test_line_search_agrees_across_ranks(world2):
    """Each rank's own loss would let one evaluate once more than the other, which waits for it in the averaging."""
    (mine, calls), (theirs, others) = world2.run(fit_in_ranks, "lbfgs")
    assert calls == others > 12
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


class ThawedOnce(Thawed):
    """Its first layer is trained from the second epoch on, which only the start of that epoch says."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def resume_thawed(folder, strategy):
    """Whether a run that goes on in the third epoch ends as the one that it continues, with the same layers trained."""
    found = []
    for ckpt_path in (None, f"{folder}/batch9.ckpt"):
        model = ThawedOnce()
        trainer = Trainer(
            accelerator=hardware.name(), devices=2, strategy=strategy, max_epochs=3, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[SaveAt(folder, [9])], accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(rows(32), 4, shuffle=True), ckpt_path=ckpt_path)
        found.append((model.state_dict(), [each.requires_grad for each in model.parameters()]))
    (whole, trained), (state, trained_then) = found
    return trained_then == trained, all(torch.equal(whole[name], state[name]) for name in whole)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_resumed_run_trains_what_was_unfrozen(world2, tmp_path, strategy):
    for same_trained, same_weights in world2.run(resume_thawed, str(tmp_path), strategy):
        assert same_trained and same_weights
