"""A batch is split by its samples, and the outputs of its parts are merged."""

import models
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from batch_parts import CPU, Answer, Item, dataset, greatest, make, two_devices
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchhal.errors import ModelError
from torchhal_parallel._scatter_gather import merge, split_batch
from torchhal_parallel.data_parallel import DataParallelStrategy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(("size", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (1, 2, [1]), (8, 2, [4, 4])])
def test_sizes_of_parts(size, parts, sizes):
    batch = torch.arange(size)
    split = split_batch(batch, parts)
    assert [n for _, n in split] == sizes
    assert torch.equal(torch.cat([part for part, _ in split]), batch)


def test_structures_are_split():
    batch = {
        "pair": (torch.arange(5), torch.arange(10).view(5, 2)),
        "answer": Answer(torch.ones(5, 1), list("abcde")),
        "item": Item(torch.arange(5), "cat"),
        "scalar": torch.tensor(3),
        "text": "hello",
        "none": None,
        "number": 5,
        "few": ["x", "y"],
    }
    (first, m), (second, n) = split_batch(batch, 2)
    assert (m, n) == (3, 2)
    assert first["pair"][0].tolist() == [0, 1, 2] and second["pair"][1].shape == (2, 2)
    assert first["answer"].names == ["a", "b", "c"] and type(second["answer"]) is Answer
    assert second["item"].x.tolist() == [3, 4] and second["item"].kind == "cat"
    for part in (first, second):
        assert [part[key] for key in ("scalar", "text", "none", "number", "few")] == [3, "hello", None, 5, ["x", "y"]]
    assert batch["item"].x.shape == (5,)  # the batch is as it was


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "a batch of type str holds no tensor"),
        ([1, 2, 3], "a batch of type list holds no tensor"),
        ({"x": torch.tensor(1.0)}, "a batch of type dict holds no tensor"),
        ((torch.ones(4), torch.ones(3)), r"got the shapes \(4,\), \(3,\)"),
        ([nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])], "got the shapes"),
    ],
    ids=["str", "list", "scalar", "sizes", "packed"],
)
def test_a_batch_that_cannot_be_split(batch, message):
    with pytest.raises(ModelError, match=message):
        split_batch(batch, 2)


def test_an_object_that_cannot_be_split():
    class Graph:
        def to(self, device, **options):
            return self

    with pytest.raises(ModelError, match="a Graph in the batch can't be divided"):
        split_batch({"x": torch.ones(4), "graph": Graph()}, 2)


class Bag:
    """A batch of a type that only its owner can divide."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.batch_size = len(x)

    def to(self, device, **options):
        return Bag(self.x.to(device), self.y.to(device))


class Bags(Dataset):
    def __getitem__(self, index):
        return dataset(models.ConvNet)[index]

    def __len__(self):
        return 20


class BagNet(models.ConvNet):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch.x, batch.y), batch_idx)


def bag(samples):
    return Bag(*(torch.stack(column) for column in zip(*samples, strict=True)))


def split_bag(batch, parts):
    return [Bag(x, y) for x, y in zip(batch.x.tensor_split(parts), batch.y.tensor_split(parts), strict=True)]


@two_devices
def test_a_split_of_ones_own(place):
    results = []
    for at, strategy in ((place, DataParallelStrategy(split=split_bag)), ((place[0], 1), "auto")):
        module = BagNet()
        trainer = make(at, strategy)
        trainer.fit(module, DataLoader(Bags(), 9, collate_fn=bag))
        results.append((module.state_dict(), float(trainer.callback_metrics["loss_epoch"])))
    assert greatest(results[0][0], results[1][0]) < 1e-5
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


@pytest.mark.parametrize(
    ("split", "message"),
    [(lambda batch, parts: [], "got 0 batches"), (lambda batch, parts: ["a", "b"], r"sizes \[None, None\]")],
    ids=["none", "unknown"],
)
def test_a_wrong_split(split, message):
    with pytest.raises(ModelError, match=message):
        trainer = make(("cpu", 2), DataParallelStrategy(split=split))
        trainer.fit(BagNet(), DataLoader(Bags(), 9, collate_fn=bag))


@pytest.mark.parametrize(
    "values",
    [("a", "b"), (1, 2), ({"a": 1}, {"b": 1}), (torch.ones(1), None), ((1, 2), (1,)), (np.ones(2), np.ones(2))],
    ids=str,
)
def test_unlike_outputs(values):
    with pytest.raises(ModelError, match="the parts of a batch gave different things"):
        merge(values, [2, 1], CPU)
