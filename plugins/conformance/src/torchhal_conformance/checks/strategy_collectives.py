"""STR: reduce, broadcast, barrier and all_gather over the ranks."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import check
from torchhal_conformance._rank_context import WORLD_SIZES, RankContext
from torchhal_conformance.checks._collective_examples import (
    broadcast_values,
    gathered_tensors,
    reduced_nests,
    reduced_tensors,
)


@check("STR-01", world_sizes=WORLD_SIZES)
def reduce(rank: RankContext) -> None:
    """``reduce`` gives sum, mean, avg, max, min and product over the ranks; another op is a ValueError with its name.

    Why: an op that is ignored turns a maximum into a mean, in every metric.
    Fix: hand the op to the backend, and refuse the rest.
    """
    values = [float(r + 1) for r in range(rank.size)]
    mean = sum(values) / rank.size
    expected = {"sum": sum(values), "mean": mean, "avg": mean, "max": max(values), "min": min(values),
                "product": math.prod(values)}  # fmt: skip
    with rank.set_up_strategy() as strategy:
        for op, value in expected.items():
            got = strategy.reduce(torch.tensor([values[rank.rank]], device=strategy.root_device), op)
            close(f"reduce(op={op!r}) of rank + 1", got, [value], 1e-6)
        raises("reduce with an unknown op", ValueError, lambda: strategy.reduce(torch.ones(1), "median"), "median")


@check("STR-02", world_sizes=(2,))
def reduce_is_pure(rank: RankContext) -> None:
    """``reduce`` leaves its input as it was and returns new memory, without a graph, whatever the backend.

    Why: a metric that was logged twice was reduced twice, on one backend only.
    Fix: reduce a copy.
    """
    with rank.set_up_strategy() as strategy:
        value = torch.full((4,), float(rank.rank), device=strategy.root_device)
        before = value.clone()
        got = strategy.reduce(value, "sum")
        same("the input after reduce", value, before)
        got.add_(1)  # not data_ptr(): there are devices on which all tensors have the same
        same("the input after a write to the result", value, before)
        require(not strategy.reduce(value.clone().requires_grad_(), "mean").requires_grad, "the result has a graph")
        first = strategy.reduce(value, "sum")
        kept = first.clone()
        value.add_(100)
        same("the result after a write to the input", first, kept)
        strategy.reduce(torch.full_like(value, 7.0), "sum")
        same("the result after another reduce", first, kept)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                same(f"the result under {mode.__name__}", strategy.reduce(value - 100, "sum").clone(), kept)


@check("STR-03", world_sizes=WORLD_SIZES, after=("STR-01",))
def reduce_anything(rank: RankContext) -> None:
    """``reduce`` takes tensors of many dtypes and layouts, numbers and nests, and gives back what is no number.

    The tensors are of every dtype and layout: integers, booleans, complex, 0-d, empty, strided, conjugated, float16
    (added up without overflow) and bfloat16 (without losing small terms), on the CPU or the device, at any depth of
    containers, which keep their types. A mean of integers is of the default dtype, whatever that is.

    Why: a mean of integers was cut off, and a sum of float16 overflowed where each part did not.
    Fix: add up in a wider dtype, and return the dtype that Strategy.reduce promises.
    """
    n = rank.size
    with rank.set_up_strategy() as strategy:
        device = strategy.root_device

        def made(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        same("the sum of integers", strategy.reduce(made([rank.rank]), "sum"), made([n * (n - 1) // 2]))
        close("the mean of integers", strategy.reduce(made([rank.rank]), "mean"), [(n - 1) / 2], 1e-6)
        same("the maximum of booleans", bool(strategy.reduce(made(rank.rank == 0), "max")), True)
        same("the shape of a 0-d tensor", tuple(strategy.reduce(made(1.0), "sum").shape), ())
        strided = torch.arange(12.0, device=device).reshape(3, 4)[:, ::2] * (rank.rank + 1)
        close("a strided tensor", strategy.reduce(strided, "sum"), strided / (rank.rank + 1) * (n * (n + 1) / 2), 1e-6)
        big = strategy.reduce(made([40000.0], torch.float16), "mean")
        same("the mean of float16 near its limit", (float(big), big.dtype), (40000.0, torch.float16))
        # in bfloat16 itself 256 + 1 is 256, however often
        small = strategy.reduce(made([256.0 if rank.rank == 0 else 1.0], torch.bfloat16), "sum")
        same("the sum of 256 and ones in bfloat16", small, made([255.0 + n], torch.bfloat16))
        nest = strategy.reduce({"a": [made(1.0), 2], "b": ("text", None)}, "sum")
        same("a number in a nest", nest["a"][1], 2 * n)
        same("what is no number", nest["b"], ("text", None))
        numbers = {"int": 2**60 + rank.rank, "float": 0.1 + rank.rank, "bool": rank.rank == 0}
        wide = strategy.reduce(numbers, "max")
        same("the maximum of numbers", wide, {"int": 2**60 + n - 1, "float": 0.1 + (n - 1), "bool": True})
        reduced_tensors(rank, strategy)
        reduced_nests(rank, strategy)


@check("STR-04", features=["groups"], world_sizes=(3,), after=("STR-01",))
def groups(rank: RankContext) -> None:
    """``reduce`` and all_gather over a group are over its ranks alone.

    Why: a group that is ignored mixes data-parallel replicas with the shards of one model.
    Fix: hand the group on.
    """
    with rank.set_up_strategy() as strategy:
        group = dist.new_group([0, 2])
        if rank.rank != 1:
            value = torch.tensor([float(rank.rank)], device=strategy.root_device)
            close("the sum over ranks 0 and 2", strategy.reduce(value, "sum", group=group), [2.0], 1e-6)
            close("all_gather over ranks 0 and 2", strategy.all_gather(value, group=group).flatten(), [0.0, 2.0], 1e-6)
        rank.gather("done")


@check("STR-05", world_sizes=WORLD_SIZES, after=("STR-01",))
def decisions(rank: RankContext) -> None:
    """reduce_boolean_decision says on every rank whether all, or any, decided so.

    Why: a base class that returned each rank's own decision let half of the ranks stop.
    Fix: reduce with min for all, with max for any.
    """
    with rank.set_up_strategy() as strategy:
        one, last = rank.rank == 0, rank.size == 1
        same("all, where rank 0 alone decided so", strategy.reduce_boolean_decision(one), last)
        for lonely in range(rank.size):
            alone = rank.rank == lonely
            same(f"any, where rank {lonely} alone did", strategy.reduce_boolean_decision(alone, all=False), True)
            same(f"all, where all but rank {lonely} did", strategy.reduce_boolean_decision(not alone), False)
        same("any, where rank 0 alone decided so", strategy.reduce_boolean_decision(one, all=False), True)
        same("all, where all did", strategy.reduce_boolean_decision(True), True)
        same("any, where none did", strategy.reduce_boolean_decision(False, all=False), False)


@check("STR-06", world_sizes=WORLD_SIZES)
def broadcast(rank: RankContext) -> None:
    """``broadcast`` gives every rank the value of rank ``src``, for each src: tensors, objects, None, more than 2 MB.

    Tensors are of any dtype, layout and shape, empty ones too, and may lie in containers.

    Why: a src that is ignored gives every rank the value of rank 0, or its own.
    Fix: hand src on, and send sizes before contents.
    """
    with rank.set_up_strategy() as strategy:
        for src in range(rank.size):
            objects: list[Any] = [{"rank": rank.rank, "text": "x" * rank.rank}, None if rank.rank == src else "other"]
            same(
                f"an object from rank {src}", strategy.broadcast(objects, src), [{"rank": src, "text": "x" * src}, None]
            )
            tensor = torch.full((3, 2), float(rank.rank), device=strategy.root_device)
            same(f"a tensor from rank {src}", strategy.broadcast(tensor, src).cpu(), torch.full((3, 2), float(src)))
        large = strategy.broadcast(torch.arange(800_000) + rank.rank, rank.size - 1)
        same("a tensor of 6 MB", int(large.sum()), int((torch.arange(800_000) + rank.size - 1).sum()))
        broadcast_values(rank, strategy)
        raises("broadcast from a rank that doesn't exist", ValueError, lambda: strategy.broadcast(1, rank.size), "src")


@check("STR-07", world_sizes=WORLD_SIZES, after=("STR-06",))
def received_device(rank: RankContext) -> None:
    """A tensor from another rank's device arrives on the receiver's own device, one from its CPU on the CPU.

    Why: a tensor that arrives on the sender's device opens a context there, or is on a device that isn't here.
    Fix: send through host memory, and move what came from a device.
    """
    with rank.set_up_strategy() as strategy:
        mine = torch.ones(2, device=strategy.root_device)  # its device has an index where the root device has none
        got = strategy.broadcast({"device": mine, "host": torch.ones(2)}, 0)
        same("device of a tensor from a device", got["device"].device, mine.device)
        same("device of a tensor from the CPU", got["host"].device.type, "cpu")
        gathered = strategy.all_gather(mine)
        same("device of what was gathered", gathered.device, mine.device)


@check("STR-08", world_sizes=WORLD_SIZES)
def barrier(rank: RankContext) -> None:
    """``barrier`` returns on no rank before the last one has come.

    Why: rank 0 read the file that the last rank had not written yet.
    Fix: wait for every rank.
    """
    with rank.set_up_strategy() as strategy:
        for turn, last in enumerate([rank.size - 1, *range(rank.size)]):  # one name again and again
            path = os.path.join(rank.folder, f"last{turn}")
            if rank.rank == last:
                time.sleep(0.4 if turn == 0 else 0.15)
                with open(path, "w", encoding="utf-8") as file:
                    file.write("here")
            strategy.barrier("conformance")
            require(os.path.exists(path), f"barrier() number {turn + 1} returned before rank {last} had come")
        rank.gather("done")


@check("STR-09", world_sizes=(1, 2, 3))
def all_gather(rank: RankContext) -> None:
    """all_gather gives (world, ...) in rank order, in fresh memory on root_device, also for one rank and from the CPU.

    That holds for every dtype, shape and layout. No later call changes a result.

    Why: with one rank the first dimension was missing, so code that worked on eight devices failed on one.
    Fix: stack, never concatenate; unsqueeze for one rank.
    """
    with rank.set_up_strategy() as strategy:
        mine = torch.full((2, 3), float(rank.rank))
        for value in (mine, mine.to(strategy.root_device), mine.t().contiguous().t()):
            got = strategy.all_gather(value)
            same("shape", tuple(got.shape), (rank.size, 2, 3))
            expected = torch.stack([torch.full((2, 3), float(r)) for r in range(rank.size)])
            same("what was gathered", got.cpu(), expected)
            got.fill_(7.0)
            same("the input after a write to the result", float(value[0, 0]), float(rank.rank))
        same("objects", strategy.all_gather_object({"rank": rank.rank}), [{"rank": r} for r in range(rank.size)])
        gathered_tensors(rank, strategy)


@check("STR-10", features=["sync_grads"], world_sizes=WORLD_SIZES, after=("STR-09",))
def gather_with_gradients(rank: RankContext) -> None:
    """With sync_grads, backward adds up what the losses of all ranks say about this rank's tensor.

    Why: contrastive losses trained on detached negatives, and got worse without an error.
    Fix: an autograd function whose backward is a reduce-scatter.
    """
    with rank.set_up_strategy() as strategy:
        mine = torch.full((2,), float(rank.rank + 1), device=strategy.root_device, requires_grad=True)
        weights = torch.arange(1.0, 2 * rank.size + 1, device=strategy.root_device).reshape(rank.size, 2)
        gathered = strategy.all_gather(mine, sync_grads=True)
        ((rank.rank + 1) * weights * gathered).sum().backward()  # type: ignore[no-untyped-call]
        close("the gradient", mine.grad, weights[rank.rank] * sum(range(1, rank.size + 1)), 1e-6)


@check("STR-11", world_sizes=WORLD_SIZES)
def uneven_shapes(rank: RankContext) -> None:
    """Tensors of different shapes are gathered, or are an error on every rank; never a hang or numbers from elsewhere.

    There is one entry per rank that begins with what that rank has sent.

    Why: the last batch is smaller on one rank.
    Fix: compare shapes before anything is sent.
    """
    with rank.set_up_strategy() as strategy:
        outcome, wrong = "", ""
        try:
            got = strategy.all_gather(torch.full((2 + rank.rank,), rank.rank + 1.0, device=strategy.root_device))
        except Exception as error:
            outcome = type(error).__name__
        else:
            entries = [entry.flatten().tolist() for entry in got]  # padded to the longest, or each of its own length
            sent = [[r + 1.0] * (2 + r) for r in range(rank.size)]
            if [entry[: 2 + r] for r, entry in enumerate(entries)] != sent:
                wrong = f"rank {rank.rank} gathered {entries}, of what was sent as {sent}"
        told = rank.gather((outcome, wrong))  # whoever fails alone leaves the others waiting
        outcomes = [one for one, _ in told]
        require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")
        require(not any(one for _, one in told), "; ".join(one for _, one in told if one))
        close("a sum afterwards", strategy.reduce(torch.ones(1, device=strategy.root_device), "sum"), [rank.size], 1e-6)


@check("STR-45", world_sizes=WORLD_SIZES, after=("STR-01",))
def order_of_keys(rank: RankContext) -> None:
    """A mapping whose keys come in another order on another rank is reduced by key, or is an error on every rank.

    Why: two metrics logged in another order were added up crosswise.
    Fix: go through the keys in sorted order, or compare them first.
    """
    values = {"a": 1.0, "b": 10.0, "c": 100.0}
    names = sorted(values, reverse=rank.rank % 2 == 1)
    with rank.set_up_strategy() as strategy:
        outcome: Any
        try:
            got = strategy.reduce(
                {name: torch.tensor(values[name], device=strategy.root_device) for name in names}, "mean"
            )
            outcome = {name: float(got[name]) for name in sorted(got)}
        except Exception as error:
            outcome = type(error).__name__
        outcomes = rank.gather(outcome)
        right = all(one == values for one in outcomes) or all(isinstance(one, str) for one in outcomes)
        require(right, f"the ranks got {outcomes}, expected {values} or an error on each")


@check("STR-46", world_sizes=WORLD_SIZES, after=("STR-01", "STR-06", "STR-09"))
def strided_views(rank: RankContext) -> None:
    """``reduce`` and broadcast of a strided view are right, and touch nothing beside it.

    Why: gloo works on the wrong elements of a view, without a word.
    Fix: send a contiguous copy.
    """
    with rank.set_up_strategy() as strategy:
        base = torch.arange(12.0, device=strategy.root_device).reshape(3, 4) + 100 * rank.rank
        before = base.clone()
        view = base[:, ::2]
        first = torch.arange(12.0).reshape(3, 4)[:, ::2]
        close("the mean of a view", strategy.reduce(view, "mean"), first + 100 * (rank.size - 1) / 2, 1e-6)
        close("a view from the last rank", strategy.broadcast(view, rank.size - 1), first + 100 * (rank.size - 1), 1e-6)
        close("a view, gathered", strategy.all_gather(view)[0], first, 1e-6)
        rows = torch.arange(12.0).reshape(3, 4)[1:]
        close("the mean of the last rows", strategy.reduce(base[1:], "mean"), rows + 100 * (rank.size - 1) / 2, 1e-6)
        close("the last rows, gathered", strategy.all_gather(base[1:])[-1], rows + 100 * (rank.size - 1), 1e-6)
        same("the memory around the view", base, before)
