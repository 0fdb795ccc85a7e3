"""CIO: saves and loads in which several ranks take part."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchhal.errors import CheckpointError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._checkpoint_samples import small_checkpoint


@check("CIO-21", features=["sharded"], world_sizes=(2,), timeout=90, after=("CIO-01",))
def all_ranks(rank: RankContext) -> None:
    """Through a strategy every rank takes part in a save to one path, and all load the same.

    Paths that depend on the rank are an error on all of them.

    Why: a file name with the rank in it makes as many checkpoints as there are ranks, none of them whole.
    Fix: save through the process group; let the strategy compare the paths.
    """
    with rank.set_up_strategy() as strategy:
        path = os.path.join(rank.folder, "x.ckpt")
        state = {"shared": torch.arange(10.0), "step": 3}
        strategy.save_checkpoint(state, path)
        strategy.wait_for_checkpoints()
        same("what each rank loads", strategy.load_checkpoint(path), state)
        own = os.path.join(rank.folder, f"rank{rank.rank}.ckpt")
        raises("a path for each rank", CheckpointError, lambda: strategy.save_checkpoint(state, own), "path")
        rank.gather("done")


def _save_shards(component: ComponentUnderTest, path: str) -> str:
    """Save a divided tensor; return the error where the IO refuses those of other strategies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = RankContext(component, os.path.dirname(path))
    with rank.set_up_strategy() as strategy:
        mesh = init_device_mesh("cpu", (rank.size,))
        full = torch.arange(60.0).reshape(12, 5)
        refused = ""
        try:
            strategy.save_checkpoint({"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 3}, path)
            strategy.wait_for_checkpoints()
        except (CheckpointError, TypeError) as error:
            refused = f"{type(error).__name__}: {error}"
        rank.gather("saved")
        return refused


def _load_shards(component: ComponentUnderTest, path: str) -> Any:
    rank = RankContext(component, os.path.dirname(path))
    with rank.set_up_strategy() as strategy:
        loaded = strategy.load_checkpoint(path)
        rank.gather("loaded")
        weights = loaded["w"]
        return (weights.full_tensor() if hasattr(weights, "full_tensor") else weights).tolist(), loaded["step"]


@check("CIO-22", features=["reshard"], needs=["posix"], after=("CIO-01",))
def another_number_of_ranks(context: CheckContext) -> None:
    """Shards that three ranks wrote load in two, and in one.

    An IO for what an engine divides by itself refuses other divided tensors, on every rank.

    Why: a job that restarts on fewer devices must go on.
    Fix: store each shard with its place in the whole tensor.
    """
    path = str(context.folder / "x.ckpt")
    refused = context.run_on_ranks(3, _save_shards, context.component, path, timeout=90)
    if all(refused):
        raise NotApplicable(f"the IO refuses tensors that another strategy has divided ({refused[0]})")
    require(not any(refused), f"some ranks refused the tensor, others didn't: {refused}")
    expected = torch.arange(60.0).reshape(12, 5).tolist(), 3
    for size in (2, 1):
        for got in context.run_on_ranks(size, _load_shards, context.component, path, timeout=90):
            same(f"shards of 3 ranks loaded by {size}", got, expected)


@check("CIO-23", world_sizes=(2,), timeout=20, after=("CIO-01",))
def one_writer(rank: RankContext) -> None:
    """Without the feature ``sharded`` rank 0 alone writes, all ranks return, and all of them can load.

    Why: several writers of one file race, and a barrier inside of a save that one rank runs waits for ever.
    Fix: don't communicate in save_checkpoint; declare ``sharded`` if every rank has to take part.
    """
    if "sharded" in rank.component.declared:
        raise NotApplicable("every rank writes its part")
    with rank.set_up_strategy() as strategy:
        calls: list[str] = []
        io = strategy.checkpoint_io
        original = io.save_checkpoint

        def counted(*arguments: Any, **options: Any) -> None:
            calls.append("save")
            original(*arguments, **options)

        vars(io)["save_checkpoint"] = counted
        path = os.path.join(rank.folder, "x.ckpt")
        strategy.save_checkpoint(small_checkpoint(), path)
        strategy.wait_for_checkpoints()
        rank.gather("saved")
        same("how many times each rank wrote", rank.gather(len(calls)), [1, 0])
        same("what each rank loads", strategy.load_checkpoint(path), small_checkpoint())
        rank.gather("loaded")
