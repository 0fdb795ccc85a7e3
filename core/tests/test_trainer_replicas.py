"""A run that goes on with another number of processes within an epoch: each sample once, the same global batch."""

import os
import random
import re
import warnings
from collections import Counter

import pytest
import torch
from numbered_samples import Numbers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from torchhal import Callback, Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal.trainer.data import _samplers as samplers

SAMPLES = 36


class Stream(IterableDataset):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return (Numbers(SAMPLES)[index] for index in range(SAMPLES))


class Lazy(Sampler):
    """Draws each index when it is asked for, from Python's generator, and not as a generator function."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        left = list(range(SAMPLES))
        return iter(lambda: left.pop(random.randrange(len(left))) if left else None, None)


class Pairs(Sampler):
    """Batches of the user's own making."""

    def __len__(self):
        return SAMPLES // 2

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[index : index + 2] for index in range(0, SAMPLES, 2)])


def loader(kind):
    data = Numbers(SAMPLES)
    if kind == "shuffled":
        return DataLoader(data, 2, shuffle=True)
    if kind == "fours":
        return DataLoader(data, 4, shuffle=True)
    if kind == "stream":
        return DataLoader(Stream(), 2)
    if kind == "in order":
        return DataLoader(data, 2)
    if kind == "generator":
        return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "sampler's generator":
        return DataLoader(data, 2, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))
    if kind == "batch sampler's generator":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    if kind == "workers":
        return DataLoader(data, 2, shuffle=True, num_workers=int("WORLD_SIZE" not in os.environ))  # a world has daemons
    if kind == "persistent workers":
        return DataLoader(data, 2, shuffle=True, num_workers=1, persistent_workers=True)
    if kind == "lazy":
        return DataLoader(data, 2, sampler=Lazy())
    if kind == "own batches":
        return DataLoader(data, batch_sampler=Pairs())
    raise AssertionError(kind)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[1]), batch[0].float().unsqueeze(1) / SAMPLES)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch(Callback):
    """What each optimizer step has seen on this rank, by epoch; a checkpoint after ``save_at`` batches of a life."""

    def __init__(self, path, save_at):
        self.path, self.save_at = path, save_at
        self.seen, self.pending = [], []
        self.step = None

    def on_train_start(self, trainer, module):
        self.step = trainer.global_step
        self.batches = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.save_at is not None and self.batches >= self.save_at:
            return  # the ranks agree on the stop a little later
        self.batches += 1
        self.pending += batch[0].tolist()
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.seen.append((trainer.current_epoch, trainer.global_step, self.pending))
            self.pending = []
        if self.batches == self.save_at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class OneBatch(DDPStrategy):
    """Takes one batch to a step, and no more."""

    def check_accumulation(self, batches):
        if batches > 1:
            raise ConfigurationError("one batch")


class SharesByItself(SingleDeviceStrategy):
    """Is one of two runs that share the data out, of which the Trainer knows nothing."""

    def process_dataloader(self, loader, *, training):
        return samplers.distribute(loader, num_replicas=2, rank=0, training=training, seed=0)


def life(kind, accumulate, path, resume, save_at, epochs, strategy="ddp"):
    """One life of the run on this rank."""
    random.seed(11)
    torch.manual_seed(11)
    watch = Watch(path, save_at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu", strategy=strategy, devices="auto", max_epochs=epochs, callbacks=watch, logger=False,
            accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        net = Net()
        trainer.fit(net, loader(kind), ckpt_path=resume)
    assert trainer.accumulate_grad_batches == accumulate  # as asked for, after the fit
    said = [str(warning.message) for warning in caught if "is continued by" in str(warning.message)]
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    return {"seen": watch.seen, "said": said, "weights": weights}


@pytest.fixture
def run(tmp_path, request):
    """``run(kind, accumulate, (2, 5), (3, 4), (1, None))``: lives of so many processes, saved after so many batches."""

    def lives(kind, accumulate, *plan, epochs=2):
        paths = [None, *(str(tmp_path / f"{number}.ckpt") for number, _ in enumerate(plan))]
        results = []
        for (size, save_at), resume, path in zip(plan, paths, paths[1:], strict=False):
            arguments = (kind, accumulate, path, resume, save_at, epochs)
            if size == 1:
                results.append([life(*arguments)])
            else:
                results.append(request.getfixturevalue(f"world{size}").run(life, *arguments, timeout=60))
        return results

    return lives


def seen_in(lives, epoch):
    return Counter(
        sample for ranks in lives for rank in ranks for number, _, samples in rank["seen"] if number == epoch
        for sample in samples
    )  # fmt: skip


def steps_of(lives):
    """The samples of each optimizer step over all ranks, in order."""
    steps = {}
    for ranks in lives:
        for rank in ranks:
            for _, step, samples in rank["seen"]:
                steps.setdefault(step, []).extend(samples)
    return [sorted(steps[step]) for step in sorted(steps)]


ONCE = Counter(range(SAMPLES))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("shuffled", ((2, 3), (1, 6), (2, 2), (1, None))),
        ("shuffled", ((2, 3), (3, 2), (1, None))),
        ("shuffled", ((1, 6), (3, 1), (2, 2), (2, None))),
        ("in order", ((3, 2), (2, 4), (2, None))),
        ("generator", ((1, 6), (2, 2), (1, 2), (1, None))),
        ("sampler's generator", ((1, 6), (3, None))),
        ("batch sampler's generator", ((1, 18 + 6), (2, None))),
        ("workers", ((1, 6), (2, 2), (1, 3), (1, None))),
        ("lazy", ((1, 6), (2, 3), (3, None))),
        ("lazy", ((2, 3), (1, None))),
        ("own batches", ((1, 6), (3, 1), (2, 1), (1, None))),
        ("own batches", ((3, 2), (1, None))),
    ],
    ids=str,
)
def test_each_sample_is_seen_once_in_an_epoch(run, kind, plan):
    lives = run(kind, 1, *plan)
    assert seen_in(lives, 0) == ONCE
    assert seen_in(lives, 1) == ONCE
    steps = steps_of(lives)
    assert kind == "in order" or steps[0] != steps[len(steps) // 2]


@pytest.mark.parametrize(
    ("accumulate", "plan"),
    [
        (1, ((2, 3), (1, 4), (2, None))),  # one process takes two batches to a step
        (1, ((2, 3), (1, 3), (2, None))),  # saved between the two: their step is taken again
        (3, ((2, 7), (3, 4), (1, None))),  # saved after the first of three
        (2, ((3, 2), (2, 3), (1, 6), (3, None))),
    ],
    ids=str,
)
def test_a_global_batch_that_divides_is_kept(run, accumulate, plan):
    """The same samples in each step, and so the weights of a run that was left alone, up to the order of sums."""
    lives = run("shuffled", accumulate, *plan)
    alone = run("shuffled", accumulate, (plan[0][0], None))
    assert steps_of(lives) == steps_of(alone)
    for one, other in zip(lives[-1][0]["weights"], alone[-1][0]["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert re.search(r"accumulate_grad_batches=\d keeps what an optimizer step takes", lives[1][0]["said"][0])


def test_indivisible_global_batch_warns(run):
    """A global batch that does not divide among the ranks is a warning."""
    _, second, third = run("shuffled", 1, (2, 3), (3, 2), (2, None), epochs=1)
    [said] = second[0]["said"]
    assert "by 2 replica(s) of the model on 2 process(es) and is continued by 3 replica(s)" in said
    assert "The epoch goes on after its first 12 samples, at batch 2." in said
    assert "An optimizer step takes 6 samples, not 4 as before (accumulate_grad_batches=1); the learning rate" in said
    assert not second[1]["said"], "rank 0 says it"
    assert "An optimizer step takes" not in third[0]["said"][0], "two replicas again: as in the beginning"


def test_rest_with_persistent_workers(run):
    """The second epoch has begun with workers that had their seed: torch draws none, and the order is another."""
    first, second = run("persistent workers", 1, (1, 18 + 6), (1, None))
    assert seen_in([first, second], 1) == ONCE
    alone = run("persistent workers", 1, (1, None))
    assert steps_of([first, second]) == steps_of(alone)


def test_padding_of_rest(run):
    """A rest that does not divide is padded, and an epoch that is used up has none."""
    padded = run("shuffled", 1, (1, 1), (3, None), epochs=1)
    seen = seen_in(padded, 0)
    assert set(seen) == set(range(SAMPLES))
    assert sum(seen.values()) == SAMPLES + 2, "34 for three: two of them once more"
    ended = run("shuffled", 1, (1, 18), (3, None))
    assert seen_in(ended, 0) == ONCE
    assert seen_in(ended, 1) == ONCE


def test_unknown_order_resumes_nearest_batch(run):
    """Where the order is unknown a warning names the nearest batch."""
    first, second = run("stream", 1, (1, 6), (2, None), epochs=1)
    [said] = second[0]["said"]
    assert "The epoch goes on at batch 3, though the samples before it may be others" in said
    assert [len(rank["seen"]) for rank in (*first, *second)] == [6, 15, 15]


def test_changed_accumulation_and_batch_size(run, tmp_path):
    """The script may ask for another accumulation or batch size."""
    run("shuffled", 1, (2, 3))
    path = str(tmp_path / "0.ckpt")
    found = life("shuffled", 3, "", path, None, 1)
    assert [len(samples) for _, _, samples in found["seen"]] == [6, 6, 6, 6]
    assert "An optimizer step takes 6 samples, not 4 as before" in found["said"][0]
    found = life("fours", 1, "", path, None, 1)  # it divides its global batch by itself
    assert [len(samples) for _, _, samples in found["seen"]] == [4] * 6
    assert "optimizer step" not in found["said"][0]


def test_a_strategy_may_refuse_an_accumulation(run, tmp_path):
    run("shuffled", 1, (2, 3))
    found = life("shuffled", 1, "", str(tmp_path / "0.ckpt"), None, 1, OneBatch())
    assert [len(samples) for _, _, samples in found["seen"]] == [2] * 12
    assert "An optimizer step takes 2 samples, not 4 as before (accumulate_grad_batches=1)" in found["said"][0]


def test_strategy_shares_data_itself(run, tmp_path):
    """Data that a strategy has shared out by itself is not shared out anew."""
    path = str(tmp_path / "0.ckpt")
    life("shuffled", 1, path, None, 3, 1, SharesByItself())
    assert torch.load(path, weights_only=True)["ranks"][0]["data"]["order"] is None


def test_rest_resumes_exactly(run):
    """In the rest of an epoch the same number of processes continues exactly."""
    disturbed = run("shuffled", 1, (2, 3), (3, 1), (3, 2), (3, None))
    alone = run("shuffled", 1, (2, 3), (3, None))
    assert steps_of(disturbed) == steps_of(alone)
    for one, other in zip(disturbed[-1][0]["weights"], alone[-1][0]["weights"], strict=True):
        assert torch.equal(one, other)
