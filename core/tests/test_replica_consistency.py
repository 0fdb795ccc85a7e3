"""Test the comparison of ddp's replicas when a fit ends, and models whose replicas can't stay alike."""

import os
import pickle
import warnings

import hardware
import pytest
import torch
from ddp_models import Thawed, rows
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from world import joined

from torchhal import Module, Trainer
from torchhal.distributed import collectives
from torchhal.errors import DistributedError, ModelError
from torchhal.strategies import DDPStrategy, ParallelStrategy
from torchhal.strategies._replica_consistency import find_difference

pytestmark = pytest.mark.slow_on_sim


class Apart(Thawed):
    """Each rank changes a weight by itself, in the forward of its last step say."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.layers[2].weight.add_(self.by * self.trainer.global_rank)


class Hooked(DDPStrategy):
    """As a plugin adds a hook, which may average now and then only."""

    def configure_ddp(self):
        super().configure_ddp()
        self.model.register_comm_hook(None, default_hooks.allreduce_hook)


class Local(ParallelStrategy):
    """Each rank trains by itself, until somebody averages the weights."""


class Alike(Local):
    compares_replicas = True


def fit_apart(by, strategy="ddp", ignored=()):
    """What fit says, and what it warns of."""
    makers = {
        "ddp": DDPStrategy, "hook": lambda: DDPStrategy(comm_hook=default_hooks.allreduce_hook), "hooked": Hooked,
        "local": Local, "alike": Alike,
    }  # fmt: skip
    trainer = Trainer(
        accelerator=hardware.name(), devices=2, strategy=makers[strategy](), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Apart(by)
    model._ddp_params_and_buffers_to_ignore = list(ignored)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, torch.utils.data.DataLoader(rows(8), 4))
        except DistributedError as error:
            return str(error), []
    return "", [str(warning.message) for warning in noted if "norm" in str(warning.message)]


def test_diverged_replicas_found_at_end(world2):
    """Replicas that came apart are found when the fit ends."""
    for said, _ in world2.run(fit_apart, 0.01):
        assert "'layers.2.weight'" in said and "ranks 0, 1" in said and "of the norm" in said
    assert world2.run(fit_apart, 0.0) == [("", [])] * 2


def test_replicas_round_differently_with_a_warning(world2):
    (said, warned), other = world2.run(fit_apart, 1e-7)
    assert not said and "rounded differently" in warned[0] and other == ("", [])


@pytest.mark.parametrize("strategy", ["hook", "hooked", "local"])
def test_local_replicas_not_compared(world2, strategy):
    """Replicas that may differ by design are not compared."""
    assert world2.run(fit_apart, 0.01, strategy) == [("", [])] * 2


def test_strategy_declares_compared_replicas(world2):
    """The replicas of a strategy that declares them alike are compared."""
    for said, _ in world2.run(fit_apart, 0.01, "alike"):
        assert "differ between ranks 0, 1" in said


def test_parameters_that_ddp_ignores_are_not_compared(world2):
    assert world2.run(fit_apart, 0.01, "ddp", ["layers.2.weight"]) == [("", [])] * 2


def differences(cases):
    """What is found of weights of each dtype, that far apart, and the warnings."""
    found = []
    with joined(), warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for name, by in cases:
            weight = torch.arange(1, 65).to(getattr(torch, name))
            weight[:32] += int(os.environ["RANK"]) * by
            found.append(bool(find_difference([("w", None, weight)])))
    return found, len(noted)


def test_the_dtype_decides_what_is_rounding(world2):
    rounded = [("float64", 1e-9), ("float32", 1e-4), ("complex64", 1e-4), ("bfloat16", 0.25), ("float16", 0.05)]
    apart = [("float64", 1e-4), ("float32", 0.1), ("bfloat16", 4.0), ("float16", 2.0), ("int64", 1), ("uint8", 1)]
    (found, warned), (same, other) = world2.run(differences, rounded + apart)
    assert found == same == [False] * 5 + [True] * 6 and (warned, other) == (5, 0)


def what_is_sent(apart):
    """What a rank sends of twenty parameters of which each rank has other parts, and all have one whole."""
    sent = []

    def gather(value, **options):
        sent.append(value)
        return all_gather_object(value, **options)

    all_gather_object = collectives.all_gather_object
    me = int(os.environ["RANK"])
    with joined(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_object", gather)
        whole = ("whole", None, torch.ones(3) + me * apart)
        difference = find_difference([*((f"part{index}", (me,), torch.full((2,), me)) for index in range(20)), whole])
    return difference, [len(pickle.dumps(value)) for value in sent], ["part" in repr(value) for value in sent]


def test_comparison_sends_digests(world2):
    """Ranks send digests, and the names of differing parameters alone."""
    for difference, sizes, names in world2.run(what_is_sent, 0.0):
        assert not difference and len(sizes) == 2 and sizes[0] < 40 and sizes[1] < 21 * 30 and not any(names)
    for difference, sizes, names in world2.run(what_is_sent, 1.0):
        assert "'whole' differ between ranks 0, 1" in difference and len(sizes) == 3 and not any(names)


class Bounded(Module):
    def __init__(self, **options):
        super().__init__()
        self.table = torch.nn.EmbeddingBag(6, 3, **options)

    def training_step(self, batch, batch_idx):
        return self.table(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_bounded(devices, **options):
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Bounded(**options), torch.utils.data.DataLoader(torch.arange(12).reshape(4, 3) % 6, 2))
    except ModelError as error:
        return str(error)


def fit_both():
    return fit_bounded(2, max_norm=2.0), fit_bounded(2, scale_grad_by_freq=True)


def test_replica_unsafe_embedding_refused(world2):
    """A layer that writes to its weight, or scales by counts of the batch, is refused."""
    for said, frequent in world2.run(fit_both):
        assert "'table' is an EmbeddingBag with max_norm=2.0" in said and "2 replicas" in said and "renorm_" in said
        assert "'table' is an EmbeddingBag with scale_grad_by_freq=True" in frequent and "2 replicas" in frequent
