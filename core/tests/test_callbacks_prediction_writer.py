"""PredictionWriter: predictions and the indices of their samples, written by each rank."""

import pytest
import torch
from minimal_net import Net
from quiet_trainer import make
from torch.utils.data import DataLoader, IterableDataset

from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import PredictionWriter


class Echo(Net):
    """Predicts its batch."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch * 10


class Writer(PredictionWriter):
    def __init__(self, write_interval="batch_and_epoch"):
        super().__init__(write_interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert torch.equal(prediction, batch * 10)
        self.batches.append((prediction.tolist(), batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


NUMBERS = torch.arange(5)


def predict(writer, *loaders, **options):
    data = list(loaders) if len(loaders) > 1 else loaders[0]
    trainer = make(writer, **options)
    assert trainer.predict(Echo(), data, return_predictions=False) is None
    return trainer


def test_writes_batches_and_the_epoch():
    writer = Writer()
    trainer = predict(writer, DataLoader(NUMBERS, 2))
    assert writer.batches == [([0, 10], [0, 1], 0, 0), ([20, 30], [2, 3], 1, 0), ([40], [4], 2, 0)]
    ((predictions, indices),) = writer.epochs
    assert [each.tolist() for each in predictions] == [[0, 10], [20, 30], [40]]
    assert indices == [[[0, 1], [2, 3], [4]]]
    assert writer._predictions == [] and not trainer.evaluation_loop.records_batch_indices


@pytest.mark.parametrize(("interval", "written"), [("batch", (3, 0)), ("epoch", (0, 1)), ("batch_and_epoch", (3, 1))])
def test_interval(interval, written):
    writer = Writer(interval)
    predict(writer, DataLoader(NUMBERS, 2))
    assert (len(writer.batches), len(writer.epochs)) == written


@pytest.mark.parametrize("options", [{"shuffle": True}, {"num_workers": 1, "shuffle": True}, {"drop_last": True}])
def test_indices_are_those_of_the_samples(options):
    """For any order of the loader, also drawn ahead for workers."""
    writer = Writer("epoch")
    predict(writer, DataLoader(NUMBERS, 2, **options))
    ((predictions, (indices,)),) = writer.epochs
    assert [[index * 10 for index in batch] for batch in indices] == [each.tolist() for each in predictions]


def test_several_loaders():
    writer = Writer()
    predict(writer, DataLoader(NUMBERS, 5), DataLoader(NUMBERS, 4))
    assert [(indices, loader) for _, indices, _, loader in writer.batches] == [
        ([0, 1, 2, 3, 4], 0),
        ([0, 1, 2, 3], 1),
        ([4], 1),
    ]
    ((predictions, indices),) = writer.epochs
    assert [len(each) for each in predictions] == [1, 2] and indices[1] == [[0, 1, 2, 3], [4]]


def test_limit():
    writer = Writer("epoch")
    predict(writer, DataLoader(NUMBERS, 2), limit_predict_batches=1)
    assert writer.epochs[0][1] == [[[0, 1]]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 5), [NUMBERS], DataLoader([NUMBERS], batch_size=None)])
def test_loaders_without_indices(loader):
    writer = Writer()
    predict(writer, loader)
    assert writer.batches == [([0, 10, 20, 30, 40], None, 0, 0)]
    assert writer.epochs[0][1] == [[None]]


def test_predictions_are_returned_too():
    writer = Writer()
    first, *_ = make(writer).predict(Echo(), DataLoader(NUMBERS, 2))
    assert first.tolist() == [0, 10] and len(writer.batches) == 3


def test_refuses_an_unknown_interval():
    with pytest.raises(ValueError, match="'write_interval' must be 'batch', 'epoch' or 'batch_and_epoch'"):
        PredictionWriter("step")


def test_refuses_a_missing_method():
    class OnlyBatches(PredictionWriter):
        def write_on_batch_end(self, *args):
            raise AssertionError

    with pytest.raises(ConfigurationError, match="OnlyBatches must define write_on_epoch_end"):
        predict(OnlyBatches("epoch"), DataLoader(NUMBERS, 2))


def write_in_ranks():
    writer = Writer()
    trainer = make(writer, devices=2, strategy="ddp")
    trainer.predict(Echo(), DataLoader(NUMBERS, 2), return_predictions=False)
    return [indices for _, indices, _, _ in writer.batches], writer.epochs[0][1]


def test_each_rank_writes_its_own(world2):
    """Each sample once, by the rank that predicted it."""
    first, second = world2.run(write_in_ranks)
    assert first == ([[0, 1], [2]], [[[0, 1], [2]]])
    assert second == ([[3, 4]], [[[3, 4]]])


def test_batches_out_of_order_have_no_indices():
    writer = Writer()
    make(writer).predict(Echo(), DataLoader(NUMBERS, 2, num_workers=2, in_order=False))
    assert [batch_indices for _, batch_indices, *_ in writer.batches] == [None] * len(writer.batches)
