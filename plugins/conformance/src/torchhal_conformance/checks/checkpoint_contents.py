"""CIO: a load returns what was saved, in type, value, order and shared memory."""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._generated_inputs import for_each, nests, tensors
from torchhal_conformance._tensor_specs import ALL_DTYPES, NestSpec, TensorSpec, layouts_of
from torchhal_conformance.checks._checkpoint_samples import DTYPES, MIB, checkpoint_files, save, small_checkpoint


def golden_state() -> dict[str, Any]:
    """Return the state in the golden files: a checkpoint that one release writes must load in all later ones."""
    base = torch.arange(24.0).reshape(4, 6)
    weights = {str(dtype).removeprefix("torch."): (base % 2).to(dtype) for dtype in DTYPES}
    return {"state_dict": collections.OrderedDict(weights), "shared": [base, base[1:3]], "epoch": 3, "none": None}


@check("CIO-01")
def round_trip(context: CheckContext) -> None:
    """All values of a checkpoint come back as they were, in type, value and order.

    Such are every dtype, 0-d, empty, strided, conjugated and negated tensors, nested containers, keys of any letters,
    large integers, None and the state of an optimizer.

    Why: a resumed run differs in what was lost, and nobody sees where.
    Fix: write values, not their string forms; keep containers what they are.
    """
    generator = context.generator()
    tensors = {str(dtype): (torch.randn(3, 4, generator=generator) * 40).to(dtype) for dtype in DTYPES}
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(3, 4, generator=generator)).sum().backward()
    optimizer.step()
    base = torch.randn(6, 8, generator=generator)
    state = {
        "tensors": tensors, "0-d": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": base[:, ::2],
        "transposed": base.t(), "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "nest": [{"a": (1, [2.5, None, True])}, "text \u00e9 \U0001f600", b"bytes".hex()], "large": 2**80,
        "keys": {1: "one", "two": 2}, "ordered": collections.OrderedDict(b=1, a=2), "optimizer": optimizer.state_dict(),
        "model": model.state_dict(),
    }  # fmt: skip
    io, path = context.create(), context.folder / "all.ckpt"
    save(io, state, path)
    loaded = io.load_checkpoint(path)
    for name, value in state.items():
        require(name in loaded, f"{name!r} is lost")
        same(name, loaded[name], value)
    same("the keys", list(loaded), list(state))
    _generated_values(context)


def _generated_values(context: CheckContext) -> None:
    """Check every dtype in every layout, keys that look like paths, and generated nests of containers."""
    io, path = context.create(), context.folder / "generated.ckpt"
    shapes: list[tuple[int, ...]] = [(), (2, 3), (0, 3), (1, 2, 1)]
    specs = [TensorSpec(dtype, shape, name) for dtype in ALL_DTYPES for name in layouts_of(dtype) for shape in shapes]
    tensor = TensorSpec().build()
    keys = {"a": {"b": 1, "": 2, "c": {}}, "a.b": 3, "a/b": {"..": 4}, "1": 5, 1: 6, "": [[], (), ({},)], "__": None}
    made = {repr(spec): spec.build() for spec in specs}
    everything = {"tensors": made, "keys": keys, "same": [tensor, tensor]}
    save(io, everything, path)
    loaded = io.load_checkpoint(path)
    for name, value in made.items():
        same(f"a tensor {name}", loaded["tensors"][name].detach(), value.detach())
    same("keys that look like paths, and empty containers", loaded["keys"], keys)

    def each(spec: NestSpec) -> None:
        state = {"value": spec.build()}
        save(io, state, path)
        same("what was loaded", io.load_checkpoint(path), state)
        same("what was saved, afterwards", state, {"value": spec.build()})

    plain = ("list", "tuple", "dict", "OrderedDict")
    corners = [
        NestSpec(one, (NestSpec(two, (NestSpec(three, (TensorSpec(), "x", 2)), None, 1.5)),))
        for one in plain for two in plain for three in ("tuple", "dict")
    ]  # fmt: skip
    for_each("a value", each, corners=corners, generated=nests(tensors(), containers=plain),
             seed=context.component.seed, examples=25)  # fmt: skip


@check("CIO-02", after=("CIO-01",))
def shared_memory(context: CheckContext) -> None:
    """Tensors that share memory share it after a load, tied weights and views alike.

    Why: tied weights that come apart train apart, and a checkpoint of views is many times its size.
    Fix: write each memory once, and views as places in it.
    """
    base = torch.randn(8, 4, generator=context.generator())
    state = {"embedding": base, "head": base, "rows": base[2:5]}
    io, path = context.create(), context.folder / "tied.ckpt"
    save(io, state, path)
    loaded = io.load_checkpoint(path)
    loaded["embedding"][2, 0] = 77.0
    same("a tied tensor after a write to the other", float(loaded["head"][2, 0]), 77.0)
    same("a view after a write to its base", float(loaded["rows"][0, 0]), 77.0)
    deep = {"list": [base, {"rows": base[2:5]}], "tuple": (base.t(), [base[:, 1:]]), "other": base.clone()}
    save(io, deep, path)
    loaded = io.load_checkpoint(path)
    loaded["list"][0][2, 1] = 88.0
    for what, got in (
        ("a view in a dict in a list", loaded["list"][1]["rows"][0, 1]),
        ("a transposed view", loaded["tuple"][0][1, 2]),
        ("a view of columns", loaded["tuple"][1][0][2, 0]),
    ):  # fmt: skip
        same(f"{what} after a write to its base", float(got), 88.0)
    same("a tensor with memory of its own", loaded["other"], base)


@check("CIO-03")
def map_location(context: CheckContext) -> None:
    """A load gives tensors on the CPU unless told otherwise by map_location.

    That may be a name, a device, a dict of names or a callable, which is called as torch.load does: with each storage,
    on the CPU, and the name of its device, and it returns the storage to use, or None for the default.

    Why: an ignored map_location puts every rank's checkpoint on the device of the rank that saved it.
    Fix: hand it on to torch.load or torchhal.checkpoint.apply_map_location, or move the tensors as it says.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    save(io, small_checkpoint(), path)
    same("device without map_location", io.load_checkpoint(path)["weights"]["w"].device.type, "cpu")
    places: list[Any] = ["meta", torch.device("meta"), lambda storage, location: storage, {"cpu": "cpu"}]
    for place, expected in zip(places, ("meta", "meta", "cpu", "cpu"), strict=True):
        got = io.load_checkpoint(path, map_location=place)["weights"]["w"].device.type
        same(f"device with map_location={place!r}", got, expected)
    given: list[tuple[bool, Any]] = []

    def to_meta(storage: Any, location: Any) -> torch.UntypedStorage:
        given.append((isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu", location))
        return torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]

    loaded = io.load_checkpoint(path, map_location=to_meta)["weights"]
    require(bool(given), "a callable map_location must be called for each storage (it was not called)")
    same("(an untyped storage on the CPU, its location) in each call of map_location", given, [(True, "cpu")] * 2)
    same(
        "devices with a map_location that returns other storages",
        [x.device.type for x in loaded.values()],
        ["meta"] * 2,
    )
    kept = io.load_checkpoint(path, map_location=lambda storage, location: None)["weights"]["w"]
    same("a tensor with a map_location that returns None", kept, small_checkpoint()["weights"]["w"])


@check("CIO-04")
def input_untouched(context: CheckContext) -> None:
    """A save leaves the checkpoint that it was given as it was: keys, values and objects.

    Why: a state dict is often the running model's; what a save pops from it is missing from the run.
    Fix: make a new dict for what the file holds beyond it.
    """
    state = {**small_checkpoint(), "list": [torch.ones(3)], "none": None}
    objects = {"w": state["weights"]["w"], "list": state["list"]}
    before = pickle.dumps(state)
    save(context.create(), state, context.folder / "x.ckpt")
    same("the checkpoint after the save", state, pickle.loads(before))
    require(state["weights"]["w"] is objects["w"] and state["list"] is objects["list"], "values were replaced")


class _Canary:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@check("CIO-14")
def hostile_file(context: CheckContext) -> None:
    """A load runs nothing that a file says, unless it was told weights_only=False.

    In place of any file of a checkpoint stands a pickle that would create a file, and it doesn't.

    Why: checkpoints are downloaded, and a pickle is a program.
    Fix: torch.load(weights_only=True), or a format that holds no code.
    """
    io, path, canary = context.create(), context.folder / "x.ckpt", context.folder / "canary"
    hostile = context.folder / "hostile"
    torch.save({"weights": _Canary(str(canary))}, hostile)
    save(io, small_checkpoint(), path)
    for file in checkpoint_files(path):
        whole = file.read_bytes()
        for data in (hostile.read_bytes(), pickle.dumps({"weights": _Canary(str(canary))})):
            file.write_bytes(data)
            with contextlib.suppress(Exception):
                io.load_checkpoint(path)
            with contextlib.suppress(Exception):
                io.list_checkpoints(context.folder)
            with contextlib.suppress(Exception):
                io.open_checkpoint(path)
            require(not canary.exists(), f"a load ran what stands in {file.name}")
        file.write_bytes(whole)
    same("the checkpoint put back", io.load_checkpoint(path), small_checkpoint())


@check("CIO-15")
def unknown_options(context: CheckContext) -> None:
    """A storage option or an argument that means nothing here is a TypeError that names it.

    Why: a misspelt option that is dropped writes to the wrong place with the wrong rights.
    Fix: take no **kwargs; check storage_options against what you use.
    """
    io, path = context.create(), context.folder / "x.ckpt"

    def with_option() -> None:
        io.save_checkpoint(small_checkpoint(), path, storage_options={"no_such_option": 1})
        io.wait()

    raises("a storage option that nobody knows", TypeError, with_option, "no_such_option")
    unknown = {"colour": "red"}
    raises(
        "an argument of a save", TypeError, lambda: io.save_checkpoint(small_checkpoint(), path, **unknown), "colour"
    )
    raises("an argument of a load", TypeError, lambda: io.load_checkpoint(path, **unknown), "colour")


@check("CIO-25")
def golden_files(context: CheckContext) -> None:
    """Checkpoints of golden_state() that earlier releases wrote load as what they were.

    They are the files in the folder that the suite's ``golden=`` names.

    Why: a format that changes quietly makes every archived run unreadable.
    Fix: keep one file of each release in the tests, and read what it holds.
    """
    if context.component.golden is None:
        raise NotApplicable("no files of earlier releases were given (golden=)")
    files = sorted(path for path in Path(context.component.golden).iterdir() if not path.name.startswith("."))
    require(files, f"{context.component.golden} is empty")
    for file in files:
        same(f"the golden file {file.name}", context.create().load_checkpoint(file), golden_state())


def _growth(component: ComponentUnderTest, path: str, size: int) -> int:
    import resource

    io = component.create()
    save(io, small_checkpoint(), path)
    state = {"w": torch.ones(size, dtype=torch.uint8)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save(io, state, path)
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


@check("CIO-27", features=["streaming"], needs=["posix"])
def memory(context: CheckContext) -> None:
    """A save needs at most 1.2 times the payload beside the payload itself.

    Why: a checkpoint that is first built in memory ends in the kernel killing the process, at the first save.
    Fix: write tensor by tensor.
    """
    size = 96 * MIB
    context.restart_subprocess()
    growth = context.run_in_subprocess(_growth, context.component, str(context.folder / "x.ckpt"), size)
    context.restart_subprocess()
    require(growth < 1.2 * size, f"a save of {size >> 20} MiB took {growth >> 20} MiB more")
