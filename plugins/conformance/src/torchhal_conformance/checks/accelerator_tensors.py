"""ACC: tensors that go to the device come back, and are computed there as on the CPU."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchhal import registry
from torchhal.capabilities import check_capabilities, dtypes_of
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import MixedPrecision, TruePrecision
from torchhal.pytree import move_module
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._generated_inputs import for_each, nests, tensors
from torchhal_conformance._tensor_specs import (
    ALL_DTYPES,
    NestSpec,
    TensorSpec,
    deepest,
    layouts_of,
    parts,
    stored_dtypes,
)
from torchhal_conformance.checks._capability_trials import try_capability, try_collectives

TOLERANCE = 1e-3
"""Of a float32 result against the CPU's, times the greatest value: hardware may add up in another order and width."""


@check("ACC-12", needs=["device"])
def round_trip(context: CheckContext) -> None:
    """A tensor that batch_to_device puts on the device comes back bit for bit.

    That holds for every dtype that the device stores; 0-d, empty, strided, expanded, conjugated and negated tensors,
    views that share memory, and leaves of autograd. The tensor that was given is not written to.

    Why: a transfer that ignores strides or the offset into shared memory trains on other numbers, silently.
    Fix: make a view contiguous before its memory is copied, or leave the copy to Tensor.to.
    """
    accelerator, device = context.setup_accelerator()
    base = torch.randn(6, 8, generator=context.generator()) * 50
    for dtype in [*dtypes_of("store", accelerator.capabilities), torch.int64, torch.int32, torch.uint8, torch.bool]:
        full = (base > 0) if dtype is torch.bool else base.abs().to(dtype)
        shapes = {
            "dense": full, "0-d": full[0, 0], "empty": full[:0], "strided": full[:, ::2], "transposed": full.t(),
            "expanded": full[:1].expand(5, 8), "a view of the middle": full[2:4],
        }  # fmt: skip
        moved = accelerator.batch_to_device(shapes, device)
        accelerator.synchronize(device)
        for name, tensor in shapes.items():
            same(
                f"device of a {name} {dtype} tensor",
                moved[name].device,
                device if accelerator.indexed else moved[name].device,
            )
            same(f"device type of a {name} {dtype} tensor", moved[name].device.type, device.type)
            same(f"a {name} {dtype} tensor that went to {device} and back", moved[name].cpu(), tensor)

    def each(spec: TensorSpec) -> None:
        for non_blocking in (False, True):
            tensor = spec.build()
            moved = accelerator.batch_to_device(tensor, device, non_blocking=non_blocking)
            accelerator.synchronize(device)
            same("its device type", moved.device.type, device.type)
            same(f"what went to {device} and back", moved.detach().cpu(), tensor.detach())
            same("the tensor that was given, afterwards", tensor.detach(), spec.build().detach())

    dtypes = stored_dtypes(device, ALL_DTYPES)
    sizes: list[tuple[int, ...]] = [(), (2, 3), (0, 3)]
    corners = [TensorSpec(dtype, size, layout) for dtype in dtypes for layout in layouts_of(dtype) for size in sizes]
    for_each("a tensor", each, corners=corners, generated=tensors(dtypes), seed=context.component.seed)


_Pair = namedtuple("_Pair", "x label")


@dataclass
class _Sample:
    image: torch.Tensor
    name: str


class _Moves:
    """An object that moves itself, into a new one, and knows none of torch's keywords."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> _Moves:
        return _Moves(self.tensor.to(device))


@check("ACC-13", needs=["device"], after=("ACC-12",))
def batch_structure(context: CheckContext) -> None:
    """batch_to_device keeps the structure of a batch, moves its tensors, and doesn't write to the batch that was given.

    Mappings, lists, tuples, named tuples and dataclasses stay what they are, subclasses too, one inside of another at
    any depth; an object's own ``.to`` is called, and strings, numbers and None are left alone.

    Why: users' collate functions return anything, and a step that unpacks it fails far from the cause.
    Fix: inherit batch_to_device, or move leaves with torchhal.pytree.map_tensors.
    """
    accelerator, device = context.setup_accelerator()
    one = torch.arange(3.0)
    batch = {
        "list": [one, "text", None], "pair": _Pair(one, 7), "sample": _Sample(one, "a"), "moves": _Moves(one),
        "deep": ({"x": (one,)}, 1.5, True),
    }  # fmt: skip
    moved = accelerator.batch_to_device(batch, device)
    same("keys", list(moved), list(batch))
    same("types", [type(moved[key]) for key in batch], [type(value) for value in batch.values()])
    for name, got in (
        ("a list", moved["list"][0]), ("a named tuple", moved["pair"].x), ("a dataclass", moved["sample"].image),
        ("an object with .to", moved["moves"].tensor), ("a nest", moved["deep"][0]["x"][0]),
    ):  # fmt: skip
        same(f"device type of the tensor in {name}", got.device.type, device.type)
        same(f"the tensor in {name}", got.cpu(), one)
    same("what isn't a tensor", (moved["list"][1:], moved["pair"].label, moved["sample"].name, moved["deep"][1:]),
         (["text", None], 7, "a", (1.5, True)))  # fmt: skip
    require(
        batch["list"][0] is one and batch["sample"].image is one and batch["moves"].tensor is one,  # type: ignore[index, attr-defined]
        "the caller's batch was written to",
    )

    def each(spec: NestSpec) -> None:
        batch = spec.build()
        moved = accelerator.batch_to_device(batch, device)
        places = {one.device.type for _, one in parts(moved) if isinstance(one, torch.Tensor)}
        require(places <= {device.type}, f"its tensors are on {sorted(places)}, not on {device.type}")
        same("what went to the device", moved, batch)
        same("the batch that was given, afterwards", batch, spec.build())

    leaves = tensors(stored_dtypes(device, [torch.float32, torch.int64]))
    for_each("a batch", each, corners=deepest(TensorSpec()), generated=nests(leaves), seed=context.component.seed)


@check("ACC-15", needs=["device"], after=("ACC-12",))
def synchronized_reads(context: CheckContext) -> None:
    """After synchronize(device) the host reads what the device wrote before, also through a copy that didn't wait.

    It takes a device and works without one.

    Why: a loss that is read before the device has finished is an older one, or garbage.
    Fix: wait for all of the device's streams.
    """
    accelerator, device = context.setup_accelerator()
    for step in range(5):
        on_device = torch.zeros(200_000, device=device)
        for _ in range(10):
            on_device += 1
        on_device *= step
        on_host = _pinned(200_000).copy_(on_device, non_blocking=True)
        accelerator.synchronize(device) if step % 2 else accelerator.synchronize()
        expected = torch.full((200_000,), 10.0 * step)
        wrong = int((on_host != expected).sum())
        require(not wrong, f"{wrong} of 200000 numbers are not what the device had written before synchronize()")


def _pinned(size: int) -> torch.Tensor:
    """Return host memory that a copy doesn't wait for, where the device has such."""
    try:
        return torch.zeros(size).pin_memory()
    except (RuntimeError, NotImplementedError):  # no device here that could
        return torch.zeros(size)


@check("ACC-16", needs=["device"], timeout=60)
def declared_capabilities(context: CheckContext) -> None:
    """Each capability of core's vocabulary that the class declares is really there; a precision without it is refused.

    ``compute:...`` multiplies matrices forward and backward, ``store:...`` keeps a parameter and its update, with
    ``autocast:...`` a product has that dtype, with ``loss_scaling`` torch has a gradient scaler for the device, and
    ``collective:...`` is tried in a process group of one. What the device can do and doesn't declare is no error. The
    refusal, before a launch, names what is missing, the precision and the accelerator. Where a class lists
    ``precisions`` as before, each is an alias that exists.

    Why: a dtype that is declared and missing fails in the first step, after minutes of loading.
    Fix: declare in ``capabilities`` what the device and its backend have.
    """
    accelerator, device = context.setup_accelerator()
    capabilities = check_capabilities(accelerator.capabilities, f"{type(accelerator).__name__}.capabilities")
    for alias in sorted(accelerator.precisions):
        try:
            registry.find("precision", alias)
        except LookupError as error:
            raise CheckFailed(f"'precisions' lists {alias!r}: {error}") from error
    for capability in sorted(capabilities):
        try:
            try_capability(capability, accelerator, device, context.generator)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(
                f"'capabilities' holds {capability!r}, which fails with {type(error).__name__}: {error}"
            ) from error
    operations = sorted(c.partition(":")[2] for c in capabilities if c.startswith("collective:"))
    if operations and accelerator.backend:
        failed = context.run_in_subprocess(try_collectives, context.component, operations, timeout=60)
        context.restart_subprocess()
        require(not failed, f"'capabilities' holds collectives that {accelerator.backend!r} fails in: {failed}")
    for precision in (TruePrecision("float64"), MixedPrecision("float16"), TruePrecision("bfloat16")):
        if lacking := precision.needs - capabilities:
            request = Request(accelerator=accelerator, precision=precision, strategy="single_device", devices=1)
            what = f"precision {precision.alias!r}, of whose needs {accelerator.name!r} lacks {sorted(lacking)}"
            raises(what, UnsupportedCombinationError, partial(resolve, request), precision.alias, accelerator.name)
            return


@check("ACC-17", needs=["device"], after=("ACC-12",))
def numerics(context: CheckContext) -> None:
    """A small network computes on the device what it computes on the CPU, forward and backward, up to 1e-3.

    It consists of a convolution, a normalization and linear layers.

    Why: wrong kernels exist, and a model that trains a little worse is not noticed.
    Fix: report the operator to the vendor; until then declare the check as an expected failure with its name.
    """
    accelerator, device = context.setup_accelerator()
    results = []
    for where in (torch.device("cpu"), device):
        torch.default_generator.manual_seed(context.component.seed)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        batch = torch.randn(5, 2, 6, 6, generator=context.generator())
        if where is device:
            move_module(model, device)
            batch = accelerator.batch_to_device(batch, device)
        output = model(batch)
        output.square().mean().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    names = ["the output", *(f"the gradient of {name}" for name, _ in model.named_parameters())]
    for name, expected, got in zip(names, *results, strict=True):
        close(name, got, expected, TOLERANCE)


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


@check("ACC-20", needs=["device", "posix"], after=("ACC-12",))
def data_workers(context: CheckContext) -> None:
    """A DataLoader with two workers works after the device was set up and used.

    They start in the cheapest way in ``start_methods``: fork, else forkserver, else spawn.

    Why: a worker forked from a process that holds a driver's handles hangs or crashes, in the first epoch.
    Fix: leave "fork" out of ``start_methods`` when the vendor's runtime doesn't survive it.
    """
    methods = context.component.cls.start_methods
    method = next((name for name in ("fork", "forkserver", "spawn") if name in methods), None)
    require(method is not None, f"'start_methods' must hold fork, forkserver or spawn (got {sorted(methods)})")
    got = context.run_in_subprocess(_load_data, context.component, method, timeout=120)
    context.restart_subprocess()
    same("what two workers loaded", got, [index * index for index in range(8)])


def _load_data(component: Any, method: str) -> list[int]:
    accelerator = component.make_accelerator()
    device = accelerator.get_parallel_devices([0])[0]
    accelerator.setup_device(device)
    torch.ones(3, device=device).sum().item()
    loader = DataLoader(_Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method, timeout=60)
    return [int(number) for batch in loader for number in batch]
