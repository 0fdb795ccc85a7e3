"""CIO-60 to CIO-66: what a checkpoint shares with memory and other folders, errors between saves, large files."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import nn

from torchhal.errors import CheckpointCorruptError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import MIB, checkpoint_files, save, slow_data, small_checkpoint


@check("CIO-60", since="0.2", features=["async"], after=("CIO-18",))
def error_before_another_save(context: CheckContext) -> None:
    """An error of a save that another save follows is raised all the same: by that one, by wait() or by teardown().

    The later save counts, or can be made again.

    Why: the best checkpoint failed, the last one didn't, and the run ended well with a checkpoint that isn't there.
    Fix: keep the errors of all saves until they are raised.
    """
    for ends in ("wait", "teardown"):
        io, blocked, path = context.create(), context.folder / f"file-{ends}", context.folder / f"good-{ends}.ckpt"
        blocked.write_text("a file, so no folder")
        found: list[Exception] = []
        for call in (
            lambda io=io, blocked=blocked: io.save_checkpoint(small_checkpoint(1), blocked / "x.ckpt"),
            lambda io=io, path=path: io.save_checkpoint(small_checkpoint(2), path),
            lambda io=io, ends=ends: getattr(io, ends)(),
        ):
            try:
                call()  # type: ignore[no-untyped-call]
            except Exception as error:
                found.append(error)
        require(len(found) > 0, f"the error of a save is lost where another save comes before {ends}()")
        if not io.exists(path):
            save(io, small_checkpoint(2), path)
        same(f"the save after one that failed, after {ends}()", io.load_checkpoint(path), small_checkpoint(2))


class _Versioned(nn.Module):
    """A layer whose states of version 1 were twice as large."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@check("CIO-61", since="0.2", after=("CIO-01",))
def versions_of_layers(context: CheckContext) -> None:
    """The state dict of a module that comes back has the versions of its layers, so that a module loads it as it is.

    These are in its attribute ``_metadata``, and a layer that converts states of earlier versions reads them.

    Why: without them a state counts as one of the first version; a layer converts it, and has other weights.
    Fix: keep the attributes of an OrderedDict, or save ``_metadata`` beside the tensors.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    layer, other = _Versioned(), _Versioned()
    module = nn.Sequential(layer, nn.BatchNorm1d(2))
    with torch.no_grad():
        layer.weight.fill_(3.0)
    save(io, {"state_dict": module.state_dict(), "epoch": 1}, path)
    loaded = io.load_checkpoint(path)["state_dict"]
    same("the versions of the layers", getattr(loaded, "_metadata", None), module.state_dict()._metadata)  # type: ignore[attr-defined]
    nn.Sequential(other, nn.BatchNorm1d(2)).load_state_dict(loaded)
    same("the weight that a module loads", other.weight.detach(), torch.full((3,), 3.0))


@check("CIO-62", since="0.2", features=["checksum"], after=("CIO-29",))
def flipped_bit_of_large(context: CheckContext) -> None:
    """One flipped bit of a file of 40 MiB is a CheckpointCorruptError: near its beginning, in its middle, near its end.

    Why: just the checkpoints of real models are large.
    Fix: verify while the file is read, whatever its size.
    """
    io, path = context.create(), context.folder / "large.ckpt"
    save(io, {"w": torch.randn(10 * MIB, generator=context.generator()), "step": 3}, path)
    file = max(checkpoint_files(path), key=lambda one: one.stat().st_size)
    size = file.stat().st_size
    for place in (size // 50, size // 2, size - size // 50):
        _flip(file, place)
        told = f"loading with a bit flipped in byte {place} of {size}"
        raises(told, CheckpointCorruptError, lambda: io.load_checkpoint(path), "large.ckpt")
        _flip(file, place)
    same("the step after the bits were flipped back", io.load_checkpoint(path)["step"], 3)


def _flip(file: Any, place: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(place)
        value = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([value ^ 16]))


@check("CIO-63", since="0.2", after=("CIO-01",))
def equal_tensors(context: CheckContext) -> None:
    """Tensors of equal values that were apart are apart after a load; so are lists, dictionaries, and two loads.

    Why: two moments of an optimizer that are both zero became one tensor, and each step wrote to both.
    Fix: tell memory apart by its address when it is saved, never by its contents; return new objects from each load.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    state = {
        "moments": {name: torch.zeros(64, 64) for name in ("exp_avg", "exp_avg_sq")},
        "lists": [[1, 2], [1, 2]], "groups": [{"lr": 0.1}, {"lr": 0.1}],
        "small": [torch.tensor(0.0), torch.tensor(0.0)],
    }  # fmt: skip
    save(io, state, path)
    loads = [io.load_checkpoint(path), io.load_checkpoint(path)]
    first = loads[0]
    first["moments"]["exp_avg"].add_(1)
    first["small"][0].add_(1)
    first["lists"][0].append(3)
    first["groups"][0]["lr"] = 0.5
    same("a tensor beside one of equal values that was changed", first["moments"]["exp_avg_sq"], torch.zeros(64, 64))
    same("a 0-d tensor beside an equal one that was changed", first["small"][1], torch.tensor(0.0))
    same("a list beside an equal one that was changed", first["lists"][1], [1, 2])
    same("a dictionary beside an equal one that was changed", first["groups"][1], {"lr": 0.1})
    for told, found in (("another load of the file", loads[1]), ("a load after that", io.load_checkpoint(path))):
        same(f"{told}, once what the first returned was changed", found, state)


@check("CIO-64", since="0.2", after=("CIO-01",))
def saved_again(context: CheckContext) -> None:
    """A second save to a path has the values that the tensors have then, however they were written to.

    They are written to in place, by ``.data``, through NumPy, by a view, and to an element of a list in the state.

    Why: the version of a tensor doesn't count writes by ``.data`` and NumPy; what looks unchanged was left out.
    Fix: write each save.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    weight, counts = torch.zeros(8), [0]
    state: dict[str, Any] = {"w": weight, "counts": counts, "nest": {"deep": [torch.zeros(2)]}}
    writes: dict[str, Any] = {
        "nothing": lambda: None,
        "add_()": lambda: weight.add_(1),
        ".data": lambda: weight.data.add_(1),
        "NumPy": lambda: weight.numpy().__iadd__(1),
        "a view": lambda: weight.view(2, 4)[1].mul_(3),
        "a list": lambda: counts.append(len(counts)),
        "an item of a list": lambda: state["nest"]["deep"].__setitem__(0, torch.ones(2)),
    }
    for told, write in writes.items():
        write()
        save(io, state, path)
        found = io.load_checkpoint(path)
        same(f"what was saved after a write by {told}", found, state)


@check("CIO-65", since="0.2", features=["async"], after=("CIO-17",))
def snapshot_of_everything(context: CheckContext) -> None:
    """A snapshot copies plain values too: lists and dictionaries, at any depth.

    Why: a checkpoint with the weights of one step and the counters of a later one leaves out batches when it is loaded.
    Fix: copy every container, not tensors alone.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    history: list[Any] = [[1], {"loss": [0.5]}]
    state: dict[str, Any] = {
        "before": slow_data(), "large": torch.zeros(8 * MIB), "history": history,
        "loops": {"fit": {"batches": [1, 2], "epoch": 3}},
        "strided": torch.arange(16.0).view(4, 4).t(),
    }  # fmt: skip
    expected = {
        "before": slow_data(), "large": torch.zeros(8 * MIB), "history": [[1], {"loss": [0.5]}],
        "loops": {"fit": {"batches": [1, 2], "epoch": 3}}, "strided": torch.arange(16.0).view(4, 4).t().clone(),
    }  # fmt: skip
    io.save_checkpoint(state, path)
    history[0].append(2)
    history[1]["loss"].append(0.25)
    history.append("later")
    state["loops"]["fit"]["batches"].clear()
    state["loops"]["fit"]["epoch"] = 9
    state["strided"].zero_()
    state["large"].fill_(1)
    state["another"] = 1
    io.wait()
    found = io.load_checkpoint(path)
    if set(found) != set(expected):
        raise CheckFailed(f"the checkpoint has the keys {sorted(found)}, expected {sorted(expected)}")
    same("what was saved before the change", found, expected)


@check("CIO-66", since="0.2", after=("CIO-50",))
def second_name_elsewhere(context: CheckContext) -> None:
    """A second name in another folder stays when the first folder is moved or removed, and so does one beside it.

    Why: a symbolic link to the run's folder dangles when that is pruned: the best checkpoint is gone.
    Fix: a hard link, or a copy where the file system has none.
    """
    if "sharded" in context.component.declared:
        raise NotApplicable("its strategy links on all ranks")
    io = context.create()
    for ends in ("removed", "moved"):
        runs, kept = context.folder / f"runs-{ends}", context.folder / f"kept-{ends}"
        for folder in (runs, kept):
            folder.mkdir()
        save(io, small_checkpoint(4), runs / "x.ckpt")
        if not io.link_checkpoint(runs / "x.ckpt", kept / "best.ckpt"):
            raise NotApplicable("it links no checkpoint to another folder")
        if ends == "removed":
            shutil.rmtree(runs)
        else:
            runs.rename(context.folder / "elsewhere")
        require(io.exists(kept / "best.ckpt"), f"the second name is gone once the first one's folder was {ends}")
        same(
            f"the second name once the first folder was {ends}",
            io.load_checkpoint(kept / "best.ckpt"),
            small_checkpoint(4),
        )
