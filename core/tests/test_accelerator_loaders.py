"""Test loaders that an accelerator puts around the loops' own: batches, positions, lengths and the end of iterators."""

import multiprocessing
import os
import queue
import random
import threading

import pytest
import torch
from numbered_samples import Numbers
from quiet_trainer import make
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from torchhal import Callback, Module
from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError

SAMPLES = 24


class Ahead:
    """Reads up to two batches ahead in a thread, as a vendor's loader does that copies on a stream of its own."""

    made: list = []

    def __init__(self, loader, device):
        self.loader, self.device = loader, device
        self.closed = 0
        Ahead.made.append(self)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return _Ahead(iter(self.loader), self.device)

    def close(self):
        self.closed += 1


class _Ahead:
    open = given = 0

    def __init__(self, batches, device):
        self.read = queue.Queue(2)
        self.stopped = threading.Event()
        self.batches = batches
        self.thread = threading.Thread(target=self.fetch, daemon=True)
        _Ahead.open += 1
        self.thread.start()

    def fetch(self):
        try:
            for batch in self.batches:
                if self.put((batch, None)):
                    return
            self.put((None, StopIteration()))
        except BaseException as error:
            self.put((None, error))

    def put(self, item):
        while not self.stopped.is_set():
            try:
                self.read.put(item, timeout=0.02)
                return False
            except queue.Full:
                continue
        return True

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is None:
            raise StopIteration
        batch, error = self.read.get()
        if error is not None:
            self.close()
            raise error
        _Ahead.given += 1
        return batch

    def close(self):
        if self.batches is not None:
            self.stopped.set()
            self.thread.join()
            self.batches = None
            _Ahead.open -= 1


class Prefetches(CPUAccelerator):
    def process_dataloader(self, loader, device):
        assert device == torch.device("cpu")
        return Ahead(loader, device)


class Generates(CPUAccelerator):
    """The simplest that keeps the contract: a generator made after the loader's iterator."""

    def process_dataloader(self, loader, device):
        class Moved:
            def __iter__(self):
                return (batch for batch in iter(loader))

        return Moved()


class Stream(IterableDataset):
    def __iter__(self):
        return (Numbers(SAMPLES)[index] for index in range(SAMPLES))


class Stateful:
    """A loader that keeps its own position, and restarts at each ``iter``."""

    def __init__(self):
        self.at = self.begin = 0

    def __len__(self):
        return SAMPLES // 2

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < len(self):
            self.at += 1
            yield torch.tensor([self.at - 1]), torch.full((1, 4), float(self.at))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


class StatefulAhead(Ahead):
    """Reads one batch ahead, with the state as of the batch that was handed out last."""

    def __iter__(self):
        def batches():
            self.state = {"at": 0}
            read = [(next(source), self.loader.state_dict())]
            for batch in source:
                read.append((batch, self.loader.state_dict()))
                given, self.state = read.pop(0)
                yield given
            for given, state in read:
                self.state = state
                yield given

        source = iter(self.loader)
        return batches()

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class PrefetchesStateful(CPUAccelerator):
    def process_dataloader(self, loader, device):
        return StatefulAhead(loader, device)


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(SAMPLES), 2, shuffle=True),
    "generator": lambda: DataLoader(Numbers(SAMPLES), 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "sampler": lambda: DataLoader(
        Numbers(SAMPLES),
        2,
        sampler=RandomSampler(Numbers(SAMPLES), generator=torch.Generator().manual_seed(5), num_samples=SAMPLES),
    ),
    "workers": lambda: DataLoader(Numbers(SAMPLES), 2, shuffle=True, num_workers=int("WORLD_SIZE" not in os.environ)),
    "persistent": lambda: DataLoader(Numbers(SAMPLES), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 2),
    "list": lambda: [(torch.tensor([index]), torch.full((1, 4), float(index))) for index in range(12)],
    "stateful": Stateful,
}


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.5)  # draws between the batches

    def training_step(self, batch, batch_idx):
        return self.layer(self.dropout(batch[1])).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch(Callback):
    def __init__(self, path=None, save_at=None, stop=False):
        self.path, self.save_at, self.stop = path, save_at, stop
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.stop and trainer.global_step > self.save_at:
            return  # the ranks agree on the stop a little later
        self.seen.append((trainer.current_epoch, batch_idx, batch[0].tolist()))
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


def fit(accelerator, kind, watch, resume=None, strategy="auto", val=None, **options):
    random.seed(3)
    torch.manual_seed(3)
    Ahead.made.clear()
    _Ahead.given = 0
    net = Net()
    options = {"max_epochs": 2, "devices": 1, **options}
    make(watch, accelerator=accelerator, strategy=strategy, **options).fit(net, LOADERS[kind](), val, ckpt_path=resume)
    assert _Ahead.open == 0  # every iterator has been closed
    assert all(made.closed == 1 for made in Ahead.made if type(made) is Ahead)
    assert _Ahead.given >= len(watch.seen) or not isinstance(accelerator, Prefetches)  # of the rest of an epoch, too
    return watch.seen, [parameter.detach().clone() for parameter in net.parameters()]


def loader_workers():
    """The living processes of this one but for the ranks of shared worlds."""
    ranks = multiprocessing.get_context("spawn").Process
    return [child for child in multiprocessing.active_children() if not isinstance(child, ranks)]


def same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("hardware", [Prefetches, Generates], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("kind", LOADERS)
def test_fit_is_the_same(kind, hardware):
    """Batches, their order and number, and what is drawn beside them are as without an accelerator's loader."""
    same(fit(hardware(), kind, Watch()), fit(CPUAccelerator(), kind, Watch()))
    assert not loader_workers()


@pytest.mark.parametrize("kind", LOADERS)
def test_resume_in_mid_epoch(tmp_path, kind):
    """The run that was not interrupted, bit for bit, from a checkpoint of the second epoch."""
    path = str(tmp_path / "some.ckpt")
    whole = fit(Prefetches(), kind, Watch(path, save_at=17))
    seen, weights = fit(Prefetches(), kind, Watch(), resume=path)
    same((seen, weights), (whole[0][17:], whole[1]))
    seen, weights = fit(CPUAccelerator(), kind, Watch(), resume=path)  # and on other hardware
    same((seen, weights), (whole[0][17:], whole[1]))


def test_state_of_loader(tmp_path):
    """A loader's own state is as of the batch that was handed out last, whatever has been read ahead."""
    path = str(tmp_path / "some.ckpt")
    whole = fit(PrefetchesStateful(), "stateful", Watch(path, save_at=17))
    assert torch.load(path, weights_only=False)  # it is plain data
    for accelerator in (PrefetchesStateful(), CPUAccelerator()):
        same(fit(accelerator, "stateful", Watch(), resume=path), (whole[0][17:], whole[1]))


def lives(path):
    """Two lives of a run on this rank: the first is saved, and stopped, within its second epoch."""
    torch.manual_seed(3)
    first = fit(Prefetches(), "shuffled", Watch(path, 8, stop=True), strategy="ddp", devices=2)[0]
    second = fit(Prefetches(), "shuffled", Watch(), resume=path, strategy="ddp", devices=2)[0]
    return first + second, fit(CPUAccelerator(), "shuffled", Watch(), strategy="ddp", devices=2)[0]


def test_resume_under_ddp(world2, tmp_path):
    """Each rank goes on in its own share."""
    for continued, whole in world2.run(lives, str(tmp_path / "some.ckpt"), timeout=60):
        assert continued == whole and len(whole) == SAMPLES // 2


def first_life(path):
    return fit(Prefetches(), "shuffled", Watch(path, 3, stop=True), strategy="ddp", devices=2)[0]


def test_resume_with_fewer_ranks(world2, tmp_path):
    """The rest of an epoch that two ranks began is shared out anew: each sample is seen once."""
    path = str(tmp_path / "some.ckpt")
    seen = [sample for rank in world2.run(first_life, path) for *_, batch in rank for sample in batch]
    rest = fit(Prefetches(), "shuffled", Watch(), resume=path, max_epochs=1, accumulate_grad_batches=1)[0]
    seen += [sample for *_, batch in rest for sample in batch]
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"max_steps": 5}], ids=str)
def test_limits(options):
    """A loop that stops before the end closes the iterator, and takes as many batches as without it."""
    same(fit(Prefetches(), "workers", Watch(), **options), fit(CPUAccelerator(), "workers", Watch(), **options))
    assert not loader_workers()


def test_error_of_dataset():
    """It is raised in the loop, at its batch, and leaves no thread."""

    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("sample 5")
            return super().__getitem__(index)

    watch = Watch()
    with pytest.raises(ValueError, match="sample 5"):
        make(watch, accelerator=Prefetches()).fit(Net(), DataLoader(Broken(SAMPLES), 2))
    assert [index for _, index, _ in watch.seen] == [0, 1]
    assert _Ahead.open == 0


def test_error_in_step():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("step")

    Ahead.made.clear()
    with pytest.raises(ValueError, match="step"):
        make(accelerator=Prefetches()).fit(Breaks(), LOADERS["workers"]())
    assert _Ahead.open == 0 and [made.closed for made in Ahead.made] == [1]
    assert not loader_workers()


def test_evaluation():
    """The loaders of an evaluation are processed too; limits and the sanity check leave nothing open."""
    loader = DataLoader(Numbers(SAMPLES), 2)
    trainer = make(accelerator=Prefetches(), limit_predict_batches=5)
    outputs = trainer.predict(Net(), [loader, DataLoader(Numbers(SAMPLES), 3)])
    assert [len(kept) for kept in outputs] == [5, 5]
    assert torch.cat(outputs[0]).tolist() == list(range(10))
    assert len(fit(Prefetches(), "shuffled", Watch(), val=loader, num_sanity_val_steps=2)[0]) == SAMPLES
    assert _Ahead.open == 0


def test_generators_are_left_alone():
    """Of one that can be read only once nothing is read ahead: what a limit leaves is there for the next epoch."""
    batches = ((torch.tensor([index]), torch.ones(1, 4)) for index in range(6))
    watch = Watch()
    make(watch, accelerator=Prefetches(), max_epochs=2, limit_train_batches=3).fit(Net(), batches)
    assert [batch for *_, batch in watch.seen] == [[index] for index in range(6)]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda loader: None, "must return an iterable that can be iterated again"),
        (iter, "must return an iterable that can be iterated again"),
        (lambda loader: list(range(5)), "must keep the number of batches, 12"),
    ],
    ids=["None", "iterator", "length"],
)
def test_refused(made, said):
    class Wrong(CPUAccelerator):
        def process_dataloader(self, loader, device):
            return made(loader)

    with pytest.raises(ConfigurationError, match=f"Wrong.process_dataloader {said}"):
        make(accelerator=Wrong()).fit(Net(), LOADERS["shuffled"]())


def test_close_that_fails(caplog):
    """It ends no run."""

    class Fails(CPUAccelerator):
        def process_dataloader(self, loader, device):
            made = Ahead(loader, device)
            made.close = lambda: 1 / 0
            return made

    make(accelerator=Fails()).fit(Net(), LOADERS["shuffled"]())
    assert "Ahead.close failed" in caplog.text


def test_strategy_comes_first():
    """The accelerator receives what the strategy made of the user's loader."""
    from torchhal.strategies import SingleDeviceStrategy

    received = []

    class Halves(SingleDeviceStrategy):
        def process_dataloader(self, loader, *, training):
            return list(loader)[:4]

    class Sees(CPUAccelerator):
        def process_dataloader(self, loader, device):
            received.append(len(loader))
            return loader

    watch = Watch()
    make(watch, accelerator=Sees(), strategy=Halves()).fit(Net(), LOADERS["shuffled"]())
    assert received == [4] and len(watch.seen) == 4
