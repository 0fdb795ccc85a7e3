"""STR-82 to STR-85, STR-87, STR-89, STR-93, STR-94: one rank is alone with an error, a batch or a place."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointError, DistributedError, TorchhalError
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._limits import scaled
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    Regression,
    batch,
    require_several_ranks,
    running,
    share,
)


@check("STR-82", since="0.2", world_sizes=(2,), after=("STR-28", "STR-38"))
def share_of_another_process(rank: RankContext) -> None:
    """distributed_sampler_kwargs are those of the process that asks, also of a copy that another one has asked before.

    Why: a script that looks at them before fit has (1 replica, rank 0) in the object that travels to the workers.
    Fix: compute them each time; they are asked for once per loader.
    """
    require_several_ranks(rank)
    strategy = rank.create_strategy()
    with rank.set_up_strategy() as other:
        expected = other.distributed_sampler_kwargs
    another = str(1 - rank.rank)
    with mock.patch.dict(os.environ, {"RANK": another, "LOCAL_RANK": another}), suppress(TorchhalError):
        _ = strategy.distributed_sampler_kwargs
    copied = pickle.loads(pickle.dumps(strategy)) if _pickles(strategy) else strategy
    for told, one in (("the object", strategy), ("a copy", copied)):
        with rank.set_up_strategy(one):
            got = one.distributed_sampler_kwargs
            same(f"distributed_sampler_kwargs of {told}, asked in another process before", got, expected)
    rank.gather("done")


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class _KeepsFiles(TorchCheckpointIO):
    """An IO in a folder without the right to delete."""

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))


@check("STR-83", since="0.2", world_sizes=(2,), after=("STR-24",))
def removal_that_fails(rank: RankContext) -> None:
    """remove_checkpoint raises on every rank, or on none, where the IO fails on the rank that removes.

    Why: a user who handles the error takes another path on rank 0 than on the others, and all wait.
    Fix: tell all ranks whether it has worked.
    """
    require_several_ranks(rank)
    path = os.path.join(rank.folder, "kept.ckpt")
    with rank.set_up_strategy(checkpoint_io=_KeepsFiles()) as strategy:
        calls: dict[str, Callable[[], Any]] = {
            "save_checkpoint": lambda: strategy.save_checkpoint({"w": torch.ones(2)}, path),
            "wait_for_checkpoints": strategy.wait_for_checkpoints,
            "remove_checkpoint": lambda: strategy.remove_checkpoint(path),
        }
        for name, call in calls.items():
            outcome = ""
            try:
                call()
            except Exception as error:
                outcome = type(error).__name__
            told = rank.gather(outcome)
            require(all(told) or not any(told), f"{name} raised on some ranks alone: {told}")
        require(told[0] != "", "remove_checkpoint raised nothing, though the IO did")
        rank.gather("done")


@check("STR-84", since="0.2", world_sizes=(2,), after=("STR-08",))
def rank_that_does_not_come(rank: RankContext) -> None:
    """``reduce`` and ``reduce_boolean_decision`` raise after ``timeout`` on a rank whose partner doesn't come.

    Why: a group of its own with torch's default waits half an hour, on all nodes, and nothing says why.
    Fix: hand ``timeout`` on to each group that the strategy makes.
    """
    require_several_ranks(rank)
    calls: dict[str, Callable[[Strategy], Any]] = {
        "reduce": lambda strategy: strategy.reduce(torch.ones(2, device=strategy.root_device), "sum"),
        "reduce_boolean_decision": lambda strategy: strategy.reduce_boolean_decision(True),
    }
    strategy = rank.create_strategy()
    strategy.timeout = timedelta(seconds=scaled(2.5))
    rank.gather("ready")  # the set-up has this timeout too
    with rank.set_up_strategy(strategy):
        for name, call in calls.items():
            outcome = ""
            if rank.rank == 0:
                try:
                    outcome = f"returned {call(strategy)!r}"
                except Exception as error:
                    outcome = f"raised {type(error).__name__}"
            told = rank.gather(outcome)
            require("returned" not in told[0], f"{name} with a rank that doesn't come {told[0]}")


@check("STR-85", since="0.2", world_sizes=(2,), after=("STR-55",))
def hooks_of_one_rank(rank: RankContext) -> None:
    """The hooks of evaluation batches return on a rank that alone has more batches: they don't communicate.

    Why: with an uneven test set the job hangs, or one rank's number meets another collective of the other.
    Fix: communicate in on_evaluation_end, which all ranks call.
    """
    require_several_ranks(rank)
    with running(rank, Regression()) as run:
        strategy = run.strategy
        run.module.eval()
        data = share(strategy, batch(rank, 0))
        with torch.no_grad():
            strategy.on_evaluation_start("validate")
            for number in range(130 if rank.rank == 0 else 2):
                strategy.on_evaluation_batch_start("validate", data, number, 0)
                strategy.on_evaluation_batch_end("validate", None, data, number, 0)
            rank.gather("done")
            strategy.on_evaluation_end("validate")
        close("a sum afterwards", strategy.reduce(torch.ones(1, device=strategy.root_device), "sum"), [2.0], 1e-6)


@check("STR-87", since="0.2", world_sizes=(2,), after=("STR-55",))
def error_of_one_rank(rank: RankContext) -> None:
    """on_exception and the end hooks after it return on a rank that is alone with its error: they don't communicate.

    ``failure`` is set in all four: on_exception, on_evaluation_end, on_train_epoch_end and on_train_end.

    Why: the other ranks are in an averaging of gradients; the error is hidden behind a hang until the timeout.
    Fix: say what this rank knows; torchhal reports the errors of all. Look at ``failure`` before a collective.
    """
    require_several_ranks(rank)
    for lonely in (1, 0):  # with a strategy of its own each: what the one has sent may be there for the other
        strategy, error = rank.create_strategy(), DistributedError("of this rank alone")
        strategy.timeout = timedelta(seconds=scaled(8.0))  # a collective raises before the other rank stops waiting
        rank.gather("ready")  # the set-up has this timeout too
        with running(rank, Regression(), strategy=strategy) as run:
            strategy.on_train_start()
            strategy.on_train_epoch_start()
            run.module.eval()
            with torch.no_grad():
                strategy.on_evaluation_start("validate")
            ends: dict[str, Callable[[], None]] = {
                "on_exception": partial(strategy.on_exception, error),
                "on_evaluation_end": partial(strategy.on_evaluation_end, "validate"),
                "on_train_epoch_end": strategy.on_train_epoch_end,
                "on_train_end": strategy.on_train_end,
            }
            strategy.failure = error
            took = dict.fromkeys(ends, 0.0)
            if rank.rank == lonely:
                took = {name: _seconds_of(strategy, end) for name, end in ends.items()}
            took = rank.gather(took)[lonely]
            if rank.rank != lonely:
                for end in ends.values():
                    _seconds_of(strategy, end)
            for name, seconds in took.items():
                told = f"{name} of rank {lonely}, which is alone with its error, took {seconds:.0f} s"
                require(seconds < scaled(5.0), told)


def _seconds_of(strategy: Strategy, hook: Callable[[], None]) -> float:
    """Return how long ``hook`` takes, with what it has enqueued on the device."""
    began = time.monotonic()
    with suppress(Exception):  # is logged
        hook()
        strategy.accelerator.synchronize(strategy.root_device)
    return time.monotonic() - began


class _FailsLater(TorchCheckpointIO):
    """An asynchronous IO whose save has failed in the background."""

    features = TorchCheckpointIO.features | {"async"}
    failed = True

    def wait(self) -> None:
        if self.failed:
            raise OSError(28, "No space left on device")


@check("STR-89", since="0.2", world_sizes=(2,), after=("STR-24",))
def late_error_of_a_save(rank: RankContext) -> None:
    """wait_for_checkpoints raises on every rank where a save has failed in the background of one.

    Why: rank 0 leaves with "no space left", a user who handles that saves elsewhere, and the others train on.
    Fix: tell all ranks whether the save has worked.
    """
    require_several_ranks(rank)
    path, io = os.path.join(rank.folder, "late.ckpt"), _FailsLater()
    with rank.set_up_strategy(checkpoint_io=io) as strategy:
        outcome = ""
        try:
            strategy.save_checkpoint({"w": torch.ones(2)}, path)
            strategy.wait_for_checkpoints()
        except Exception as error:
            outcome = type(error).__name__
        finally:
            io.failed = False  # its teardown would raise too
        told = rank.gather(outcome)
        require(all(told), f"wait_for_checkpoints must raise on every rank where a save has failed (got {told})")


class _FullDisk(TorchCheckpointIO):
    """An IO whose disk is full."""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")


@check("STR-93", since="0.2", world_sizes=(2,), after=("STR-24",))
def save_that_fails(rank: RankContext) -> None:
    """save_checkpoint raises on every rank at once where the IO fails on the rank that saves.

    So it does where ranks give a sharded IO different paths.

    Why: a full disk ends as a hang: the other ranks wait in a barrier for one that has raised.
    Fix: tell all ranks whether the save has worked, in the place of a barrier.
    """
    require_several_ranks(rank)
    with rank.set_up_strategy(checkpoint_io=_FullDisk()) as strategy:
        outcome, began = "", time.monotonic()
        try:
            strategy.save_checkpoint({"w": torch.ones(2)}, os.path.join(rank.folder, "full.ckpt"))
            strategy.wait_for_checkpoints()
        except Exception as error:
            outcome = type(error).__name__
        took = time.monotonic() - began
        require(took < scaled(10.0), f"save_checkpoint on a full disk took {took:.0f} s")
        told = rank.gather(outcome)
        require(all(told), f"save_checkpoint must raise on every rank where the disk is full (got {told})")
    with rank.set_up_strategy(checkpoint_io=_Shards()) as strategy:
        path = os.path.join(rank.folder, f"shards-{rank.rank}")
        told_other = "save_checkpoint of ranks that give a sharded IO different paths"
        raises(told_other, CheckpointError, lambda: strategy.save_checkpoint({"w": torch.ones(2)}, path))
        rank.gather("refused")


class _Shards(TorchCheckpointIO):
    """An IO that every rank calls."""

    features = TorchCheckpointIO.features | {"sharded"}


class _Normalized(Regression):
    """A model with buffers that each step changes while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.normalization = nn.BatchNorm1d(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.normalization(self(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)


@check("STR-94", since="0.2", world_sizes=(2,), after=("STR-14",))
def evaluation_of_one_rank(rank: RankContext) -> None:
    """Steps of an evaluation on a rank that alone has batches return, unless evaluation_communicates is True.

    Why: a wrapper sends buffers before each forward: with an uneven validation set the job hangs.
    Fix: run evaluation steps on the module, without the wrapper; or declare that they communicate.
    """
    require_several_ranks(rank)
    with running(rank, _Normalized(), may_refuse=True) as run:
        if run.strategy.evaluation_communicates:
            raise NotApplicable("it declares that evaluation steps communicate")
        if (run.strategy.distributed_sampler_kwargs or {}).get("num_replicas") != rank.size:
            raise NotApplicable("its ranks share their batches")
        step, data = run.strategy.step_function("validation_step"), share(run.strategy, batch(rank, 0))
        run.train(0, 1)  # after one DDP sends buffers in the next forward
        run.module.eval()
        began = time.monotonic()
        with torch.no_grad():
            for number in range(3 if rank.rank else 0):  # rank 0 alone could send without waiting
                step(data, number)
        took = time.monotonic() - began
        require(took < scaled(10.0), f"evaluation steps of a rank that is alone took {took:.0f} s")
        rank.gather("done")
