"""STR-01 to 12, 27 to 31, 36 to 39, 45, 46: communication and the life of a strategy; training is in training.py."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from torchhal import registry
from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.distributed.stores import PrefixStore
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import SinglePrecision
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import MissingRequirement, NotApplicable, check
from torchhal_conformance._rank_context import RankContext, side_channel
from torchhal_conformance.checks.trainer import children

WORLDS = (2, 3)
"""Two ranks hide mistakes in their order."""


@check("STR-01", worlds=WORLDS)
def reduce(rank: RankContext) -> None:
    """reduce gives sum, mean, max and min over the ranks; an unknown op is a ValueError that names it.

    Why: an op that is ignored turns a maximum into a mean, in every metric.
    Fix: hand the op to the backend, and refuse the rest.
    """
    values = [float(r + 1) for r in range(rank.size)]
    expected = {"sum": sum(values), "mean": sum(values) / rank.size, "max": max(values), "min": min(values)}
    with rank.joined() as strategy:
        for op, value in expected.items():
            got = strategy.reduce(torch.tensor([values[rank.rank]], device=strategy.root_device), op)
            close(f"reduce(op={op!r}) of rank + 1", got, [value], 1e-6)
        raises("reduce with an unknown op", ValueError, lambda: strategy.reduce(torch.ones(1), "median"), "median")


@check("STR-02", worlds=(2,))
def reduce_is_pure(rank: RankContext) -> None:
    """reduce leaves its input as it was and returns new memory, without a graph, whatever the backend.

    Why: a metric that was logged twice was reduced twice, on one backend only.
    Fix: reduce a copy.
    """
    with rank.joined() as strategy:
        value = torch.full((4,), float(rank.rank), device=strategy.root_device)
        before = value.clone()
        got = strategy.reduce(value, "sum")
        same("the input after reduce", value, before)
        got.add_(1)  # not data_ptr(): there are devices on which all tensors have the same
        same("the input after a write to the result", value, before)
        require(not strategy.reduce(value.clone().requires_grad_(), "mean").requires_grad, "the result has a graph")


@check("STR-03", worlds=WORLDS)
def reduce_anything(rank: RankContext) -> None:
    """reduce takes integers, booleans, 0-d, strided, float16 (added up without overflow) and bfloat16 tensors (without
    losing small terms), numbers and nests, and gives back what is no number.

    Why: a mean of integers was cut off, and a sum of float16 overflowed where each part did not.
    Fix: add up in a wider dtype, and return the dtype that Strategy.reduce promises.
    """
    n = rank.size
    with rank.joined() as strategy:
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


@check("STR-04", features=["groups"], worlds=(3,))
def groups(rank: RankContext) -> None:
    """reduce and all_gather over a group are over its ranks alone.

    Why: a group that is ignored mixes data-parallel replicas with the shards of one model.
    Fix: hand the group on.
    """
    with rank.joined() as strategy:
        group = dist.new_group([0, 2])
        if rank.rank != 1:
            value = torch.tensor([float(rank.rank)], device=strategy.root_device)
            close("the sum over ranks 0 and 2", strategy.reduce(value, "sum", group=group), [2.0], 1e-6)
            close("all_gather over ranks 0 and 2", strategy.all_gather(value, group=group).flatten(), [0.0, 2.0], 1e-6)
        rank.gather("done")


@check("STR-05", worlds=WORLDS)
def decisions(rank: RankContext) -> None:
    """reduce_boolean_decision says on every rank whether all, or any, decided so.

    Why: a base class that returned each rank's own decision let half of the ranks stop.
    Fix: reduce with min for all, with max for any.
    """
    with rank.joined() as strategy:
        one, last = rank.rank == 0, rank.size == 1
        same("all, where rank 0 alone decided so", strategy.reduce_boolean_decision(one), last)
        same("any, where rank 0 alone decided so", strategy.reduce_boolean_decision(one, all=False), True)
        same("all, where all did", strategy.reduce_boolean_decision(True), True)
        same("any, where none did", strategy.reduce_boolean_decision(False, all=False), False)


@check("STR-06", worlds=WORLDS)
def broadcast(rank: RankContext) -> None:
    """broadcast gives every rank the value of rank ``src``, for each src: tensors, objects, None, more than 2 MB.

    Why: a src that is ignored gives every rank the value of rank 0, or its own.
    Fix: hand src on, and send sizes before contents.
    """
    with rank.joined() as strategy:
        for src in range(rank.size):
            objects: list[Any] = [{"rank": rank.rank, "text": "x" * rank.rank}, None if rank.rank == src else "other"]
            same(
                f"an object from rank {src}", strategy.broadcast(objects, src), [{"rank": src, "text": "x" * src}, None]
            )
            tensor = torch.full((3, 2), float(rank.rank), device=strategy.root_device)
            same(f"a tensor from rank {src}", strategy.broadcast(tensor, src).cpu(), torch.full((3, 2), float(src)))
        large = strategy.broadcast(torch.arange(800_000) + rank.rank, rank.size - 1)
        same("a tensor of 6 MB", int(large.sum()), int((torch.arange(800_000) + rank.size - 1).sum()))
        raises("broadcast from a rank that doesn't exist", ValueError, lambda: strategy.broadcast(1, rank.size), "src")


@check("STR-07", worlds=WORLDS)
def received_device(rank: RankContext) -> None:
    """A tensor from another rank's device arrives on the receiver's own device, one from its CPU on the CPU.

    Why: a tensor that arrives on the sender's device opens a context there, or is on a device that isn't here.
    Fix: send through host memory, and move what came from a device.
    """
    with rank.joined() as strategy:
        mine = torch.ones(2, device=strategy.root_device)  # its device has an index where the root device has none
        got = strategy.broadcast({"device": mine, "host": torch.ones(2)}, 0)
        same("device of a tensor from a device", got["device"].device, mine.device)
        same("device of a tensor from the CPU", got["host"].device.type, "cpu")
        gathered = strategy.all_gather(mine)
        same("device of what was gathered", gathered.device, mine.device)


@check("STR-08", worlds=WORLDS)
def barrier(rank: RankContext) -> None:
    """barrier returns on no rank before the last one has come.

    Why: rank 0 read the file that the last rank had not written yet.
    Fix: wait for every rank.
    """
    with rank.joined() as strategy:
        path = os.path.join(rank.folder, "last")
        if rank.rank == rank.size - 1:
            time.sleep(0.4)
            with open(path, "w", encoding="utf-8") as file:
                file.write("here")
        strategy.barrier("conformance")
        require(os.path.exists(path), "barrier() returned before the last rank had come")
        rank.gather("done")


@check("STR-09", worlds=(1, 2, 3))
def all_gather(rank: RankContext) -> None:
    """all_gather gives (world, ...) in rank order, in fresh memory on root_device, also for one rank and from the CPU.

    Why: with one rank the first dimension was missing, so code that worked on eight devices failed on one.
    Fix: stack, never concatenate; unsqueeze for one rank.
    """
    with rank.joined() as strategy:
        mine = torch.full((2, 3), float(rank.rank))
        for value in (mine, mine.to(strategy.root_device), mine.t().contiguous().t()):
            got = strategy.all_gather(value)
            same("shape", tuple(got.shape), (rank.size, 2, 3))
            expected = torch.stack([torch.full((2, 3), float(r)) for r in range(rank.size)])
            same("what was gathered", got.cpu(), expected)
            got.fill_(7.0)
            same("the input after a write to the result", float(value[0, 0]), float(rank.rank))
        same("objects", strategy.all_gather_object({"rank": rank.rank}), [{"rank": r} for r in range(rank.size)])


@check("STR-10", features=["sync_grads"], worlds=WORLDS)
def gather_with_gradients(rank: RankContext) -> None:
    """With sync_grads, backward adds up what the losses of all ranks say about this rank's tensor.

    Why: contrastive losses trained on detached negatives, and got worse without an error.
    Fix: an autograd function whose backward is a reduce-scatter.
    """
    with rank.joined() as strategy:
        mine = torch.full((2,), float(rank.rank + 1), device=strategy.root_device, requires_grad=True)
        weights = torch.arange(1.0, 2 * rank.size + 1, device=strategy.root_device).reshape(rank.size, 2)
        gathered = strategy.all_gather(mine, sync_grads=True)
        ((rank.rank + 1) * weights * gathered).sum().backward()  # type: ignore[no-untyped-call]
        close("the gradient", mine.grad, weights[rank.rank] * sum(range(1, rank.size + 1)), 1e-6)


@check("STR-11", worlds=WORLDS)
def uneven_shapes(rank: RankContext) -> None:
    """Tensors of different shapes are gathered, one entry per rank that begins with what that rank has sent, or an
    error on every rank; never a hang or numbers from elsewhere.

    Why: the last batch is smaller on one rank.
    Fix: compare shapes before anything is sent.
    """
    with rank.joined() as strategy:
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


@check("STR-12", worlds=WORLDS)
def one_zero(rank: RankContext) -> None:
    """Exactly one rank is the global zero, the same before and after the set-up; ranks are those of the environment.

    Changed: torchhal has no rank_zero_only that could say something else than the strategy.

    Why: everybody wrote the log, or nobody did.
    Fix: answer from the cluster environment, at any time.
    """
    strategy = rank.make()
    before = strategy.is_global_zero
    with rank.joined(strategy):
        found = (before, strategy.is_global_zero, strategy.global_rank, strategy.world_size)
        everybody = rank.gather(found)
    expected = [(r == 0, r == 0, r, rank.size) for r in range(rank.size)]
    same("(zero before, zero after, global rank, world size) of each rank", everybody, expected)


@check("STR-24", worlds=(2,))
def given_checkpoint_io(rank: RankContext) -> None:
    """Checkpoints go through the checkpoint IO that was given, with the path and the options.

    Why: a strategy that saves by itself ignores encryption, remote storage and atomic writes.
    Fix: call self.checkpoint_io.
    """
    spy = _Spy()
    with rank.joined(checkpoint_io=spy) as strategy:
        path = os.path.join(rank.folder, "x.ckpt")
        strategy.save_checkpoint({"a": 1}, path, storage_options={"colour": "red"})
        rank.gather("saved")
        same("what is loaded", strategy.load_checkpoint(path), {"a": 1})
        strategy.load_checkpoint(path, weights_only=False)
        rank.gather("loaded")
        strategy.remove_checkpoint(path)
    saves = [call for call in spy.calls if call[0] != "load"]
    expected = [("save", path, {"colour": "red"}), ("remove", path, None)] if rank.rank == 0 else []
    same("saves and removals that reached the checkpoint IO", saves, expected)
    loads = [call[2] for call in spy.calls if call[0] == "load"]
    same("weights_only as it reached the checkpoint IO", loads, [{"weights_only": True}, {"weights_only": False}])


class _Spy(TorchCheckpointIO):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, Any]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None) -> None:
        self.calls.append(("save", str(path), storage_options))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, *, map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
        self.calls.append(("load", str(path), {"weights_only": weights_only}))
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", str(path), None))
        super().remove_checkpoint(path)


@check("STR-27", worlds=WORLDS)
def own_device(rank: RankContext) -> None:
    """The root device of local rank i is the i-th device that was given.

    Why: all ranks on device 0 run, slowly, until it is full.
    Fix: index devices by local rank, not by global rank.
    """
    with rank.joined() as strategy:
        if not strategy.multi_device or strategy.num_local_processes(len(strategy.devices)) == 1:
            same("root_device", strategy.root_device, strategy.devices[0])
        else:
            same("root_device", strategy.root_device, strategy.devices[rank.rank])
            if rank.subject.make_accelerator().indexed:
                everybody = [str(device) for device in rank.gather(str(strategy.root_device))]
                same("different devices", len(set(everybody)), rank.size)


@check("STR-28", worlds=WORLDS)
def sampler(rank: RankContext) -> None:
    """distributed_sampler_kwargs divide the samples: every sample on some rank, none on two but for the padding, and
    another order in each epoch.

    Why: every rank saw the same data, and the run looked like a larger batch.
    Fix: num_replicas and rank of the data-parallel group.
    """
    with rank.joined() as strategy:
        kwargs = strategy.distributed_sampler_kwargs
        everybody = rank.gather(kwargs)
        if kwargs is None:
            require(rank.size == 1 or not strategy.multi_device, "several ranks and no division of the data")
            return
        shares = []
        orders = []
        for one in everybody:
            divided: Any = DistributedSampler(range(23), **one, shuffle=True)  # type: ignore[arg-type]
            shares.append(list(divided))
            divided.set_epoch(1)
            orders.append(list(divided))
        replicas = kwargs["num_replicas"]
        ranks = sorted({one["rank"] for one in everybody})
        same("the ranks of the data", ranks, list(range(replicas)))
        union = {index for share in shares for index in share}
        same("how many of 23 samples are seen", len(union), 23)
        distinct = {tuple(share) for share in shares}
        same("how many different shares there are", len(distinct), replicas)
        require(orders != shares, "the second epoch has the order of the first")


@check("STR-29", worlds=WORLDS)
def teardown(rank: RankContext) -> None:
    """teardown may be called twice; the model is on the CPU afterwards, the process group that the strategy made is
    gone, and no thread, no process and no variable of the environment is left.

    Changed: sockets are not counted: a backend closes them some time after its group has gone.

    Why: a notebook's second fit met the first one's group, and a service ran out of threads.
    Fix: undo in reverse order what the set-up did.
    """
    threads, processes, environ = set(threading.enumerate()), children(), dict(os.environ)
    strategy = rank.make()
    model = nn.Linear(3, 2)
    with rank.joined(strategy):
        strategy.connect(model)
        strategy.setup_model()
    strategy.teardown()
    require(not dist.is_initialized(), "the process group is still there")
    require(not strategy.is_set_up, "is_set_up is still true")
    same("devices of the parameters", {p.device.type for p in model.parameters()}, {"cpu"})
    deadline = time.monotonic() + 5
    while (left := [t.name for t in set(threading.enumerate()) - threads]) and time.monotonic() < deadline:
        time.sleep(0.05)
    require(not left, f"threads are left: {', '.join(left)}")
    while (alive := children() - processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    require(not alive, f"processes are left: {', '.join(map(str, sorted(alive)))}")
    changed = sorted(name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name))
    require(not changed, f"variables are left or gone: {', '.join(changed)}")


@check("STR-30", worlds=(2,))
def failed_setup(rank: RankContext) -> None:
    """After an error during the set-up teardown works, and the strategy can be set up afterwards.

    Why: teardown's own error is what the user saw, in place of the cause.
    Fix: release only what is there.
    """

    class Failing(SinglePrecision):
        def setup(self, accelerator: Any, device: Any) -> None:
            raise RuntimeError("the cause")

    strategy = rank.make(precision=Failing())
    raises("the set-up", RuntimeError, strategy.setup_environment, "the cause")
    strategy.teardown()
    strategy.teardown()
    rank.make().teardown()  # one that was never set up
    with rank.joined() as second:
        second.barrier("conformance")


@check("STR-31", worlds=(2,))
def several_lives(rank: RankContext) -> None:
    """One strategy object can be set up, used and torn down several times in a process.

    Why: fit, then test: the second one met what the first had left.
    Fix: make in the set-up what the teardown takes away.
    """
    strategy = rank.make()
    for life in range(3):
        with rank.joined(strategy):
            strategy.connect(nn.Linear(2, 2))
            strategy.setup_model(training=life != 1)
            got = strategy.reduce(torch.tensor([1.0], device=strategy.root_device), "sum")
            close(f"a sum in life {life + 1}", got, [rank.size], 1e-6)


@check("STR-36", worlds=(1,))
def given_precision(rank: RankContext) -> None:
    """The precision that was given converts the module and the step's input and output, and scales and steps.

    Why: a strategy with autocast of its own trains in another precision than the one that was asked for.
    Fix: call self.precision, or declare ``precisions`` so that other ones are refused.
    """
    supported = rank.subject.part.precisions
    if supported is not None and "32-true" not in supported:
        raise NotApplicable(f"it works with {', '.join(sorted(supported))} only")
    _no_engine(rank)
    spy = _PrecisionSpy()
    with rank.joined(precision=spy) as strategy:
        module = _Step()
        strategy.connect(module)
        strategy.setup_model()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        strategy.setup_optimizers([torch.optim.SGD(parameters, lr=0.1)])
        batch = strategy.batch_to_device(torch.ones(12, 3))  # as many samples as the other checks have in a batch
        loss = strategy.step_function("training_step")(batch, 0)
        strategy.backward(loss)
        strategy.clip_gradients(strategy.optimizers[0], 1.0)
        strategy.optimizer_step(strategy.optimizers[0])
    missing = [name for name in _PrecisionSpy.NAMES if name not in spy.called]
    require(not missing, f"the precision's {', '.join(missing)} was never called")


class _Step(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]


class _PrecisionSpy(SinglePrecision):
    NAMES = ("setup", "convert_module", "convert_input", "convert_output", "forward_context", "backward",
             "optimizer_step", "check_optimizer")  # fmt: skip

    def __init__(self) -> None:
        self.called: set[str] = set()

    def _spied(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.called.add(name)
        return getattr(super(), name)(*arguments, **options)


for _name in _PrecisionSpy.NAMES:

    def _method(self: Any, *arguments: Any, _name: str = _name, **options: Any) -> Any:
        return _PrecisionSpy._spied(self, _name, *arguments, **options)

    setattr(_PrecisionSpy, _name, _method)


def _no_engine(rank: RankContext) -> None:
    owned = {name for name in rank.subject.declared if name.startswith("owns_")}
    if owned & {"owns_step", "owns_backward", "owns_accumulation"}:
        raise NotApplicable(f"the strategy does the step itself ({', '.join(sorted(owned))})")


@check("STR-37", worlds=(1,))
def unsupported_pair(rank: RankContext) -> None:
    """An accelerator or a precision that the strategy doesn't declare is refused before a launch, naming both.

    Changed: in the message only what doesn't fit is looked for; the strategy's name in it is the core's own business.

    Why: the vendor's library fails on it after all processes have started.
    Fix: declare ``accelerators`` and ``precisions``.
    """
    part, subject = rank.subject.part, rank.subject
    if part.accelerators is None and part.precisions is None:
        raise NotApplicable("it declares that it works with everything")
    if part.accelerators is not None and "cpu" not in part.accelerators:
        request = Request(accelerator=CPUAccelerator(), strategy=subject.create(), devices=1)
        raises("a pair that can't work", UnsupportedCombinationError, partial(resolve, request), "cpu")
    if part.precisions is not None:
        others = [name for name in ("64-true", "16-true", "bf16-true") if name not in part.precisions]
        accelerator = next(iter(part.accelerators or ["cpu"]))
        if not registry.find("accelerator", accelerator).load().availability():
            raise MissingRequirement(f"accelerator {accelerator!r} is not here")
        for name in others[:1]:
            request = Request(accelerator=accelerator, strategy=subject.create(), precision=name, devices=1)
            raises("a pair that can't work", UnsupportedCombinationError, partial(resolve, request), name)


@check("STR-38", worlds=(2,))
def silent_before_setup(rank: RankContext) -> None:
    """Before the set-up nothing communicates: one rank alone can ask for ranks, sizes and sampler arguments.

    Why: a scheduler that asks for the number of steps in configure_optimizers deadlocked the job.
    Fix: answer from the cluster environment.
    """
    if rank.rank == 0:
        strategy = rank.make()
        for name in ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero", "root_device",
                     "distributed_sampler_kwargs", "is_data_leader", "is_set_up"):  # fmt: skip
            getattr(strategy, name)
        strategy.make_launcher()
        require(not dist.is_initialized(), "a process group was made before setup_environment()")
    rank.gather("done")


@check("STR-39", worlds=(2,))
def foreign_group(rank: RankContext) -> None:
    """A process group that the user has made is used, and stays after teardown.

    Why: a strategy that destroyed it took the rest of the program's communication with it.
    Fix: destroy a group only if the set-up made it.
    """
    if rank.size == 1:
        raise NotApplicable("it makes no process group")
    accelerator = rank.subject.make_accelerator()
    kind = accelerator.device_type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{accelerator.backend}"
    store = PrefixStore(f"foreign/{os.environ['TORCHHAL_CONFORMANCE_CALL']}", side_channel())
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=timedelta(seconds=20))
    try:
        group = dist.group.WORLD
        with rank.joined() as strategy:
            got = strategy.reduce(torch.ones(1, device=strategy.root_device), "sum")
            close("a sum over the user's group", got, [rank.size], 1e-6)
            require(dist.group.WORLD is group, "another process group has taken the place of the user's")
        require(dist.is_initialized() and dist.group.WORLD is group, "teardown destroyed the user's process group")
        value = torch.ones(1)
        dist.all_reduce(value)
        same("a sum afterwards", float(value), float(rank.size))
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


@check("STR-45", worlds=WORLDS)
def order_of_keys(rank: RankContext) -> None:
    """A mapping whose keys come in another order on another rank is reduced by key, or is an error on every rank.

    Why: two metrics logged in another order were added up crosswise.
    Fix: go through the keys in sorted order, or compare them first.
    """
    values = {"a": 1.0, "b": 10.0, "c": 100.0}
    names = sorted(values, reverse=rank.rank % 2 == 1)
    with rank.joined() as strategy:
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


@check("STR-46", worlds=WORLDS)
def strided_views(rank: RankContext) -> None:
    """reduce and broadcast of a strided view are right, and touch nothing beside it.

    Why: gloo works on the wrong elements of a view, without a word.
    Fix: send a contiguous copy.
    """
    with rank.joined() as strategy:
        base = torch.arange(12.0, device=strategy.root_device).reshape(3, 4) + 100 * rank.rank
        before = base.clone()
        view = base[:, ::2]
        first = torch.arange(12.0).reshape(3, 4)[:, ::2]
        close("the mean of a view", strategy.reduce(view, "mean"), first + 100 * (rank.size - 1) / 2, 1e-6)
        close("a view from the last rank", strategy.broadcast(view, rank.size - 1), first + 100 * (rank.size - 1), 1e-6)
        close("a view, gathered", strategy.all_gather(view)[0], first, 1e-6)
        same("the memory around the view", base, before)
