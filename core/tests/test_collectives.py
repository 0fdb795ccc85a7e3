"""Collectives between real processes: right where the backend alone is silently wrong, else an error on all ranks."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from unittest import mock

import hardware
import pytest
import torch
import torch.distributed as dist
from torch import nn
from world import joined as joined_ranks
from world import rank, size

from torchhal.distributed import collectives as impl
from torchhal.errors import CollectiveTimeoutError, DistributedError
from torchhal.strategies import SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    loss: torch.Tensor
    name: str


def equal(found, expected):
    """Same value, dtype and shape; strides may differ."""
    expected = torch.as_tensor(expected) if not isinstance(expected, torch.Tensor) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def everywhere(outcomes, error, *texts):
    """Every rank raised ``error``, with the same message, which holds ``texts``."""
    assert [outcome.error for outcome in outcomes] == [error] * len(outcomes), outcomes
    assert len({outcome.message for outcome in outcomes}) == 1, outcomes
    for text in texts:
        assert text in outcomes[0].message, outcomes[0].message


@contextlib.contextmanager
def joined():
    """A strategy between its set-up and its teardown; tensors that are made meanwhile lie on the rank's device."""
    with hardware.device(), joined_ranks() as strategy:
        yield strategy


# -- set-up --------------------------------------------------------------------------------------------------


def set_up_with_a_late_rank():
    made = dist.init_process_group

    def late(*args, **kwargs):
        made(*args, **kwargs)
        if rank() == 0:
            time.sleep(1)
        done.append(time.monotonic())

    done = []
    with mock.patch.object(dist, "init_process_group", late), joined():
        return done[0], time.monotonic()


def test_no_rank_goes_on_before_all_are_connected(world2):
    """It might fail, and would close connections that others still wait for."""
    connected, gone_on = zip(*world2.run(set_up_with_a_late_rank), strict=True)
    assert min(gone_on) >= max(connected)  # one clock for all processes


# -- reduce --------------------------------------------------------------------------------------------------


def reduce_ops():
    n = size()
    with joined() as strategy:
        value = torch.tensor([rank() + 1.0, -rank() - 1.0])
        ranks = torch.arange(1.0, n + 1)
        for op, expected in {
            "sum": ranks.sum(), "mean": ranks.mean(), "avg": ranks.mean(), "product": ranks.prod(),
        }.items():  # fmt: skip
            equal(strategy.reduce(value, op)[0], expected)
        equal(strategy.reduce(value, "max"), [float(n), -1.0])
        equal(strategy.reduce(value, "min"), [1.0, -float(n)])
        equal(strategy.reduce(value), strategy.reduce(value, "mean"))


@pytest.mark.slow
def test_reduce_ops(world):
    """Each op of reduce is supported on all ranks.

    Checks: STR-01.
    """
    world.run(reduce_ops)


def reduce_by_another_way():
    seen = []

    def all_reduce(tensor, op, group):
        seen.append(tuple(tensor.shape))
        dist.all_reduce(tensor, op, group=group)

    with joined() as strategy:
        value = {"a": torch.full((2,), rank() + 1.0), "b": 3}
        found = impl.reduce(value, "mean", device=strategy.root_device, all_reduce=all_reduce)
        equal(found["a"], torch.full((2,), (size() + 1) / 2))
    assert seen == [(2,)] and found["b"] == 3.0  # tensors only: a number never lay on the device


def test_a_device_may_bring_its_own_all_reduce(world2):
    world2.run(reduce_by_another_way)


def broadcast_by_another_way():
    sent = []

    def send(box, src):
        dist.broadcast_object_list(box, src=src)
        sent.append((type(box[0]), src))

    with joined() as strategy:
        value = {"a": torch.full((2,), rank() + 1.0), "b": f"rank {rank()}"}
        found = impl.broadcast_object(value, 1, device=strategy.root_device, send=send)
        equal(found["a"], [2.0, 2.0])
    assert sent == [(bytes, 1)] and found["b"] == "rank 1"


def test_a_strategy_may_bring_its_own_broadcast(world2):
    world2.run(broadcast_by_another_way)


def reduce_unknown_op():
    with joined() as strategy:
        strategy.reduce(torch.ones(1), "median")


def test_reduce_refuses_an_unknown_op(world2):
    """An unknown op of reduce is refused.

    Checks: STR-01.
    """
    everywhere(world2.outcomes(reduce_unknown_op), "ValueError", "'median'", "'mean'", "'max'")


def reduce_is_pure():
    with joined() as strategy:
        value = torch.full((3,), rank() + 1.0, requires_grad=True)
        nest = {"a": value, "b": [1, 2.5]}
        result = strategy.reduce(nest, "sum")
        equal(value.detach(), torch.full((3,), rank() + 1.0))
        assert nest["a"] is value and nest["b"] == [1, 2.5]
        assert result["a"].data_ptr() != value.data_ptr() and not result["a"].requires_grad
        # a value that is equal already must be a new tensor all the same
        result = strategy.reduce(value.detach() * 0, "mean")
        result += 1
        equal(value.detach(), torch.full((3,), rank() + 1.0))


def test_reduce_leaves_its_input_alone(world2):
    """A reduce leaves its input alone.

    Checks: STR-02.
    """
    world2.run(reduce_is_pure)


def reduce_dtypes():
    n, r = size(), rank()
    with joined() as strategy:
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
            equal(strategy.reduce(torch.tensor([100, r], dtype=dtype), "sum"), [100 * n, n * (n - 1) // 2])
            equal(strategy.reduce(torch.tensor([100, r], dtype=dtype), "mean"), [100.0, (n - 1) / 2])
            equal(strategy.reduce(torch.tensor([100, r], dtype=dtype), "max"), torch.tensor([100, n - 1], dtype=dtype))
        exact = 2**53 + 1  # a float64 would lose the last bit
        equal(strategy.reduce(torch.tensor(exact), "max"), exact)
        flag = torch.tensor([r == 0, True, False])
        equal(strategy.reduce(flag, "max"), [True, True, False])
        equal(strategy.reduce(flag, "min"), [False, True, False])
        equal(strategy.reduce(flag, "sum"), [1, n, 0])
        equal(strategy.reduce(flag, "mean"), [1 / n, 1.0, 0.0])
        equal(strategy.reduce(torch.tensor([1j, r + 0j]), "sum"), [n * 1j, n * (n - 1) / 2 + 0j])
        equal(strategy.reduce(torch.tensor(float(r)), "sum"), n * (n - 1) / 2)
        equal(strategy.reduce(torch.empty(0, 3), "sum"), torch.empty(0, 3))
        same = torch.full((2,), 60000.0, dtype=torch.float16)
        equal(strategy.reduce(same, "mean"), same)
        equal(strategy.reduce(same, "max"), same)
        # 257 has no bfloat16: one addition after the other would stay at 256
        ones = strategy.reduce(torch.tensor([256.0 if r == 0 else 1.0], dtype=torch.bfloat16), "sum")
        equal(ones, torch.tensor([256.0 + n - 1]).to(torch.bfloat16))


def test_reduce_dtypes(world):
    """A reduce takes tensors of each dtype.

    Checks: STR-03.
    """
    world.run(reduce_dtypes)


def reduce_numbers():
    n, r = size(), rank()
    with joined() as strategy:
        total = strategy.reduce(r + 1, "sum")
        assert total == n * (n + 1) // 2 and type(total) is int
        mean = strategy.reduce(r, "mean")
        assert mean == (n - 1) / 2 and type(mean) is float
        assert strategy.reduce(r + 0.5, "max") == n - 0.5
        assert strategy.reduce(2**62 + r, "max") == 2**62 + n - 1
        decision = strategy.reduce(r == 0, "max")
        assert decision is True and strategy.reduce(r == 0, "min") is False and strategy.reduce(r == 0, "sum") == 1
        for other in (None, "text", b"bytes", torch.nn.ReLU()):
            assert strategy.reduce(other, "sum") is other


def test_reduce_numbers_and_other_things(world):
    """A reduce takes numbers and leaves other things as they are.

    Checks: STR-03.
    """
    world.run(reduce_numbers)


def numbers_of_the_host():
    with joined() as strategy:
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        before = hardware.waits()
        assert strategy.reduce(rank() + 0.5, "max") == size() - 0.5
        assert strategy.reduce_boolean_decision(True)
        strategy.all_gather_object(1)
        strategy.barrier("here")
        assert hardware.waits() == before
        dist.all_reduce(parameter.grad)
        one = hardware.waits() - before
        impl.average_gradients([parameter])
        assert hardware.waits() - before == 2 * one


def test_what_the_hosts_know_waits_for_no_device(world2):
    """Averaging gradients waits as often as the one collective that it needs."""
    world2.run(numbers_of_the_host)


def reduce_nests():
    n, r = size(), rank()
    total = n * (n - 1) / 2
    one = torch.tensor(float(r))
    with joined() as strategy:
        nest = {"a": [one, {"b": (one + 1, None)}], "pair": Pair(one, "text"), "record": Record(one, "x")}
        result = strategy.reduce(nest, "sum")
        equal(result["a"][0], total)
        equal(result["a"][1]["b"][0], total + n)
        assert result["a"][1]["b"][1] is None and isinstance(result["a"][1]["b"], tuple)
        assert type(result["pair"]) is Pair and result["pair"].second == "text"
        equal(result["pair"].first, total)
        assert type(result["record"]) is Record and result["record"].name == "x"
        equal(result["record"].loss, total)
        ordered = strategy.reduce(OrderedDict(z=one, a=one), "sum")
        assert type(ordered) is OrderedDict and list(ordered) == ["z", "a"]
        assert strategy.reduce([], "sum") == [] and strategy.reduce({}, "sum") == {}


def test_reduce_nests(world2):
    """A reduce goes into nested containers.

    Checks: STR-03.
    """
    world2.run(reduce_nests)


def reduce_key_order():
    n, r = size(), rank()
    items = [("a", 1.0), ("b", 10.0), (3, 100.0), ("3", 1000.0)]
    with joined() as strategy:
        mine = {key: torch.tensor(value * (r + 1)) for key, value in (items if r % 2 else reversed(items))}
        result = strategy.reduce(mine, "sum")
        factor = n * (n + 1) / 2
        assert {key: value.item() for key, value in result.items()} == {key: value * factor for key, value in items}
        assert list(result) == list(mine)


def test_reduce_of_mappings_is_by_key(world):
    """A reduce of mappings goes by key, not by order.

    Checks: STR-45.
    """
    world.run(reduce_key_order)


def reduce_views():
    r = rank()
    with joined() as strategy:
        for view in (
            lambda x: x[:, ::2], lambda x: x[:, :2], lambda x: x[1:, 1], lambda x: x.t(), lambda x: x[::2].t(),
            lambda x: torch.as_strided(x, (3, 3), (1, 1)),
        ):  # fmt: skip
            whole = torch.arange(16.0).view(4, 4) + r
            before = whole.clone()
            result = strategy.reduce(view(whole), "sum")
            expected = sum(view(torch.arange(16.0).view(4, 4) + other) for other in range(size()))
            equal(result, expected)
            equal(whole, before)
        turned = torch.tensor([complex(r, r + 1)]).conj()  # the sign is a bit beside the memory
        equal(strategy.reduce(turned.imag, "sum"), [-size() * (size() + 1) / 2])
        equal(strategy.reduce(turned, "sum").imag, [-size() * (size() + 1) / 2])
        equal(strategy.all_gather(turned)[1], torch.tensor([1 - 2j]))
        equal(strategy.all_gather(turned.imag)[1], [-2.0])
        equal(strategy.broadcast(turned.imag, src=1), [-2.0])
        narrow = torch.full((1,), r + 1.0)
        equal(strategy.reduce(narrow.expand(1000), "sum"), torch.full((1000,), size() * (size() + 1) / 2))
        equal(narrow, [r + 1.0])


def test_reduce_of_strided_views(world):
    """A reduce of a strided view reduces the view's elements.

    Alone, gloo reduces other elements than the view's, and writes behind an expanded tensor.

    Checks: STR-46.
    """
    world.run(reduce_views)


def broadcast_views():
    r = rank()
    with joined() as strategy:
        whole = torch.arange(16.0).view(4, 4) * (r + 1)
        before = whole.clone()
        result = strategy.broadcast(whole[:, ::2], src=1)
        equal(result, torch.arange(16.0).view(4, 4)[:, ::2] * 2)
        equal(whole, before)
        equal(strategy.broadcast(torch.full((1,), r + 1.0).expand(1000), src=1), torch.full((1000,), 2.0))
        parameter = nn.Parameter((torch.arange(6.0).view(3, 2) * (r + 1)).t())  # dense, but not contiguous
        assert not parameter.is_contiguous()
        view = torch.zeros(4, 4)[:, ::2]
        view += r
        impl.broadcast_tensors([parameter.data, view], src=1)
        equal(parameter.data, torch.arange(6.0).view(3, 2).t() * 2)
        assert not parameter.is_contiguous()
        equal(view, torch.ones(4, 2))


def test_broadcast_of_strided_views(world):
    """A broadcast of a strided view sends the view's elements.

    Checks: STR-46.
    """
    world.run(broadcast_views)


def reduce_mismatch(kind):
    r = rank()
    values = {
        "dtype": torch.ones(4, dtype=torch.float32 if r else torch.int32),
        "shape": torch.ones(4 if r else 3),
        "keys": {"a": 1.0, ("b" if r else "c"): 2.0},
        "length": [1.0] * (2 + r),
        "type": 1.0 if r else 1,
        "none": None if r else torch.ones(1),
        "layout": torch.ones(2, 2).to_sparse() if r else torch.ones(2, 2),
        "width": 2**70 if r else 1,
    }
    with joined() as strategy:
        try:
            strategy.reduce(values[kind], "sum")
        except DistributedError as error:
            # the ranks are still in step: the next collective is right
            assert strategy.reduce(1, "sum") == size()
            raise error from None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dtype", "shape", "keys", "length", "type", "none", "layout", "width"])
def test_reduce_of_different_things_fails_on_all_ranks(world2, kind):
    """A reduce of different things fails on all ranks.

    Alone, gloo returns garbage, or one rank fails and the other gets a number.

    Checks: STR-03, STR-45.
    """
    outcomes = world2.outcomes(reduce_mismatch, kind)
    everywhere(outcomes, "DistributedError", "rank 0", "rank 1")
    for texts in {"dtype": ("int32", "float32"), "shape": ("(3,)", "(4,)"), "keys": ("'b'", "'c'")}.get(kind, ()):
        assert texts in outcomes[0].message


def different_calls(kind):
    with joined() as strategy:
        if rank() == 0:
            strategy.reduce(1.0, "sum")
        elif kind == "op":
            strategy.reduce(1.0, "max")
        elif kind == "gather":
            strategy.all_gather(torch.ones(1))
        else:
            strategy.broadcast(1.0)


@pytest.mark.parametrize("kind", ["op", "gather", "broadcast"])
def test_different_collectives_fail_on_all_ranks(world3, kind):
    """Alone, they wait for each other until the timeout, or mix their numbers."""
    everywhere(world3.outcomes(different_calls, kind), "DistributedError", "reduce(op='sum')")


def reduce_refuses_sparse():
    with joined() as strategy:
        strategy.reduce({"x": torch.eye(2, device="cpu").to_sparse()}, "sum")


def test_reduce_refuses_sparse_tensors(world2):
    everywhere(world2.outcomes(reduce_refuses_sparse), "TypeError", "value['x']", "to_dense")


def in_groups():
    r = rank()
    with joined() as strategy:
        first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
        if r in (0, 1):
            equal(strategy.reduce(torch.tensor(r + 1.0), "sum", group=first), 3.0)
            equal(strategy.reduce(torch.tensor(r + 1.0), "mean", group=first), 1.5)
        if r in (1, 2):
            equal(strategy.reduce(torch.tensor(r + 1.0), "sum", group=last), 5.0)
            equal(strategy.all_gather(torch.tensor(r), group=last), [1, 2])
            leaf = torch.tensor([float(r)], requires_grad=True)
            gathered = strategy.all_gather(leaf, group=last, sync_grads=True)
            equal(gathered.detach(), [[1.0], [2.0]])
            (gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
            equal(leaf.grad, [2.0] if r == 1 else [20.0])


def test_groups(world3):
    """Collectives take a group.

    Checks: STR-04.
    """
    world3.run(in_groups)


def decisions():
    r = rank()
    with joined() as strategy:
        answers = []
        for votes in ([True] * 3, [False] * 3, [True, False, False], [False, True, True]):
            answers.append(
                (strategy.reduce_boolean_decision(votes[r]), strategy.reduce_boolean_decision(votes[r], all=False))
            )
        return answers  # fmt: skip


def test_boolean_decisions(world):
    """A boolean decision is the same on all ranks.

    Checks: STR-05.
    """
    expected = [(True, True), (False, False), (False, True), (False, True)]
    assert world.run(decisions) == [expected] * world.size


# -- broadcast -----------------------------------------------------------------------------------------------


def broadcasts():
    r = rank()
    with joined() as strategy:
        for src in range(size()):
            mine = {
                "tensor": torch.full((2, 2), float(r)),
                "list": [r, None, ("x", r)],
                "pair": Pair(torch.tensor(r), r),
            }
            result = strategy.broadcast(mine, src=src)
            equal(result["tensor"], torch.full((2, 2), float(src)))
            assert result["list"] == [src, None, ("x", src)]
            assert type(result["pair"]) is Pair and result["pair"].second == src
            assert strategy.broadcast(None if r == src else "other", src=src) is None
            assert strategy.broadcast(f"rank {r}", src) == f"rank {src}"
            equal(strategy.broadcast(torch.tensor(r), src), src)
            with torch.device("cpu"):  # not every device has sparse tensors
                equal(strategy.broadcast(torch.eye(3).to_sparse() * r, src).to_dense(), torch.eye(3) * src)
        assert strategy.broadcast(r) == 0
        big = torch.arange(700_000) + r  # 5.6 MB
        equal(strategy.broadcast(big, src=1), torch.arange(700_000) + 1)
        text = strategy.broadcast("x" * 3_000_000 if r == 1 else "", src=1)
        assert text == "x" * 3_000_000
        view = torch.zeros(1_000_000)[:1]  # its storage must not travel along
        assert impl._pickled(impl._Shipped(view))[0].__len__() < 10_000
        leaf = torch.ones(2, requires_grad=True)
        assert strategy.broadcast(leaf * 2, src=0).tolist() == [2.0, 2.0]


def test_broadcast(world):
    """A broadcast sends the objects of the source rank.

    Checks: STR-06, STR-07.
    """
    world.run(broadcasts, timeout=60)


def broadcast_wrongly(kind):
    with joined() as strategy:
        if kind == "ranks disagree":
            strategy.broadcast(rank(), src=rank())
        else:
            strategy.broadcast(1, src={"range": size(), "negative": -1, "bool": True, "float": 1.0}[kind])


@pytest.mark.parametrize("kind", ["range", "negative", "bool", "float", "ranks disagree"])
def test_broadcast_refuses_a_wrong_src(world2, kind):
    outcomes = world2.outcomes(broadcast_wrongly, kind)
    if kind == "ranks disagree":
        everywhere(outcomes, "DistributedError", "rank 0: src=0", "rank 1: src=1")
    else:
        everywhere(outcomes, "ValueError", "'src'", "0 to 1")


def unpicklable(call):
    with joined() as strategy:
        value = (lambda: 1) if rank() == 0 else 1
        try:
            strategy.broadcast(value) if call == "broadcast" else strategy.all_gather_object(value)
        except (TypeError, DistributedError) as error:
            assert strategy.reduce(1, "sum") == size()
            raise error from None


@pytest.mark.parametrize("call", ["broadcast", "all_gather_object"])
def test_what_cannot_be_pickled_fails_on_all_ranks(world3, call):
    """Alone, the rank that can't send fails and the others wait for it."""
    first, *others = world3.outcomes(unpicklable, call)
    assert first.error == "TypeError" and "picklable" in first.message, first
    for other in others:
        assert other.error == "DistributedError" and "rank 0 could not send" in other.message, other


# -- barrier -------------------------------------------------------------------------------------------------


def barriers():
    with joined() as strategy:
        strategy.barrier("together")
        start = time.monotonic()
        if rank() == size() - 1:
            time.sleep(1.0)
        strategy.barrier("late")
        return time.monotonic() - start


def test_barrier_waits_for_the_last_rank(world):
    """A barrier waits for the last rank.

    Checks: STR-08.
    """
    assert min(world.run(barriers)) > 0.9


def missing_from_a_barrier():
    from datetime import timedelta

    with joined() as strategy:
        strategy.timeout = timedelta(seconds=1.5)
        if rank() == 1:
            time.sleep(3.5)
            return
        try:
            strategy.barrier("checkpoint")
        except CollectiveTimeoutError as error:
            assert error.missing == (1,) and error.name == "checkpoint"
            raise


@pytest.mark.slow
def test_a_barrier_names_the_missing_rank(world3):
    outcomes = world3.outcomes(missing_from_a_barrier)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "CollectiveTimeoutError", outcome
        assert "'checkpoint'" in outcome.message and "rank 1" in outcome.message
    assert outcomes[1].error == ""


# -- all_gather ----------------------------------------------------------------------------------------------


def gathers():
    n, r = size(), rank()
    with joined() as strategy:
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float64,
            torch.int16,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ):
            result = strategy.all_gather(torch.tensor([r, 1], dtype=dtype))
            equal(result, torch.stack([torch.tensor([other, 1], dtype=dtype) for other in range(n)]))
        assert strategy.all_gather(torch.tensor(r)).tolist() == list(range(n))  # 0-dim: shape (world,)
        assert strategy.all_gather(torch.empty(0, 3)).shape == (n, 0, 3)
        mine = torch.arange(16.0).view(4, 4) * (r + 1)
        for view in (lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[0, 0].expand(5)):
            equal(
                strategy.all_gather(view(mine)),
                torch.stack([view(torch.arange(16.0).view(4, 4) * (o + 1)) for o in range(n)]),
            )
        result = strategy.all_gather(mine)
        result.zero_()
        equal(mine, torch.arange(16.0).view(4, 4) * (r + 1))
        assert not strategy.all_gather(torch.ones(2, requires_grad=True)).requires_grad
        assert strategy.all_gather_object({"rank": r}) == [{"rank": other} for other in range(n)]


def test_all_gather(world):
    """An all_gather stacks the values in rank order.

    Checks: STR-09.
    """
    world.run(gathers)


def gather_gradients():
    """Each rank's loss weighs what all ranks gave; the gradient is that of the sum of the losses in one process."""
    n, r = size(), rank()
    for shape, combine in (
        ((2, 3), lambda t: t.reshape(-1)),
        ((2, 3, 4, 5), lambda t: torch.cat(list(t), dim=2)),  # where torch's own backward is wrong
        ((2, 3, 4, 5), lambda t: t.permute(4, 2, 0, 3, 1)),
        ((2, 3), lambda t: t.sum(0).expand(7, 2, 3)),
        ((), lambda t: t),
    ):
        inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(other)) for other in range(n)]
        shaped = combine(torch.stack(inputs))
        weights = [
            torch.randn(shaped.shape, generator=torch.Generator().manual_seed(100 + other)) for other in range(n)
        ]
        # the reference: one process, all losses
        leaves = [value.clone().requires_grad_() for value in inputs]
        sum((combine(torch.stack(leaves)) ** 2 * weight).sum() for weight in weights).backward()
        with joined() as strategy:
            mine, weight, expected = (part.to(strategy.root_device) for part in (inputs[r], weights[r], leaves[r].grad))
            leaf = mine.clone().requires_grad_()
            gathered = strategy.all_gather(leaf, sync_grads=True)
            (combine(gathered) ** 2 * weight).sum().backward()
            torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-5)
            view = torch.stack([mine, mine], dim=-1).requires_grad_()
            (combine(strategy.all_gather(view[..., 0], sync_grads=True)) ** 2 * weight).sum().backward()
            torch.testing.assert_close(view.grad[..., 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_all_gather_with_gradients(world):
    """An all_gather passes gradients back.

    Also for incoming gradients that are not contiguous.

    Checks: STR-10.
    """
    world.run(gather_gradients)


def uneven_gather(kind):
    r = rank()
    values = {
        "shape": torch.ones(2 + r), "dtype": torch.ones(2, dtype=torch.float64 if r else torch.float32),
        "dim": torch.ones(2) if r else torch.ones(2, 1), "none": None if r else torch.ones(2),
    }  # fmt: skip
    with joined() as strategy:
        try:
            strategy.all_gather(values[kind], sync_grads=kind == "dim")
        except DistributedError as error:
            assert strategy.reduce(1, "sum") == size()
            raise error from None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "dtype", "dim", "none"])
def test_uneven_all_gather_fails_on_all_ranks(world, kind):
    """An all_gather of different shapes fails on all ranks.

    Checks: STR-11.
    """
    everywhere(world.outcomes(uneven_gather, kind), "DistributedError", "rank 0", "rank 1")


def gather_no_tensor():
    with joined() as strategy:
        strategy.all_gather(1.0)


def test_all_gather_refuses_what_is_no_tensor(world2):
    everywhere(world2.outcomes(gather_no_tensor), "TypeError", "all_gather_object")


# -- weights and gradients -----------------------------------------------------------------------------------


def broadcast_lists():
    r = rank()
    with joined() as strategy:
        torch.manual_seed(r)
        tensors = [
            torch.randn(5),
            torch.randn(()),
            torch.randn(3, 7).t(),
            torch.tensor([r, r + 1], dtype=torch.int16),
            torch.tensor([bool(r), False, True]), torch.randn(3).to(torch.bfloat16),
            torch.randn(2, dtype=torch.float64),
            torch.empty(0), torch.randn(2, dtype=torch.complex64), torch.randn(4, 1).expand(4, 1),
        ]  # fmt: skip
        torch.manual_seed(0)
        expected = [
            torch.randn(5), torch.randn(()), torch.randn(3, 7).t(), torch.tensor([0, 1], dtype=torch.int16),
            torch.tensor([False, False, True]), torch.randn(3).to(torch.bfloat16), torch.randn(2, dtype=torch.float64),
            torch.empty(0), torch.randn(2, dtype=torch.complex64), torch.randn(4, 1),
        ]  # fmt: skip
        versions = [tensor.data_ptr() for tensor in tensors]
        impl._BUCKET_BYTES = 64  # several messages
        strategy.barrier("start")
        impl.broadcast_tensors(tensors)
        for found, value in zip(tensors, expected, strict=True):
            equal(found, value)
        assert [tensor.data_ptr() for tensor in tensors] == versions


def test_broadcast_of_weights(world):
    world.run(broadcast_lists)


def averaging():
    n, r = size(), rank()
    with joined():
        dense, unused, some, frozen = (nn.Parameter(torch.zeros(4, 4)) for _ in range(4))
        frozen.requires_grad_(False)
        strided = nn.Parameter(torch.zeros(4, 4).t())
        half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        dense.grad = torch.full((4, 4), r + 1.0)
        frozen.grad = torch.full((4, 4), r + 1.0)  # of a backward before it was frozen
        if r == 0:
            some.grad = torch.full((4, 4), float(n))
        strided.grad = (torch.arange(16.0).view(4, 4) * (r + 1)).t()
        half.grad = torch.full((3,), r + 1.0, dtype=torch.bfloat16)
        steep = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        steep.grad = torch.full((3,), 60000.0, dtype=torch.float16)  # the sum of two is none
        impl.average_gradients([dense, unused, some, frozen, strided, half, steep])
        equal(steep.grad, torch.full((3,), 60000.0, dtype=torch.float16))
        equal(frozen.grad, torch.full((4, 4), r + 1.0))
        impl.average_gradients([frozen], frozen=True)
        mean = (n + 1) / 2
        equal(dense.grad, torch.full((4, 4), mean))
        equal(frozen.grad, dense.grad)
        assert unused.grad is None
        equal(some.grad, torch.ones(4, 4))
        equal(strided.grad, torch.arange(16.0).view(4, 4).t() * mean)
        equal(half.grad, torch.full((3,), mean, dtype=torch.bfloat16))
        impl.average_gradients([])


def averaging_of_sparse():
    n, r = size(), rank()
    with joined():
        dense = nn.Parameter(torch.zeros(4, 4))
        table, mixed, late = (nn.Parameter(torch.zeros(4, 2)) for _ in range(3))
        dense.grad = torch.full((4, 4), r + 1.0)
        rows = torch.sparse_coo_tensor(torch.tensor([[r, 3, 3]]), torch.ones(3, 2), (4, 2))  # row 3 twice
        table.grad = rows
        mixed.grad = rows if r else torch.ones(4, 2)
        if r == 1:
            late.grad = rows
        steep = nn.Parameter(torch.zeros(4, 2, dtype=torch.float16))
        steep.grad = torch.sparse_coo_tensor([[1]], torch.full((1, 2), 60000.0, dtype=torch.float16), (4, 2))
        impl.average_gradients([dense, table, mixed, late, steep])
        equal(steep.grad.to_dense()[1], torch.full((2,), 60000.0, dtype=torch.float16))
        equal(dense.grad, torch.full((4, 4), (n + 1) / 2))
        everyone = torch.zeros(4, 2)
        everyone[:n] = 1 / n
        everyone[3] += 2.0
        assert table.grad.is_sparse
        torch.testing.assert_close(table.grad.to_dense(), everyone)
        assert not mixed.grad.is_sparse
        first = torch.zeros(4, 2)
        first[0], first[3] = 1.0, 2.0
        torch.testing.assert_close(mixed.grad, everyone + (torch.ones(4, 2) - first) / n)
        assert late.grad.is_sparse
        only = torch.zeros(4, 2)
        only[1], only[3] = 1 / n, 2 / n
        torch.testing.assert_close(late.grad.to_dense(), only)


def test_averaging_of_gradients(world):
    """Gradients are averaged over the ranks.

    Checks: STR-14, STR-19.
    """
    world.run(averaging)


@pytest.mark.one_accelerator  # others may have no sparse tensors
def test_averaging_of_sparse_gradients(world):
    """Sparse gradients are averaged over the ranks.

    Checks: STR-14, STR-19.
    """
    world.run(averaging_of_sparse)


# -- a world of one ------------------------------------------------------------------------------------------


def test_one_process_answers_like_many(world2):
    """Collectives of one process return the types and shapes of many.

    The same types and shapes on one device as on several.

    Checks: STR-02, STR-09.
    """
    alone, many = collective_types(), world2.run(collective_types_joined)
    assert many == [alone, alone]


def collective_types():
    strategy = SingleDeviceStrategy()
    strategy.devices = [hardware.device()]
    return types_of(strategy)


def collective_types_joined():
    with joined() as strategy:
        return types_of(strategy)


def types_of(strategy):
    def kind(value):
        return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__

    found = []
    for op in ("mean", "sum", "max", "product"):
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64):
            value = torch.ones(2, dtype=dtype)
            result = strategy.reduce(value, op)
            found.append((op, str(dtype), kind(result), result is value))
        for number in (True, 2, 2.0, None, "x"):
            found.append((op, type(number).__name__, kind(strategy.reduce(number, op))))
    found.append(list(strategy.all_gather(torch.ones(3)).shape[1:]))
    return found


def test_one_process_checks_like_many():
    strategy = SingleDeviceStrategy()
    strategy.devices = [hardware.device()]
    with pytest.raises(ValueError, match=r"'op' must be one of .* \(got 'median'\)"):
        strategy.reduce(1, "median")
    with pytest.raises(ValueError, match="'src'"):
        strategy.broadcast(1, src=1)
    with pytest.raises(ValueError, match="'src'"):
        strategy.broadcast(1, src=False)
    with pytest.raises(TypeError, match="'tensor'"):
        strategy.all_gather(1.0)
    assert strategy.all_gather(torch.ones(2, 3)).shape == (1, 2, 3)
    leaf = torch.ones(2, requires_grad=True)
    strategy.all_gather(leaf, sync_grads=True).sum().backward()
    equal(leaf.grad, [1.0, 1.0])
    assert strategy.all_gather_object("x") == ["x"]
    assert (
        strategy.reduce_boolean_decision(True) is True and strategy.reduce_boolean_decision(False, all=False) is False
    )
