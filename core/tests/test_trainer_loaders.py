"""Test reloaded, generated, endless and mistaken loaders: one iteration per epoch and no batch too many."""

import itertools

import pytest
import torch
from counting_net import Net, batches, fit, make
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import BatchSampler

from torchhal.errors import ModelError

pytestmark = pytest.mark.usefixtures("accelerator")


class Counted(Net):
    """Counts how often its loaders are asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def train_dataloader(self):
        self.asked.append(("train", self.trainer.current_epoch))
        return batches(2)

    def val_dataloader(self):
        self.asked.append(("val", self.trainer.current_epoch))
        return batches(1)


@pytest.mark.parametrize(("every", "epochs"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_reload(tmp_path, every, epochs):
    model = Counted()
    trainer = make(max_epochs=4, reload_dataloaders_every_n_epochs=every)
    trainer.fit(model)
    assert model.asked == [(kind, epoch) for epoch in epochs for kind in ("train", "val")]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Counted()
    make(max_epochs=5, reload_dataloaders_every_n_epochs=every).fit(again, ckpt_path=tmp_path / "a.ckpt")
    assert [kind for kind, _ in again.asked] == ["train", "val"]  # fresh already


def test_a_generator_per_epoch():
    class Generators(Net):
        def train_dataloader(self):
            return (batch for batch in batches(3))

    trainer, _ = fit(None, model=Generators(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert trainer.global_step == 9 and trainer.current_epoch == 3
    assert trainer.num_training_batches == float("inf")


def test_an_exhausted_generator_is_no_epoch():
    trainer, _ = fit((batch for batch in batches(3)), max_epochs=1)
    assert trainer.global_step == 3
    with pytest.raises(ModelError, match=r"the training loader \(in epoch 1\) gave no batch: a generator can be read"):
        fit((batch for batch in batches(3)), max_epochs=2)
    trainer, model = fit((batch for batch in batches(6)), max_epochs=3, limit_train_batches=2)
    assert [call[3] for call in model.calls] == [0, 1, 2, 3, 4, 5]  # what a limit leaves is still there
    with pytest.raises(ModelError, match="the validation loader gave no batch: a generator can be read only once"):
        fit(2, (batch for batch in batches(3)), max_epochs=2)


def test_sanity_check_skips_generator():
    """The sanity check takes no batch from a generator."""
    _, model = fit(2, (batch for batch in batches(3)), max_epochs=1, num_sanity_val_steps=2)
    assert model.count("sanity") == 0 and model.count("val") == 3


class OwnIterator:
    """A loader that is its own iterator: each ``iter()`` begins anew, and a batch past its length is an error."""

    def __init__(self, count):
        self.count = count
        self.begun = self.given = self.next = 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.begun += 1
        self.next = 0
        return self

    def __next__(self):
        assert self.next < self.count, "a batch past its length"
        self.next += 1
        self.given += 1
        return torch.full((2, 1), float(self.next))


class Zipped(OwnIterator):
    """Several loaders in one, which must be of one length, and the others are endless."""

    def __iter__(self):
        self.begun += 1
        for index, _ in zip(range(self.count), itertools.count(), strict=True):
            self.given += 1
            yield torch.full((2, 1), float(index))


class Bare(OwnIterator):
    """Its iterator can do nothing but give the next batch: all that a for loop needs."""

    def __iter__(self):
        self.begun += 1
        self.next = 0
        return Next(self.__next__)


class Next:
    def __init__(self, give):
        self.give = give

    def __next__(self):
        return self.give()


@pytest.mark.parametrize("kind", [OwnIterator, Zipped, Bare])
@pytest.mark.parametrize("limit", [1.0, 2, 9])
def test_one_iteration_per_epoch(kind, limit):
    """A loader is iterated once per epoch, and no batch past its length is read."""
    train, val, other = kind(4), kind(3), kind(3)
    trainer, model = fit(
        train, [val, other], max_epochs=2, num_sanity_val_steps=1, limit_train_batches=limit, limit_val_batches=limit,
        val_check_interval=2 if limit == 1.0 else None,
    )  # fmt: skip
    used, evaluated = (2, 2) if limit == 2 else (4, 3)
    assert (train.begun, train.given) == (2, 2 * used) and trainer.global_step == 2 * used
    validations = model.count("val start")
    for loader in (val, other):
        assert (loader.begun, loader.given) == (1 + validations, 1 + validations * evaluated)
    assert model.count("sanity") == 2
    test, predict = kind(3), kind(3)
    trainer = make(limit_test_batches=limit, limit_predict_batches=limit)
    trainer.test(model, test, verbose=False)
    assert len(trainer.predict(model, predict)) == evaluated
    assert [(loader.begun, loader.given) for loader in (test, predict)] == [(1, evaluated)] * 2


def test_batch_sampler_with_wrong_length():
    """A batch sampler that is longer than its length is read up to its length."""

    class Longer(BatchSampler):
        def __len__(self):
            return 2

    read = []

    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            read.append(index)
            return torch.ones(1)

    loader = DataLoader(Data(), batch_sampler=Longer(range(6), 2, False))
    fit(loader, loader, max_epochs=1)
    assert read == [0, 1, 2, 3] * 2


@pytest.mark.slow
def test_sharded_iterable_dataset():
    """torch guesses its length: each worker's last batch may be a short one, so that there are more."""

    class Sharded(Stream):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            return iter(torch.arange(float(self.count))[worker.id :: worker.num_workers, None])

    loader = DataLoader(Sharded(10, said=10), 4, num_workers=2)
    assert len(loader) == 3
    trainer = make()
    assert len(trainer.predict(Net(), loader)) == 4


class Stream(IterableDataset):
    def __init__(self, count, said):
        self.count = count
        self.said = said

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(torch.arange(float(self.count))[:, None])


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_loader_with_wrong_length():
    """A loader that is wrong about its length ends the epoch at the lesser number."""
    trainer, model = fit(DataLoader(Stream(7, said=3)), 1, max_epochs=2, accumulate_grad_batches=2)
    assert [call[2] for call in model.calls if call[0] == "train"] == [0, 1, 2] * 2
    assert trainer.global_step == 4 and model.validated_after() == [3, 6]
    trainer, model = fit(DataLoader(Stream(3, said=7)), 1, max_epochs=2, accumulate_grad_batches=2)
    assert [call[2] for call in model.calls if call[0] == "train"] == [0, 1, 2] * 2
    assert trainer.global_step == 4 and model.validated_after() == [3, 6]


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 1), [torch.ones(2, 1), 1], (torch.ones(2, 1), None), {"x": 1}], ids=str
)
def test_a_list_of_batches_is_one_loader(batch):
    class Any(Net):
        def training_step(self, batch, batch_idx):
            self.calls.append(batch)
            return self.layer(torch.ones(1, 1, device=self.device)).mean()

    _, model = fit([batch, batch, batch], model=Any(), max_epochs=1)
    assert len(model.calls) == 3 and all(type(call) is type(batch) for call in model.calls)


def test_an_epoch_that_the_model_ends():
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    trainer, model = fit(6, model=Ends(), max_epochs=2, accumulate_grad_batches=2)
    assert (trainer.global_step, trainer.current_epoch, model.count("train")) == (4, 2, 6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25  # both epochs count

    class Never(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    trainer, model = fit(6, model=Never(), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch, model.count("train")) == (0, 2, 0)
