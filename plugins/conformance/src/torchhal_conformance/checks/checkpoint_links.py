"""CIO: second names of checkpoints, and other things than checkpoints at their paths."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError, ConfigurationError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import Custom, file_sizes, load, save, small_checkpoint


@check("CIO-50", since="0.2", after=("CIO-01", "CIO-13"))
def second_name(context: CheckContext) -> None:
    """link_checkpoint makes a second name of a checkpoint and returns True, or returns False and changes nothing.

    Either name can then be removed or saved over, and the other one stays. What was at the new name is replaced; the
    name itself is no other. Nothing else is left in the folder. Where the system has no links it is a copy. One that
    can't be made is a CheckpointError, or False, with all as it was.

    Why: the last checkpoint is the best one under another name; removing the one must not take the other.
    Fix: leave the inherited link_checkpoint, or link to a new name beside the target and rename that.
    """
    if "sharded" in context.component.declared:
        raise NotApplicable("its strategy links on all ranks")
    for told, system in (("", contextlib.nullcontext()), (", without links", _no_links())):
        folder = context.folder / ("linked" if not told else "copied")
        folder.mkdir()
        with system:
            _link(context.create(), folder, told)


@contextlib.contextmanager
def _no_links() -> Iterator[None]:
    """Let the block be on a file system that has no links."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with mock.patch.object(os, "link", refuse):
        yield


def _link(io: CheckpointIO, folder: Path, told: str) -> None:
    source, target, other = folder / "source.ckpt", folder / "target.ckpt", folder / "other.ckpt"
    save(io, small_checkpoint(1), source)
    before = file_sizes(folder)
    made = io.link_checkpoint(source, target)
    require(type(made) is bool, f"link_checkpoint must return a bool (got {made!r}){told}")
    if not made:
        same(f"the folder after a link that was not made{told}", file_sizes(folder), before)
        return
    for name in (source, target):
        require(io.exists(name), f"{name.name} doesn't exist after link_checkpoint{told}")
        same(f"{name.name} after link_checkpoint{told}", load(name.name, io, name), small_checkpoint(1))
    names = sorted(os.path.basename(str(path)) for path in io.list_checkpoints(folder))
    same(f"the list after link_checkpoint{told}", names, ["source.ckpt", "target.ckpt"])
    same(f"the names in the folder{told}", {Path(one).parts[0] for one in file_sizes(folder)}, set(names))
    require(io.link_checkpoint(str(source), str(target)) is True, f"a second link to one name was not made{told}")
    save(io, small_checkpoint(2), source)
    same(f"the second name after a save over the first one{told}", io.load_checkpoint(target), small_checkpoint(1))
    save(io, small_checkpoint(3), other)
    same(f"whether a link to a name that is taken is made{told}", io.link_checkpoint(source, other), True)
    same(f"a link to a name that was taken{told}", io.load_checkpoint(other), small_checkpoint(2))
    io.remove_checkpoint(source)
    same(f"the second name after the first one was removed{told}", io.load_checkpoint(other), small_checkpoint(2))
    for what, path, new in (("nothing", folder / "none", target), ("no folder", target, folder / "none" / "x")):
        before = file_sizes(folder)
        try:
            found = io.link_checkpoint(path, new)
        except CheckpointError:
            found = False
        except Exception as error:
            raise CheckFailed(f"a link, of {what}{told}: {type(error).__name__}: {error}") from error
        if path.name == "none":
            require(found is False, f"a link to nothing was made{told}")
        if found is False:
            same(f"the folder after a link, of {what}, was not made{told}", file_sizes(folder), before)
    taken = folder / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    before = file_sizes(folder)
    with contextlib.suppress(CheckpointError):
        require(io.link_checkpoint(target, taken) is False, f"a link took the place of a folder of the user's{told}")
    same(f"the files after a link to the name of a folder{told}", file_sizes(folder), before)


@check("CIO-51", since="0.2", needs=["posix"], after=("CIO-12", "CIO-13"))
def something_else(context: CheckContext) -> None:
    """What no save wrote is no checkpoint: a folder of the user's, a pipe, a file for a folder, an endless link.

    A load of it is a CheckpointError or FileNotFoundError, a save there and a removal a CheckpointError; exists() is
    False and the list leaves it out. It stays as it was. A name that is empty or a folder's is a ConfigurationError or
    CheckpointError, and what is no path a TypeError.

    Why: a load of a pipe waits for ever, and a removal of the folder of that name takes all that is in it.
    Fix: ask os.stat before opening; refuse what a save doesn't write.
    """
    io, folder = context.create(), context.folder
    mine, pipe, file, loop = (folder / name for name in ("mine", "pipe", "file", "loops/x"))
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    os.mkfifo(pipe)
    file.write_text("mine")
    loop.parent.mkdir()
    loop.symlink_to(loop)
    save(io, small_checkpoint(), folder / "own.ckpt")
    before = _sizes_here(folder)
    for path in (mine, pipe, file / "x.ckpt", loop):
        name = str(path.relative_to(folder))
        raises(
            f"a load of {name}",
            (CheckpointError, FileNotFoundError),
            partial(io.load_checkpoint, path),
            path.name,
        )
        raises(
            f"open_checkpoint of {name}",
            (CheckpointError, FileNotFoundError),
            partial(io.open_checkpoint, path),
        )
        require(io.exists(path) is False, f"exists() of {name} is true")
        require(io.recognizes(path) is False, f"recognizes() of {name} is true")
    raises("a removal of a folder of the user's", CheckpointError, lambda: io.remove_checkpoint(mine))
    io.remove_checkpoint(file / "x.ckpt")
    if "sharded" not in context.component.declared:  # a folder's IO asks the system for the folder before
        with contextlib.suppress(CheckpointError):  # no system has such a name
            io.remove_checkpoint(folder / ("n" * 300))
    raises(
        "a save to a name of 300 letters", CheckpointError, lambda: save(io, small_checkpoint(), folder / ("n" * 300))
    )
    raises("a save in a file's place", CheckpointError, lambda: save(io, small_checkpoint(), file / "x.ckpt"))
    raises("a save in place of a folder of the user's", CheckpointError, lambda: save(io, small_checkpoint(), mine))
    same("the files afterwards", _sizes_here(folder), before)
    listed = {os.path.basename(str(path)) for path in io.list_checkpoints(folder)}
    if not io.recognizes(folder / "own.ckpt"):
        listed -= {"file"}  # one that recognises no file takes any for a checkpoint
    same("the list", listed, {"own.ckpt"})
    plain, slashed = (sorted(map(str, io.list_checkpoints(one))) for one in (folder, f"{folder}/"))
    names = [os.path.normpath(one) for one in slashed]
    same("the list of a folder with a slash behind its name", names, plain)
    refused = (ConfigurationError, CheckpointError)
    raises("a save to 'a\\0b'", refused, lambda: save(io, small_checkpoint(), "a\0b"))
    for wrong in ("", ".", "..", f"{folder}/"):
        raises(
            f"a save to {wrong!r}",
            (ConfigurationError, CheckpointError),
            partial(save, io, small_checkpoint(), wrong),
        )
        raises(
            f"a load of {wrong!r}",
            (ConfigurationError, CheckpointError, FileNotFoundError),
            partial(io.load_checkpoint, wrong),
        )
    odd: Any
    for odd in (None, 3, b"x.ckpt"):
        raises(f"a save to {odd!r}", (TypeError, CheckpointError), partial(save, io, small_checkpoint(), odd))
        raises(f"a load of {odd!r}", TypeError, partial(io.load_checkpoint, odd))
    same("the files after refused paths", _sizes_here(folder), before)


def _sizes_here(folder: Path) -> dict[str, int]:
    """Return the names and sizes of all files, of links those of the links themselves."""
    return {str(one.relative_to(folder)): one.lstat().st_size for one in sorted(folder.rglob("*"))}


@check("CIO-52", since="0.2", after=("CIO-01", "CIO-16"))
def foreign_files(context: CheckContext) -> None:
    """A load returns what exists() takes for a checkpoint, be it a file that plain torch.save wrote.

    One that holds no dict, or whose tensors are damaged, is a CheckpointError then. A shorter, longer or compressed zip
    file is one too. saved_ns() is an int for each that is listed, and the list is in its order.

    Why: `last` is the newest of what exists() shows, and a run that can't load it doesn't start.
    Fix: let exists() look at what a load needs.
    """
    io, folder = context.create(), context.folder / "files"
    folder.mkdir()
    state = {**small_checkpoint(), "large": torch.arange(3000.0)}
    plain = folder / "plain.ckpt"
    torch.save(state, plain)
    save(io, small_checkpoint(2), folder / "own.ckpt")
    whole = plain.read_bytes()
    if io.exists(plain):
        same("a file of torch.save's", load("a file of torch.save's", io, plain), state)
        found = io.open_checkpoint(plain)
        same("the keys of a file of torch.save's", list(found), list(state))
        listed = [str(path) for path in io.list_checkpoints(folder)]
        same("the list", sorted(map(os.path.basename, listed)), ["own.ckpt", "plain.ckpt"])
        times = [io.saved_ns(path) for path in listed]
        require(all(type(one) is int and one > 0 for one in times), f"saved_ns() must be an int above 0 (got {times})")
        same("the times of the list", times, sorted(times))
        _pass_the_time_of(folder / "own.ckpt")  # or the change time would be the same
        os.utime(plain, ns=(1, 1))
        same("the list, with an older file", [os.path.basename(str(path)) for path in io.list_checkpoints(folder)],
             ["plain.ckpt", "own.ckpt"])  # fmt: skip
        _damaged(context, io, plain, whole)
    torch.save({**state, "odd": Custom()}, folder / "odd.ckpt")
    for name in ("load_checkpoint", "open_checkpoint"):
        raises(f"{name} of a class of another's", CheckpointError, partial(getattr(io, name), folder / "odd.ckpt"))
    torch.save([1, 2], folder / "list.ckpt")
    raises("a load of a list", CheckpointError, lambda: io.load_checkpoint(folder / "list.ckpt"), "list.ckpt")


def _pass_the_time_of(path: Path) -> None:
    """Return when a change of a file has a later time than that of ``path``: a file system's clock ticks.

    After two seconds in any case: a clock may have been set back.
    """
    probe, deadline = path.with_name("probe"), time.monotonic() + 2
    later = False
    while not later and time.monotonic() < deadline:
        time.sleep(0.001)
        probe.touch()
        later = probe.stat().st_ctime_ns > path.stat().st_ctime_ns
        probe.unlink()


def _damaged(context: CheckContext, io: CheckpointIO, plain: Path, whole: bytes) -> None:
    """Check what becomes of a file of torch.save's that is damaged in several ways."""
    kind = CheckpointCorruptError if "checksum" in context.component.declared else CheckpointError
    place = whole.find(torch.arange(1000.0, 1010.0).numpy().tobytes())
    if place > 0 and "checksum" in context.component.declared:
        plain.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        raises("a load of a damaged tensor of torch.save's", kind, lambda: io.load_checkpoint(plain), plain.name)
    middle = whole[: len(whole) // 2] + bytes(len(whole) // 2 - 22) + whole[-22:]
    plain.write_bytes(middle)
    raises(
        "a load of a file of torch.save's without its second half", kind, lambda: io.load_checkpoint(plain), plain.name
    )
    for what, data in (("cut off", whole[:-30]), ("longer", whole + b"\0" * 30)):
        plain.write_bytes(data)
        raises(
            f"a load of a file of torch.save's that is {what}",
            kind,
            lambda: io.load_checkpoint(plain),
            plain.name,
        )
        known = io.exists(plain) is False or "checksum" not in context.component.declared
        require(known, f"exists() of a file of torch.save's that is {what} is true")
    plain.write_bytes(whole)
    with zipfile.ZipFile(plain) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    for what, kept, packing in (
        ("is compressed", records, zipfile.ZIP_DEFLATED),
        ("has another pickle", {**records, "plain/data.pkl": b"garbage"}, zipfile.ZIP_STORED),
        ("has no tensors", {one: records[one] for one in records if "/data/" not in one}, zipfile.ZIP_STORED),
        ("has no pickle", {one: records[one] for one in records if not one.endswith("data.pkl")}, zipfile.ZIP_STORED),
    ):  # fmt: skip
        with zipfile.ZipFile(plain, "w", packing) as archive:
            for name, data in kept.items():
                archive.writestr(name, data)
        with contextlib.suppress(CheckpointError):
            io.open_checkpoint(plain)
        error = CheckpointError if what in ("has another pickle", "has no tensors") else kind
        raises(f"a load of a zip file that {what}", error, lambda: io.load_checkpoint(plain), plain.name)
    plain.write_bytes(whole)
    same("the file put back", io.load_checkpoint(plain)["step"], 1)
