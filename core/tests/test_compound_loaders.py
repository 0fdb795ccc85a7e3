"""A loader that reads others: each is shared out over the ranks, shuffled anew in each epoch, and its workers end."""

import multiprocessing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import ModelCheckpoint, Module, Trainer
from torchhal.trainer.adapters import CompoundLoader


class Pairs(CompoundLoader):
    """Batches of two loaders side by side, as long as both have some."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    @property
    def loaders(self):
        return [self.first, self.second]

    def with_loaders(self, loaders):
        return type(self)(*loaders)

    def __len__(self):
        return min(len(self.first), len(self.second))

    def __iter__(self):
        return zip(iter(self.first), iter(self.second), strict=False)


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        (first,), (second,) = batch
        self.seen.append((self.current_epoch, first.flatten().tolist(), second.flatten().tolist()))
        return self.layer(first - second).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def pairs(**options):
    def loader(offset):
        data = TensorDataset(torch.arange(offset, offset + 8.0).unsqueeze(1))
        return DataLoader(data, 2, shuffle=True, **options)

    return Pairs(loader(0), loader(100))


def fit(model, loader, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    torch.manual_seed(1)
    trainer = Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **options})
    trainer.fit(model, loader)
    return model


def train():
    return fit(Net(), pairs(), devices=2, strategy="ddp", enable_checkpointing=False).seen


def test_ranks_share_each_loader(world2):
    mine, theirs = world2.run(train)
    for column, offset in ((1, 0), (2, 100)):
        orders = []
        for epoch in range(2):
            order = [[value for row in rank if row[0] == epoch for value in row[column]] for rank in (mine, theirs)]
            assert sorted(order[0] + order[1]) == list(range(offset, offset + 8))
            orders.append(order)
        assert orders[0] != orders[1]


def train_nested():
    model = fit(Net(), Nested(pairs(), pairs().first), devices=2, strategy="ddp", enable_checkpointing=False)
    return model.seen


class Nested(Pairs):
    """Pairs, beside which a third loader is read."""

    def __iter__(self):
        return (pair for pair, _ in super().__iter__())


def test_ranks_share_the_loaders_inside_of_one_inside(world2):
    mine, theirs = world2.run(train_nested)
    for column, offset in ((1, 0), (2, 100)):
        order = [value for rank in (mine, theirs) for row in rank if row[0] == 0 for value in row[column]]
        assert sorted(order) == list(range(offset, offset + 8))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_it_resumes_where_it_was_and_its_workers_end(tmp_path, options):
    before = set(multiprocessing.active_children())
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    whole = fit(Net(), pairs(**options), callbacks=[saver])
    rest = Net()
    torch.manual_seed(9)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(rest, pairs(**options), ckpt_path=tmp_path / "step=3.ckpt")
    assert rest.seen == whole.seen[3:]
    assert set(multiprocessing.active_children()) <= before
