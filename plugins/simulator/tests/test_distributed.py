"""Two processes on simulated devices: every collective, and what torch builds on them.

Each check runs on both ranks of a world that stays, in one process group per flavour.
"""

import copy
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from joining import joined, new_world, on_device
from limits import scaled
from torch import nn
from world import rank

from torchhal_simulator import simulate
from torchhal_simulator._device_types import FLAVOURS

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_on_two_ranks(world, flavour, function):
    world.run(function, flavour, timeout=90)


def values(device, dtype=torch.float32):
    """[1, 2, 3] and [4, 5, 7] on the two ranks."""
    return torch.tensor([1, 2, 3] if rank() == 0 else [4, 5, 7], dtype=dtype, device=device)


def same(actual, expected, device, dtype=None):
    """Assert where a result is and what it holds."""
    assert actual.device == device
    expected = torch.as_tensor(expected, dtype=dtype or actual.dtype)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def raises(kind, words):
    return pytest.raises(kind, match=words)


# -- collectives ---------------------------------------------------------------------------------------------


@check
def all_reduce(flavour):
    device = joined(flavour)
    expected = {
        dist.ReduceOp.SUM: [5, 7, 10],
        dist.ReduceOp.AVG: [2.5, 3.5, 5],
        dist.ReduceOp.MAX: [4, 5, 7],
        dist.ReduceOp.MIN: [1, 2, 3],
        dist.ReduceOp.PRODUCT: [4, 10, 21],
    }
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for op, result in expected.items():
            tensor = values(device, dtype)
            assert dist.all_reduce(tensor, op) is None
            same(tensor, torch.tensor(result).to(dtype), device)  # the mean of whole numbers is cut off
    number = torch.tensor(rank() + 1.0, device=device)
    dist.all_reduce(number)
    same(number, 3.0, device)
    dist.all_reduce(torch.empty(0, device=device))
    flags = torch.tensor([rank() == 0, False], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    same(flags, [True, False], device)


@check
def refused_tensors(flavour):
    device = joined(flavour)
    with raises(RuntimeError, "No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    with raises(RuntimeError, "No backend type associated with device type cpu"):
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2, device=device))
    square = torch.ones(4, 4, device=device)
    for tensor in (square[:, ::2], square[:, :2], torch.arange(12.0, device=device).view(3, 4).t()):
        with raises(ValueError, "Tensors must be contiguous"):
            dist.all_reduce(tensor)
        with raises(ValueError, "Tensors must be contiguous"):
            dist.broadcast(tensor, 0)
    with raises(ValueError, "Tensors must be contiguous"):
        dist.all_gather_into_tensor(torch.empty(16, device=device), square[:, ::2])
    same(square, torch.ones(4, 4), device)


@check
def layouts(flavour):
    """Memory that begins within a storage, or lies channels last, is reduced where it is."""
    device = joined(flavour)
    whole = torch.zeros(4, 3, device=device)
    whole[1:3] += rank() + 1
    dist.all_reduce(whole[1:3])
    same(whole, [[0] * 3, [3] * 3, [3] * 3, [0] * 3], device)
    image = torch.arange(48.0).view(2, 2, 3, 4).to(device, memory_format=torch.channels_last) * (rank() + 1)
    dist.all_reduce(image)
    assert image.is_contiguous(memory_format=torch.channels_last)
    same(image, torch.arange(48.0).view(2, 2, 3, 4) * 3, device)


@check
def all_gather(flavour):
    device = joined(flavour)
    parts = [torch.zeros(3, device=device) for _ in range(2)]
    dist.all_gather(parts, values(device))
    same(parts[0], [1, 2, 3], device)
    same(parts[1], [4, 5, 7], device)
    for shape in ((6,), (2, 3)):
        gathered = torch.zeros(shape, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(gathered, values(device, torch.int64))
        same(gathered, torch.tensor([1, 2, 3, 4, 5, 7]).view(shape), device)
    inplace = torch.zeros(2, 3, device=device)
    inplace[rank()] = values(device)
    dist.all_gather_into_tensor(inplace, inplace[rank()])  # as FSDP does
    same(inplace, [[1, 2, 3], [4, 5, 7]], device)


@check
def reduce_scatter(flavour):
    device = joined(flavour)
    inputs = [torch.full((2,), 10.0 * (rank() + 1) + part, device=device) for part in range(2)]
    for op, expected in ((dist.ReduceOp.SUM, 30 + 2 * rank()), (dist.ReduceOp.AVG, 15 + rank())):
        part = torch.zeros(2, device=device)
        dist.reduce_scatter(part, inputs, op)
        same(part, [expected] * 2, device)
        part = torch.zeros(2, device=device)
        dist.reduce_scatter_tensor(part, torch.cat(inputs), op)
        same(part, [expected] * 2, device)


@check
def rooted(flavour):
    """broadcast, scatter, gather and reduce, from and to either rank."""
    device = joined(flavour)
    for root in range(2):
        tensor = values(device)
        dist.broadcast(tensor, root)
        same(tensor, [[1, 2, 3], [4, 5, 7]][root], device)

        mine = torch.zeros(2, device=device)
        dist.scatter(
            mine, [torch.full((2,), 5.0 + i, device=device) for i in range(2)] if rank() == root else None, root
        )
        same(mine, [5 + rank()] * 2, device)

        parts = [torch.zeros(3, device=device) for _ in range(2)] if rank() == root else None
        dist.gather(values(device), parts, root)
        if parts is not None:
            same(torch.stack(parts), [[1, 2, 3], [4, 5, 7]], device)

        tensor = values(device)
        dist.reduce(tensor, root, dist.ReduceOp.AVG)
        if rank() == root:
            same(tensor, [2.5, 3.5, 5], device)
        else:
            same(tensor, [[1, 2, 3], [4, 5, 7]][rank()], device)


@check
def all_to_all(flavour):
    device = joined(flavour)
    received = torch.zeros(4, 2, device=device)
    dist.all_to_all_single(received, torch.arange(8.0, device=device).view(4, 2) + 10 * rank())
    rows = torch.arange(8.0).view(4, 2)[2 * rank() : 2 * rank() + 2]
    same(received, torch.cat([rows, rows + 10]), device)

    give = [1, 3] if rank() == 0 else [2, 1]  # rows for each
    take = [1, 2] if rank() == 0 else [3, 1]
    received = torch.zeros(sum(take), 2, device=device)
    dist.all_to_all_single(received, torch.full((sum(give), 2), rank() + 1.0, device=device), take, give)
    same(received, [[1.0, 1.0]] * take[0] + [[2.0, 2.0]] * take[1], device)

    sizes = [[1, 2], [3, 4]]  # from, to
    inputs = [torch.full((sizes[rank()][to],), 10.0 * rank() + to, device=device) for to in range(2)]
    outputs = [torch.zeros(sizes[source][rank()], device=device) for source in range(2)]
    work = dist.all_to_all(outputs, inputs, async_op=True)
    same(outputs[1], [0.0] * sizes[1][rank()], device)
    work.wait()
    for source in range(2):
        same(outputs[source], [10.0 * source + rank()] * sizes[source][rank()], device)


@check
def point_to_point(flavour):
    device = joined(flavour)
    peer = 1 - rank()
    tensor = values(device) if rank() == 0 else torch.zeros(3, device=device)
    if rank() == 0:
        dist.send(tensor, 1, tag=3)
        dist.isend(tensor * 2, 1).wait()
        dist.isend(tensor * 3, 1).wait()
    else:
        assert dist.recv(tensor, 0, tag=3) == 0
        same(tensor, [1, 2, 3], device)
        work = dist.irecv(tensor, 0)
        time.sleep(0.2)
        same(tensor, [1, 2, 3], device)
        work.wait()
        same(tensor, [2, 4, 6], device)
        assert dist.recv(tensor) == 0  # from anyone
        same(tensor, [3, 6, 9], device)

    received = torch.zeros(3, device=device)
    operations = [dist.P2POp(dist.isend, values(device), peer), dist.P2POp(dist.irecv, received, peer)]
    works = dist.batch_isend_irecv(operations)
    same(received, [0, 0, 0], device)
    for work in works:
        work.wait()
    same(received, [[1, 2, 3], [4, 5, 7]][peer], device)
    assert all(work.is_completed() for work in works)


@check
def barriers(flavour):
    joined(flavour)
    start = time.monotonic()
    if rank() == 1:
        time.sleep(0.5)
    dist.barrier()
    assert rank() == 1 or time.monotonic() - start > 0.4
    dist.barrier(async_op=True).wait()
    with raises(ValueError, "only implemented for GLOO"):  # as torch says for NCCL
        dist.monitored_barrier()
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    dist.destroy_process_group(gloo)


@check
def objects(flavour):
    joined(flavour)
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank(), "text": "x" * 1000 * rank()})
    assert gathered == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]
    box = [("a", 1), None] if rank() == 0 else [None, None]
    dist.broadcast_object_list(box, 0)
    assert box == [("a", 1), None]
    mine = [None]
    dist.scatter_object_list(mine, ["for 0", "for 1"] if rank() == 1 else None, 1)
    assert mine == [f"for {rank()}"]
    gathered = [None, None] if rank() == 0 else None
    dist.gather_object(rank() * 10, gathered)
    assert gathered == ([0, 10] if rank() == 0 else None)
    if rank() == 0:
        dist.send_object_list(["hello", 3], 1)
    else:
        box = [None, None]
        dist.recv_object_list(box, 0)
        assert box == ["hello", 3]


def cpu(tensors):
    return [tensor.cpu() for tensor in tensors]


# each of (two rows, a row, two rows)
COLLECTIVES = {
    "all_reduce": lambda out, row, rows: dist.all_reduce(row, async_op=True),
    "all_gather": lambda out, row, rows: dist.all_gather([*out], row, async_op=True),
    "all_gather_into_tensor": lambda out, row, rows: dist.all_gather_into_tensor(out, row, async_op=True),
    "reduce_scatter": lambda out, row, rows: dist.reduce_scatter(row, [*rows], async_op=True),
    "reduce_scatter_tensor": lambda out, row, rows: dist.reduce_scatter_tensor(row, rows, async_op=True),
    "all_to_all": lambda out, row, rows: dist.all_to_all([*out], [*rows], async_op=True),
    "all_to_all_single": lambda out, row, rows: dist.all_to_all_single(out, rows, async_op=True),
    "broadcast": lambda out, row, rows: dist.broadcast(row, 1, async_op=True),
    "reduce": lambda out, row, rows: dist.reduce(row, 0, async_op=True),
    "scatter": lambda out, row, rows: dist.scatter(row, [*(rows + 3)] if rank() == 1 else None, 1, async_op=True),
    "gather": lambda out, row, rows: dist.gather(row, [*out] if rank() == 0 else None, 0, async_op=True),
}


@check
def results_come_at_wait(flavour):
    """Of every collective, and it completes by itself, and its future delivers too."""
    device = joined(flavour)
    for collect in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        works = []
        for name, call in COLLECTIVES.items():
            out = torch.full((2, 4), -1.0, device=device)
            row = torch.full((4,), rank() + 1.0, device=device)
            before = out.cpu(), row.cpu()
            works.append((name, call(out, row, torch.stack([row, row])), (out, row), before))
        deadline = time.monotonic() + scaled(30)
        while not all(work.is_completed() for _, work, _, _ in works) and time.monotonic() < deadline:
            time.sleep(0.01)
        for name, work, watched, before in works:
            assert work.is_completed(), f"{name} does not complete"
            assert all(map(torch.equal, cpu(watched), before)), f"{name} delivered before wait()"
            collect(work)
            receives = rank() == 0 or name not in ("broadcast", "reduce", "gather")
            assert all(map(torch.equal, cpu(watched), before)) != receives, f"{name} has not delivered after wait()"
            work.wait()  # again: nothing

    tensor = torch.ones(1, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    tensor += 10  # lost: the result overwrites it
    work.wait()
    same(tensor, [2.0], device)


@check
def futures(flavour):
    device = joined(flavour)
    tensor = values(device)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    same(doubled.wait(), [11, 15, 21], device)
    same(future.wait()[0], [5, 7, 10], device)
    same(tensor, [5, 7, 10], device)

    out = torch.zeros(2, 3, device=device)
    futures = [
        dist.all_gather_into_tensor(out, values(device), async_op=True).get_future(),
        dist.barrier(async_op=True).get_future(),
    ]
    torch.futures.wait_all(futures)
    same(out, [[1, 2, 3], [4, 5, 7]], device)
    (result,) = torch.futures.collect_all(futures[:1]).wait()[0].value()
    same(result, [[1, 2, 3], [4, 5, 7]], device)


@check
def futures_of_sends(flavour):
    """gloo has none, which is said as often as it is asked."""
    device = joined(flavour)
    tensor = values(device)
    work = dist.isend(tensor, 1) if rank() == 0 else dist.irecv(tensor, 0)
    for _ in range(2):
        with raises(RuntimeError, "getFuture"):
            work.get_future()
    work.wait()
    same(tensor, [1, 2, 3], device)


@check
def futures_of_coalesced(flavour):
    device = joined(flavour)
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    tensors = [values(device), values(device) * 2]
    backend._start_coalescing()
    for tensor in tensors:
        backend.allreduce([tensor], dist.AllreduceOptions())
    work = backend._end_coalescing()
    future = work.get_future()
    first, second = future.wait()
    same(first, [5, 7, 10], device)
    same(second, [10, 14, 20], device)
    same(tensors[1], [10, 14, 20], device)
    assert work.get_future().done()
    backend._start_coalescing()
    assert backend._end_coalescing().get_future().wait() == []


@check
def delivery_that_fails_is_tried_again(flavour):
    """A buffer that was freed before the wait, as a parameter of FSDP may be, is named; the mean is taken once."""
    device = joined(flavour)
    tensors = [values(device), values(device)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    work = dist.distributed_c10d._get_default_group().allreduce_coalesced(tensors, options)
    storage = tensors[1].untyped_storage()
    storage.resize_(0)
    for _ in range(2):
        with raises(RuntimeError, "freed or shrunk to 0 bytes"):
            work.wait()
    storage.resize_(12)
    work.wait()
    for tensor in tensors:
        same(tensor, [2.5, 3.5, 5], device)


@check
def an_abort_ends_what_is_late(flavour):
    device = joined(flavour)
    group = dist.new_group()
    dist.barrier(group)
    with simulate(collective="slow=60"):
        works = [dist.all_reduce(values(device), group=group, async_op=True) for _ in range(2)]
        future = works[0].get_future()
        backend = group._get_backend(device)
        start = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(works[1].wait)
            time.sleep(0.5)
            backend.abort()
            for end in (future.wait, waiting.result):
                with raises(dist.DistBackendError, "aborted with its process group"):
                    end()
        assert time.monotonic() - start < scaled(30)
    dist.destroy_process_group(group)
    dist.barrier()


LATE_AT_EXIT = """
import os, torch, torch.distributed as dist, torchhal_simulator
torchhal_simulator.load({flavour!r})
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
futures = [dist.all_reduce(torch.ones(1, device={flavour!r}), async_op=True).get_future() for _ in range(3)]
late = [future.add_done_callback(lambda future: os.write(1, b"called ")) for future in futures]
os.write(1, b"end ")
"""


def test_what_is_late_ends_with_python(flavour):
    """No thread outlives the interpreter, and none is waited for until it is due."""
    environ = {**os.environ, "TORCHHAL_SIM_COLLECTIVE": "slow=60"}
    code = LATE_AT_EXIT.format(flavour=flavour, backend=FLAVOURS[flavour].backend)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *called = done.stdout.split()
    # a callback that gloo had not begun when Python ended is never called: it would want Python's lock
    assert first == "end" and len(called) <= 3 and set(called) <= {"called"}


@check
def groups(flavour):
    device = joined(flavour)
    backend = FLAVOURS[flavour].backend
    assert dist.get_backend() == backend
    default = dist.distributed_c10d._get_default_group()
    assert type(default) is dist.ProcessGroup
    assert default._get_backend(device).name() == backend
    both, alone, turned = dist.new_group([0, 1]), dist.new_group([1]), dist.new_group([1, 0], sort_ranks=False)
    tensor = values(device)
    dist.all_reduce(tensor, group=both)
    same(tensor, [5, 7, 10], device)
    tensor = values(device)
    if rank() == 1:
        dist.all_reduce(tensor, group=alone)
        same(tensor, [4, 5, 7], device)
    assert dist.get_group_rank(turned, 0) == 1
    gathered = torch.zeros(2, 3, device=device)
    dist.all_gather_into_tensor(gathered, tensor, group=turned)
    same(gathered, [[4, 5, 7], [1, 2, 3]], device)
    mine, _ = dist.new_subgroups(group_size=1)
    tensor = values(device)
    dist.all_reduce(tensor, group=mine)
    same(tensor, [[1, 2, 3], [4, 5, 7]][rank()], device)
    for group in (both, alone, turned, mine):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@check
def functional(flavour):
    import torch.distributed._functional_collectives as funcol

    device = joined(flavour)
    group = dist.group.WORLD
    reduced = funcol.all_reduce(values(device), "avg", group)
    assert isinstance(reduced, funcol.AsyncCollectiveTensor)
    same(reduced + 0, [2.5, 3.5, 5], device)
    same(funcol.wait_tensor(funcol.all_gather_tensor(values(device), 0, group)), [1, 2, 3, 4, 5, 7], device)
    source = torch.arange(4.0, device=device).view(4, 1) * (rank() + 1)
    scattered = funcol.reduce_scatter_tensor(source, "sum", 0, group)
    same(scattered + 0, [[0.0], [3.0]] if rank() == 0 else [[6.0], [9.0]], device)
    same(funcol.broadcast(values(device), 1, group) + 0, [4, 5, 7], device)
    swapped = funcol.all_to_all_single(torch.full((2,), rank() + 1.0, device=device), [1, 1], [1, 1], group)
    same(swapped + 0, [1, 2], device)
    first, second = funcol.all_reduce_coalesced([values(device), values(device)[:1].clone()], "sum", group)
    same(first + 0, [5, 7, 10], device)
    same(second + 0, [5], device)
    first, second = funcol.all_gather_into_tensor_coalesced([values(device), values(device)[:1].clone()], group)
    same(first + 0, [1, 2, 3, 4, 5, 7], device)
    same(second + 0, [1, 4], device)
    (first,) = funcol.reduce_scatter_tensor_coalesced([source], "sum", [0], group)
    same(first + 0, [[0.0], [3.0]] if rank() == 0 else [[6.0], [9.0]], device)

    leaf = values(device).requires_grad_()
    (funcol.all_gather_tensor_autograd(leaf, 0, group) * torch.arange(6.0, device=device)).sum().backward()
    same(leaf.grad, [0, 2, 4] if rank() == 0 else [6, 8, 10], device)


@check
def coalesced(flavour):
    from torch.distributed.distributed_c10d import _coalescing_manager

    device = joined(flavour)
    for where in (None, device):  # torch's fast path, and the backend's own
        tensors = [values(device), values(device) * 2]
        with _coalescing_manager(device=where, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if where is None:
            same(tensors[0], values("cpu"), device)
            manager.wait()
        else:
            manager.wait()
        same(tensors[0], [5, 7, 10], device)
        same(tensors[1], [10, 14, 20], device)
    outs = [torch.zeros(6, device=device), torch.zeros(2, device=device)]
    with _coalescing_manager():
        dist.all_gather_into_tensor(outs[0], values(device))
        dist.all_gather_into_tensor(outs[1], values(device)[:1])
    same(outs[0], [1, 2, 3, 4, 5, 7], device)
    same(outs[1], [1, 4], device)
    outs = [torch.zeros(1, device=device), torch.zeros(2, device=device)]
    with _coalescing_manager():
        dist.reduce_scatter_tensor(outs[0], torch.arange(2.0, device=device))
        dist.reduce_scatter_tensor(outs[1], torch.arange(4.0, device=device))
    same(outs[0], [2.0 * rank()], device)
    same(outs[1], [0.0, 2.0] if rank() == 0 else [4.0, 6.0], device)


@check
def mixed_backends(flavour):
    device = joined(flavour)
    group = dist.new_group(backend=f"cpu:gloo,{flavour}:{FLAVOURS[flavour].backend}")
    for tensor in (values("cpu"), values(device)):
        where = tensor.device
        dist.all_reduce(tensor, group=group)
        same(tensor, [5, 7, 10], where)
        gathered = torch.zeros(6, device=where)
        dist.all_gather_into_tensor(gathered, values(where), group=group)
        same(gathered, [1, 2, 3, 4, 5, 7], where)
    dist.barrier(group)
    box = [{"from": rank()}]
    dist.broadcast_object_list(box, 1, group=group)
    assert box == [{"from": 1}]
    dist.destroy_process_group(group)


@check
def gradients(flavour):
    """torch.distributed.nn: collectives that are differentiated."""
    from torch.distributed.nn.functional import all_reduce

    device = joined(flavour)
    leaf = values(device).requires_grad_()
    (all_reduce(leaf) * (rank() + 1)).sum().backward()
    same(leaf.grad, [3.0] * 3, device)


# -- what torch builds on them -------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)


def batches(steps=10, size=8):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def half(tensor, device):
    return tensor.chunk(2)[rank()].to(device)


def model(**options):
    torch.manual_seed(3)
    return Branches(**options)


def train(network, inputs, optimizer=None, accumulate=1, pause=nullcontext):
    """Train on (x, y); every ``accumulate`` batches make a step, with ``pause()`` around all but their last."""
    optimizer = optimizer or torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for index, (x, y) in enumerate(inputs, 1):
        last = index % accumulate == 0
        with nullcontext() if last else pause():
            (nn.functional.mse_loss(network(x), y) / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def trained_on_cpu(accumulate=1, **options):
    network = model(**options)
    train(network, batches(), accumulate=accumulate)
    return network.state_dict()


def compare(state, reference, device=None, tolerance=2e-6):
    assert set(state) == set(reference)
    for name, tensor in state.items():
        assert device is None or tensor.device == device
        torch.testing.assert_close(
            tensor.cpu(), reference[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def halves(device):
    return ((half(x, device), half(y, device)) for x, y in batches())


@check
def ddp(flavour):
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    reference = trained_on_cpu()
    for options in ({}, {"device_ids": [device.index]}, {"device_ids": [device]}, {"gradient_as_bucket_view": True},
                    {"bucket_cap_mb": 1e-4}, {"static_graph": True}, {"broadcast_buffers": False}):  # fmt: skip
        network = model() if rank() == 0 else Branches()  # other weights, which construction overwrites
        network = DDP(network.to(device), **options)
        train(network, halves(device))
        compare(network.module.state_dict(), reference, device)


@check
def ddp_unused_parameters(flavour):
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    reference = trained_on_cpu(unused=True)
    network = DDP(model(unused=True).to(device), find_unused_parameters=True)
    train(network, halves(device))
    compare(network.module.state_dict(), reference, device)
    assert network.module.unused.weight.grad is None


@check
def ddp_no_sync(flavour):
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    network = DDP(model().to(device))
    train(network, halves(device), accumulate=2, pause=network.no_sync)
    compare(network.module.state_dict(), trained_on_cpu(accumulate=2), device)


@check
def ddp_hooks(flavour):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    reference = trained_on_cpu()
    for hook, tolerance in ((default_hooks.allreduce_hook, 2e-6), (default_hooks.fp16_compress_hook, 2e-3)):
        network = DDP(model().to(device))
        network.register_comm_hook(None, hook)
        train(network, halves(device))
        compare(network.module.state_dict(), reference, device, tolerance)


@check
def zero_redundancy(flavour):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    network = DDP(model().to(device))
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(network, halves(device), optimizer)
    compare(network.module.state_dict(), trained_on_cpu(), device)


@check
def sync_batch_norm(flavour):
    from torch.nn.parallel import DistributedDataParallel as DDP

    device = joined(flavour)
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    network = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(device))
    x, y = torch.randn(6, 2, 4, 4), torch.randn(6, 3)
    nn.functional.mse_loss(plain(x), y).backward()
    nn.functional.mse_loss(network(half(x, device)), half(y, device)).backward()
    for name, parameter in network.module.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), plain.get_parameter(name).grad, rtol=0, atol=2e-6)
    compare(network.module.state_dict(), plain.state_dict(), device)


@check
def fsdp1(flavour):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = joined(flavour)
    reference = trained_on_cpu()
    for sharding in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        network = FSDP(
            (model() if rank() == 0 else Branches()).to(device),  # FSDP1 can't move a module to a PrivateUse1 device
            device_id=device,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=sharding,
            sync_module_states=True,
            use_orig_params=True,
        )
        train(network, halves(device))
        with FSDP.state_dict_type(network, StateDictType.FULL_STATE_DICT):
            compare(network.state_dict(), reference, device)


@check
def fsdp2(flavour):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = joined(flavour)
    reference = trained_on_cpu()
    mesh = init_device_mesh(flavour, (2,))
    half_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options, tolerance in (
        ({"mesh": mesh}, 2e-6),
        ({}, 2e-6),
        ({"reshard_after_forward": False}, 2e-6),
        ({"mp_policy": half_precision}, 0.03),
    ):
        network = model().to(device)
        for layer in (network.body[0], network.body[2]):
            fully_shard(layer, **options)
        fully_shard(network, **options)
        train(network, halves(device))
        assert network.body[0].weight.to_local().shape == (4, 6)
        full = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True))
        compare(full, reference, device, tolerance)
    network = fully_shard(model().to(device), mesh=mesh)
    x, y = next(iter(batches()))
    nn.functional.mse_loss(network(half(x, device)), half(y, device)).backward()
    plain = model()
    nn.functional.mse_loss(plain(x), y).backward()
    total = nn.utils.clip_grad_norm_(network.parameters(), 0.1).full_tensor()
    torch.testing.assert_close(total.cpu(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))


@check
def tensor_parallel(flavour):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = joined(flavour)
    mesh = init_device_mesh(flavour, (2,), mesh_dim_names=("tp",))
    assert mesh.device_type == flavour
    torch.get_device_module(flavour).set_device(rank())  # as a mesh does in a process that has not used its device
    assert torch.get_device_module(flavour).current_device() == device.index
    whole = torch.arange(12.0, device=device).view(4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.to_local(), torch.arange(12.0).view(4, 3).chunk(2)[rank()], device)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole.cpu(), device)
    same((sharded @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor(),
         (whole @ whole.t()).cpu(), device)  # fmt: skip

    network = parallelize_module(model().to(device), mesh, {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()})
    assert network.body[0].weight.to_local().shape == (4, 6)
    train(network, ((x.to(device), y.to(device)) for x, y in batches()))
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in network.state_dict().items()
    }
    compare(state, trained_on_cpu(), device)


@check
def random_dtensors(flavour):
    """Replicas draw the same numbers and shards others, from the device's generator in one state on all ranks."""
    if flavour == "hpu":
        return  # torch asks rank 1 for the state of hpu:1, and the process has hpu:0
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    device = joined(flavour)
    mesh = init_device_mesh(flavour, (2,))
    torch.manual_seed(7)
    same_everywhere = nn.functional.dropout(distribute_tensor(torch.ones(64, device=device), mesh, [Replicate()]))
    gathered = torch.zeros(2, 64, device=device)
    dist.all_gather_into_tensor(gathered, same_everywhere.to_local())
    assert torch.equal(gathered[0], gathered[1])
    parts = nn.functional.dropout(distribute_tensor(torch.ones(128, device=device), mesh, [Shard(0)]))
    dist.all_gather_into_tensor(gathered, parts.to_local())
    assert not torch.equal(gathered[0], gathered[1])


def checkpoint(flavour, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = joined(flavour)
    mesh = init_device_mesh(flavour, (2,))

    def fresh(seed):
        torch.manual_seed(seed)
        network = fully_shard(Branches().to(device), mesh=mesh)
        return network, torch.optim.Adam(network.parameters(), lr=0.1)

    network, optimizer = fresh(1)
    train(network, halves(device), optimizer)
    saved = get_state_dict(network, optimizer)
    plain = torch.arange(3.0, device=device)
    dcp.save({"model": saved[0], "optimizer": saved[1], "plain": plain}, checkpoint_id=f"{folder}/sync")
    group = dist.new_group(backend=f"cpu:gloo,{flavour}:{FLAVOURS[flavour].backend}")
    state = {"model": saved[0], "optimizer": saved[1], "plain": plain}
    future = dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=group)
    before = {name: value.full_tensor().cpu() for name, value in saved[0].items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()  # the file has what was there when async_save returned
    future.result()
    dist.destroy_process_group(group)

    for kind in ("sync", "async"):
        network, optimizer = fresh(2)
        model_state, optimizer_state = get_state_dict(network, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "plain": torch.zeros(3, device=device)}
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        compare({name: value.full_tensor() for name, value in network.state_dict().items()}, before, device, 0)
        same(state["plain"], [0, 1, 2], device)
        moments = next(iter(optimizer.state.values()))["exp_avg"]
        assert moments.device == device and moments.full_tensor().abs().sum() > 0


def test_checkpoint(world, flavour, tmp_path):
    world.run(checkpoint, flavour, str(tmp_path), timeout=90)


# -- ends ----------------------------------------------------------------------------------------------------


@check
def a_rank_that_never_joins(flavour):
    device = joined(flavour)
    group = dist.new_group(timeout=timedelta(seconds=2))
    tensor = values(device)
    dist.all_reduce(tensor, group=group)
    if rank() == 0:
        start = time.monotonic()
        with raises(RuntimeError, "(?i)timed out"):
            dist.all_reduce(tensor, group=group)
        assert 1 < time.monotonic() - start < 30  # the world's own timeout is 60
        same(tensor, [5, 7, 10], device)
    dist.destroy_process_group(group)  # after an error, too
    dist.barrier()


@check
def worlds_come_and_go(flavour):
    device = on_device(flavour)
    for options in ({}, {"device_id": device}):
        new_world(FLAVOURS[flavour].backend, **options)
        tensor = values(device)
        dist.all_reduce(tensor)
        same(tensor, [5, 7, 10], device)
        dist.barrier()
        dist.destroy_process_group()
        with raises(AssertionError, "Process group cannot be None"):  # torch's answer to a second time
            dist.destroy_process_group()
    new_world(f"cpu:gloo,{flavour}:{FLAVOURS[flavour].backend}")
    for tensor in (values("cpu"), values(device)):
        where = tensor.device
        dist.all_reduce(tensor)
        same(tensor, [5, 7, 10], where)
    dist.destroy_process_group()
    new_world(None)  # torch takes the accelerator's
    tensor = values(device)
    dist.all_reduce(tensor)
    same(tensor, [5, 7, 10], device)
    dist.destroy_process_group()
