"""Test ddp with embeddings whose gradients are sparse: frozen, unfrozen, and left out of a step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.errors import DistributedError
from torchhal.strategies import DDPStrategy

pytestmark = pytest.mark.one_accelerator  # others may have no sparse tensors


class Words(Module):
    """The sum of a sparse embedding and of layers, whose gradients are one tensor in memory.

    ``plan`` has what is frozen and unfrozen before which batch: ``{batch: {"words": False}}``.
    """

    def __init__(self, plan, frozen=()):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.first, self.second = nn.Embedding(4, 3, sparse=True), nn.Linear(2, 3), nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.plan = plan
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        for name, trained in self.plan.get(batch_idx, {}).items():
            getattr(self, name).requires_grad_(trained)

    def training_step(self, batch, batch_idx):
        words, x = batch
        return F.mse_loss(self.head(torch.tanh(self.words(words) + self.first(x) + self.second(x))), x[:, :1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def data():
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 4, (64,), generator=generator), torch.randn(64, 2, generator=generator)


def fit(model, strategy):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(*data()), 4))
    return dict(model.state_dict())


PLANS = {
    "frozen, with a new wrapper, and unfrozen": (
        ["second"], {2: {"words": False}, 3: {"second": True}, 5: {"words": True}},
    ),
    "frozen and unfrozen": ([], {2: {"words": False}, 4: {"words": True}}),
    "frozen at first": (["words"], {3: {"words": True}}),
}  # fmt: skip


def fit_plan(name, finds_unused):
    frozen, plan = PLANS[name]
    return fit(Words(plan, frozen), DDPStrategy(find_unused_parameters=finds_unused))


@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_frozen_and_unfrozen_embedding(world2, name, finds_unused):
    """One process trains the same on the batches of both ranks together."""
    frozen, plan = PLANS[name]
    model = Words(plan, frozen)
    optimizer = model.configure_optimizers()
    words, x = data()
    for index in range(8):
        model.on_train_batch_start(None, index)
        optimizer.zero_grad()
        model.training_step((words[8 * index : 8 * index + 8], x[8 * index : 8 * index + 8]), index).backward()
        optimizer.step()
    for state in world2.run(fit_plan, name, finds_unused):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=key)


class Seldom(Words):
    """Has an embedding that the third batch leaves out."""

    def __init__(self):
        super().__init__({})
        self.seldom = nn.Embedding(4, 2, sparse=True)

    def training_step(self, batch, batch_idx):
        words, x = batch
        if batch_idx != 2:
            x = x + self.seldom(words)
        return super().training_step((words, x), batch_idx)


def fit_seldom(finds_unused):
    try:
        fit(Seldom(), DDPStrategy(find_unused_parameters=finds_unused))
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("finds_unused", [False, True])
def test_embedding_left_out_of_a_step_is_named(world2, finds_unused):
    """torch's own error names nothing, and its remedy for dense parameters is none for a sparse one."""
    for rank, told in enumerate(world2.run(fit_seldom, finds_unused)):
        assert "'seldom.weight'" in told and f"on rank {rank}" in told and "sparse=False" in told
        assert "find_unused_parameters_true" not in told and "words" not in told


def averaging_in_nested_contexts():
    """Enter one pause twice, and another inside; return whether gradients are averaged after each exit."""
    seen = []

    class Enters(Words):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            strategy = self.trainer.strategy
            if batch_idx == 0:
                outer, inner = strategy.no_backward_sync(), strategy.no_backward_sync()
                with outer:
                    with outer, inner:
                        pass
                    seen.append(strategy.model.require_backward_grad_sync)
                seen.append(strategy.model.require_backward_grad_sync)

    fit(Enters({}), DDPStrategy())
    return seen


def test_pauses_nest(world2):
    assert world2.run(averaging_in_nested_contexts) == [[False, True]] * 2
