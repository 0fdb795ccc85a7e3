"""Test the share of each rank in every kind of DataLoader, and batches skipped after a resumption."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from torch.utils.data.sampler import BatchSampler

from torchhal.trainer.data._samplers import distribute, with_skip

pytestmark = pytest.mark.usefixtures("accelerator")


class Buckets:
    """A batch sampler of the user's own, with a sampler inside that it doesn't draw from."""

    def __init__(self, count=7):
        self.count = count
        self.sampler = range(count)

    def __len__(self):
        return self.count

    def __iter__(self):
        order = torch.randperm(self.count).tolist()
        return iter([[2 * index, 2 * index + 1] for index in order])


class Endless:
    def __iter__(self):
        while True:
            yield torch.randint(0, 14, (2,)).tolist()


def shares(loader, ranks=2, training=True):
    state = torch.get_rng_state()
    found = []
    for rank in range(ranks):
        torch.manual_seed(rank)  # ranks' own generators have gone different ways
        mine = distribute(loader, num_replicas=ranks, rank=rank, training=training, seed=5)
        found.append([sample for batch in mine for sample in batch.flatten().tolist()])
        assert len(mine) == sum(1 for _ in mine)
    torch.set_rng_state(state)
    return found


DATA = torch.arange(14)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_sampler=Buckets()),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)),
        DataLoader(DATA, 2, shuffle=True),
        DataLoader(DATA, sampler=RandomSampler(DATA), batch_size=None),
        DataLoader(DATA, sampler=Buckets(), batch_size=None),
    ],
    ids=["own batch sampler", "torch's batch sampler", "shuffled", "unbatched", "batches as samples"],
)
def test_ranks_share_every_kind_of_loader(loader):
    first, second = shares(loader)
    assert set(first) | set(second) == set(range(14))
    assert len(first) == len(second) <= 8
    assert len(set(first) & set(second)) <= 2  # the padding
    assert first + second != sorted(first + second)  # still shuffled
    ordered = shares(loader, training=False)
    assert sorted(ordered[0] + ordered[1]) == list(range(14))  # each once


def test_weighted_sampler_keeps_weights():
    """A weighted sampler keeps its weights, also inside a batch sampler."""
    weights = torch.zeros(14)
    weights[3] = weights[8] = 1.0
    sampler = WeightedRandomSampler(weights, 14)
    for loader in (
        DataLoader(DATA, 2, sampler=sampler),
        DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        first, second = shares(loader)
        assert set(first) | set(second) == {3, 8} and len(first) == len(second) == 7


def test_endless_batch_sampler_read_lazily():
    """An endless batch sampler is read a piece at a time, and leaves the global random state alone."""
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        mine = distribute(DataLoader(DATA, batch_sampler=Endless()), num_replicas=2, rank=rank, training=True, seed=5)
        before = torch.get_rng_state()
        iterator = iter(mine.batch_sampler)
        found.append([next(iterator) for _ in range(3000)])
        assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    whole = Endless().__iter__()
    expected = [next(whole) for _ in range(6000)]
    assert found == [expected[0::2], expected[1::2]]


def test_distributed_samplers_are_left_alone():
    """A sampler that shares its data out among ranks already is left as it is."""
    from torch.utils.data import DistributedSampler

    class Own:
        num_replicas, rank = 2, 1

        def __len__(self):
            return 7

        def __iter__(self):
            return iter(range(7, 14))

    given = DistributedSampler(DATA, 2, 1)
    for loader in (
        DataLoader(DATA, 2, sampler=given),
        DataLoader(DATA, batch_sampler=BatchSampler(given, 2, False)),
        DataLoader(DATA, 2, sampler=Own()),
    ):
        assert distribute(loader, num_replicas=2, rank=1, training=True, seed=0) is loader


class Kept(DataLoader):
    """A loader of the user's own class, with an attribute that a new object would lack."""

    def __init__(self, *args, note, **options):
        super().__init__(*args, **options)
        self.note = note


def test_a_subclass_of_dataloader_stays_one():
    mine = distribute(Kept(DATA, 2, shuffle=True, note="x"), num_replicas=2, rank=0, training=True, seed=0)
    assert type(mine) is Kept and mine.note == "x" and len(mine) == 4


@pytest.mark.parametrize("batch_size", [2, None])
def test_what_is_skipped_ends_with_the_data(batch_size):
    """A checkpoint may say that an epoch was at its thousand millionth batch."""
    come = []
    loader = with_skip(DataLoader(DATA, batch_size), 2**40, lambda: come.append(True))
    assert list(loader) == [] and come == [True]
