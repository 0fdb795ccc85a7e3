"""STR: set-up and teardown of a strategy, and its ranks before and after them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchhal.distributed.stores import PrefixStore
from torchhal.errors import ConfigurationError
from torchhal.precision import SinglePrecision
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import WORLD_SIZES, RankContext, side_channel
from torchhal_conformance.checks._strategy_run import (
    Regression,
    make_model,
    reference,
    refused_alike,
    require_several_ranks,
    running,
)
from torchhal_conformance.checks.trainer import children


@check("STR-12", world_sizes=WORLD_SIZES)
def one_zero(rank: RankContext) -> None:
    """Exactly one rank is the global zero, the same before and after the set-up; ranks are those of the environment.

    That is the rank in the job, on its node, and the node's.

    Changed: torchhal has no rank_zero_only that could say something else than the strategy.

    Why: everybody wrote the log, or nobody did.
    Fix: answer from the cluster environment, at any time.
    """
    strategy = rank.create_strategy()
    before = strategy.is_global_zero
    with rank.set_up_strategy(strategy):
        found = (before, strategy.is_global_zero, strategy.global_rank, strategy.world_size)
        everybody = rank.gather(found)
        if strategy.cluster_environment is not None:
            numbers = (strategy.local_rank, strategy.node_rank)
            expected_here = (int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"]))
            same("(local rank, node rank) of this rank", numbers, expected_here)
    expected = [(r == 0, r == 0, r, rank.size) for r in range(rank.size)]
    same("(zero before, zero after, global rank, world size) of each rank", everybody, expected)


@check("STR-29", world_sizes=WORLD_SIZES)
def complete_teardown(rank: RankContext) -> None:
    """After teardown() the model is on the CPU, and nothing that the set-up made is left.

    A parameter of another rank's stage or shard may have no values here (device meta), but it has them on some rank.
    The process group that the strategy made is gone, and no thread, no process and no variable of the environment
    is left. It may be called twice.

    Changed: sockets are not counted: a backend closes them some time after its group has gone.

    Why: a notebook's second fit met the first one's group, and a service ran out of threads.
    Fix: undo in reverse order what the set-up did.
    """
    threads, processes, environ = set(threading.enumerate()), children(), dict(os.environ)
    strategy = rank.create_strategy()
    model = make_model(rank)
    with rank.set_up_strategy(strategy):
        strategy.connect(model)
        strategy.setup_model()
    strategy.teardown()
    require(not dist.is_initialized(), "the process group is still there")
    require(not strategy.is_set_up, "is_set_up is still true")
    devices = [parameter.device.type for parameter in model.parameters()]
    same("devices of the parameters that have values here", set(devices) - {"meta"}, {"cpu"})
    held = [any(device != "meta" for device in each) for each in zip(*rank.gather(devices), strict=True)]
    require(all(held), "a parameter has values on no rank")
    deadline = time.monotonic() + 5
    while (left := [t.name for t in set(threading.enumerate()) - threads]) and time.monotonic() < deadline:
        time.sleep(0.05)
    require(not left, f"threads are left: {', '.join(left)}")
    while (alive := children() - processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    require(not alive, f"processes are left: {', '.join(map(str, sorted(alive)))}")
    changed = sorted(name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name))
    require(not changed, f"variables are left or gone: {', '.join(changed)}")


@check("STR-30", world_sizes=(2,))
def failed_setup(rank: RankContext) -> None:
    """After an error during the set-up teardown works, and the strategy can be set up afterwards.

    Why: teardown's own error is what the user saw, in place of the cause.
    Fix: release only what is there.
    """

    class Failing(SinglePrecision):
        def setup(self, accelerator: Any, device: Any) -> None:
            raise RuntimeError("the cause")

    strategy = rank.create_strategy(precision=Failing())
    raises("the set-up", RuntimeError, strategy.setup_environment, "the cause")
    strategy.teardown()
    strategy.teardown()
    rank.create_strategy().teardown()  # one that was never set up
    with rank.set_up_strategy() as second:
        second.barrier("conformance")


@check("STR-31", world_sizes=(2,))
def several_lives(rank: RankContext) -> None:
    """One strategy object can be set up, used and torn down several times in a process, with one module too.

    Why: fit, then test: the second one met what the first had left.
    Fix: make in the set-up what the teardown takes away.
    """
    strategy, environ = rank.create_strategy(), dict(os.environ)
    for life in range(3):
        with rank.set_up_strategy(strategy):
            strategy.connect(make_model(rank))
            strategy.setup_model(training=life != 1)
            got = strategy.reduce(torch.tensor([1.0], device=strategy.root_device), "sum")
            close(f"a sum in life {life + 1}", got, [rank.size], 1e-6)
        changed = sorted(name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name))
        require(not changed, f"variables are left or gone after life {life + 1}: {', '.join(changed)}")
    with suppress(NotApplicable):
        _train_in_two_lives(rank)


def _train_in_two_lives(rank: RankContext) -> None:
    """Check that one module trains in two lives of one strategy as in one."""
    strategy, model = rank.create_strategy(), Regression()
    for life in range(2):
        with running(rank, model, strategy=strategy) as run:
            run.train(2 * life, 2 * life + 2)
            gc.collect()  # what the life before has left ends now, with the finalizers of its vendor's objects
            run.require_weights(f"after life {life + 1} of one module", reference(rank, 2 * life + 2)[0])
            strategy.restore_module()
        rank.gather("done")


@check("STR-38", world_sizes=(2,))
def silent_before_setup(rank: RankContext) -> None:
    """Before the set-up nothing communicates: one rank alone can ask for ranks, sizes and sampler arguments.

    Why: a scheduler that asks for the number of steps in configure_optimizers deadlocked the job.
    Fix: answer from the cluster environment.
    """
    if rank.rank == 0:
        strategy = rank.create_strategy()
        for name in ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero", "root_device",
                     "distributed_sampler_kwargs", "is_data_leader", "is_set_up"):  # fmt: skip
            getattr(strategy, name)
        strategy.make_launcher()
        require(not dist.is_initialized(), "a process group was made before setup_environment()")
    rank.gather("done")


@check("STR-39", world_sizes=(2,))
def foreign_group(rank: RankContext) -> None:
    """A process group that the user has made is used, and stays after teardown.

    Also after one more teardown of a strategy whose run was before. A group that doesn't carry tensors of the device is
    a ConfigurationError of the set-up, or isn't needed.

    Why: a strategy that destroyed it took the rest of the program's communication with it.
    Fix: destroy a group only if the set-up made it.
    """
    require_several_ranks(rank)
    with rank.set_up_strategy() as earlier:
        earlier.barrier("conformance")
    with group_of_the_user(rank):
        group = dist.group.WORLD
        earlier.teardown()
        still_there = dist.is_initialized() and dist.group.WORLD is group
        require(still_there, "a second teardown of an earlier run destroyed the user's process group")
        with rank.set_up_strategy() as strategy:
            got = strategy.reduce(torch.ones(1, device=strategy.root_device), "sum")
            close("a sum over the user's group", got, [rank.size], 1e-6)
            require(dist.group.WORLD is group, "another process group has taken the place of the user's")
        require(dist.is_initialized() and dist.group.WORLD is group, "teardown destroyed the user's process group")
        value = torch.ones(1)
        dist.all_reduce(value)
        same("a sum afterwards", float(value), float(rank.size))
    on_cpu = rank.component.make_accelerator().device_type == "cpu"
    with (
        group_of_the_user(rank, "meta:gloo" if on_cpu else "cpu:gloo"),
        refused_alike(rank, "a group of another device", ConfigurationError),
        rank.set_up_strategy() as strategy,
    ):
        got = strategy.reduce(torch.ones(1, device=strategy.root_device), "sum")
        close("a sum beside the user's group of another device", got, [rank.size], 1e-6)


@contextmanager
def group_of_the_user(rank: RankContext, backend: str = "") -> Iterator[None]:
    """Let the program have a default process group of its own for the block; by default one for the accelerator."""
    accelerator = rank.component.make_accelerator()
    kind = accelerator.device_type
    backend = backend or ("gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{accelerator.backend}")
    store = PrefixStore(f"foreign/{os.environ['TORCHHAL_CONFORMANCE_CALL']}/{backend}", side_channel())
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=timedelta(seconds=20))
    try:
        yield
    finally:
        with suppress(Exception):
            dist.destroy_process_group()
