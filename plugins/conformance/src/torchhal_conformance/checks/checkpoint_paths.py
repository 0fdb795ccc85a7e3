"""CIO: paths, URLs, removal and sequences of operations on several checkpoints."""

from __future__ import annotations

import os
import pickle
import random
import threading
from functools import partial

import torch

from torchhal.errors import CheckpointError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import checkpoint_files, file_sizes, load, save, small_checkpoint
from torchhal_conformance.checks._open_files import open_files


@check("CIO-05", after=("CIO-01",))
def overwrite(context: CheckContext) -> None:
    """A save over another checkpoint replaces all of it: nothing of a larger predecessor is left.

    Why: shards of the old run that the new one doesn't overwrite are loaded as its own.
    Fix: write beside it and rename, or empty the folder of what an earlier save wrote there.
    """
    io, path, fresh = context.create(), context.folder / "x.ckpt", context.folder / "fresh.ckpt"
    large = {"weights": {f"layer{i}": torch.randn(500, generator=context.generator()) for i in range(40)}, "extra": 1}
    save(io, large, path)
    save(io, small_checkpoint(2), path)
    same("the second checkpoint of that name", io.load_checkpoint(path), small_checkpoint(2))
    save(io, small_checkpoint(2), fresh)
    sizes = [sum(file.stat().st_size for file in checkpoint_files(one)) for one in (path, fresh)]
    names = [[file.relative_to(one).as_posix() for file in checkpoint_files(one)] for one in (path, fresh)]
    require(len(names[0]) == len(names[1]), f"files {names[0]}, a fresh save writes {names[1]}")
    require(sizes[0] <= 1.5 * sizes[1], f"{sizes[0]} bytes, a fresh save takes {sizes[1]}")


@check("CIO-11", after=("CIO-01",))
def paths(context: CheckContext) -> None:
    """A path may be a str or a Path, relative, and lie in folders that don't exist yet.

    It may hold blanks, '%' and any letters, begin with a dot or end in .tmp.

    Why: metrics in file names bring all of these, and torch.save refuses some names itself.
    Fix: give torch.save an open file; make the folders.
    """
    io = context.create()
    names = [
        "plain.ckpt",
        "with blanks.ckpt",
        "\u00fcn\u00ef\u4e2d.ckpt",
        "100%-val=0.5.ckpt",
        ".hidden",
        ".tmp",
        "x.tmp",
        "a/b/c/deep.ckpt",
    ]
    for name in names:
        for path in (context.folder / name, str(context.folder / f"s-{name.replace('/', '-')}")):
            try:
                save(io, small_checkpoint(), path)
                require(io.exists(path), f"{path!r} was saved and doesn't exist")
                same(f"the checkpoint {path!r}", io.load_checkpoint(path), small_checkpoint())
            except (OSError, RuntimeError, ValueError, CheckpointError) as error:
                raise CheckFailed(f"{path!r} can't be used: {type(error).__name__}: {error}") from error
    relative = os.path.relpath(context.folder / "relative.ckpt")
    save(io, small_checkpoint(4), relative)
    same("the checkpoint of a relative path", io.load_checkpoint(context.folder / "relative.ckpt"), small_checkpoint(4))


@check("CIO-13")
def removal(context: CheckContext) -> None:
    """remove_checkpoint deletes what a save wrote and nothing else.

    A missing checkpoint is no error; of a link the link alone is removed.

    Why: keeping the best k removes checkpoints all the time; one prefix match too many takes another run's.
    Fix: remove the one path; for a folder, what a save writes into it.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    neighbours = [context.folder / name for name in ("x.ckpt.1", "x.ckpt-best", "ax.ckpt", "x")]
    for neighbour in neighbours:
        neighbour.write_text("mine")
    before = file_sizes(context.folder)
    save(io, small_checkpoint(), path)
    io.remove_checkpoint(path)
    same("the folder after a save and its removal", file_sizes(context.folder), before)
    io.remove_checkpoint(path)
    alone = context.folder / "alone"
    alone.mkdir()
    for told, saves in (("a removal of what isn't there", False), ("the removal of its one checkpoint", True)):
        if saves:
            save(io, small_checkpoint(), alone / "x.ckpt")
        io.remove_checkpoint(alone / "x.ckpt")
        require(alone.is_dir(), f"{told} has removed the folder too, which the user had made")
    target, link = context.folder / "kept.ckpt", context.folder / "link.ckpt"
    save(io, small_checkpoint(), target)
    try:
        link.symlink_to(target, target_is_directory=target.is_dir())
    except OSError:  # a system without links
        return
    io.remove_checkpoint(link)
    require(not link.is_symlink(), "the link is still there")
    same("what the link pointed to", io.load_checkpoint(target), small_checkpoint())


@check("CIO-24", features=["fsspec"], after=("CIO-01",))
def url(context: CheckContext) -> None:
    """A URL such as memory://run/x.ckpt can be saved to, loaded, listed and removed like a path.

    Why: code that joins paths or calls os.path.exists works until the run moves to an object store.
    Fix: go through fsspec for every path that holds "://".
    """
    io, root = context.create(), f"memory://torchhal-conformance-{context.folder.name}"
    path = f"{root}/x.ckpt"
    save(io, small_checkpoint(), path)
    require(io.exists(path), "a checkpoint at a URL was saved and doesn't exist")
    same("the checkpoint at a URL", io.load_checkpoint(path), small_checkpoint())
    listed = [str(found) for found in io.list_checkpoints(root)]
    require(len(listed) == 1 and listed[0].endswith("x.ckpt"), f"list_checkpoints of a URL gave {listed}")
    same("a listed URL", io.load_checkpoint(listed[0]), small_checkpoint())
    io.remove_checkpoint(path)
    require(not io.exists(path), "a checkpoint at a URL was removed and exists")
    raises("loading a missing URL", FileNotFoundError, lambda: io.load_checkpoint(path), "x.ckpt")


@check("CIO-26", after=("CIO-01", "CIO-13"))
def like_a_dict(context: CheckContext) -> None:
    """Any sequence of saves, overwrites, removals and loads of a few names behaves as a dict would.

    That holds also when half of it goes through another instance. What a load returned is the caller's own: no later
    call changes it, and a change of it changes no later load.

    Why: caches that a remove or another process's save doesn't reach, and names that collide after cleaning.
    Fix: keep nothing about files between calls.
    """
    ios = [context.create(), context.create()]
    folder, generator = context.folder / "store", random.Random(context.component.seed)
    names = ["a.ckpt", "A.ckpt2", "a b", "a_b", "a.ckpt.bak"]
    model: dict[str, int] = {}
    done: list[str] = []
    for step in range(60):
        name, io = generator.choice(names), generator.choice(ios)
        action = generator.choice(["save", "save", "load", "remove", "list"])
        done.append(f"{action} {name!r}" if action != "list" else "list")
        told = f"after {', '.join(done[-6:])} (step {step}, seed {context.component.seed})"
        if action == "save":
            model[name] = step
            save(io, {"value": step, "t": torch.full((3,), step)}, folder / name)
        elif action == "remove":
            model.pop(name, None)
            io.remove_checkpoint(folder / name)
        elif action == "list":
            listed = sorted(os.path.basename(str(path)) for path in io.list_checkpoints(folder))
            same(f"the list {told}", listed, sorted(model))
        same(f"exists({name!r}) {told}", io.exists(folder / name), name in model)
        if name in model:
            same(f"{name!r} {told}", io.load_checkpoint(folder / name)["value"], model[name])
        else:
            raises(f"loading {name!r} {told}", FileNotFoundError, partial(io.load_checkpoint, folder / name))
    _results_of_their_own(context)


def _results_of_their_own(context: CheckContext) -> None:
    """Check that a result is no other result, nor the file, nor the dictionary that was saved."""
    io, path = context.create(), context.folder / "own.ckpt"
    state = {"t": torch.zeros(2000), "list": [1]}
    save(io, state, path)
    state["t"].add_(1)  # type: ignore[attr-defined]
    state["list"].append(2)  # type: ignore[attr-defined]
    expected = {"t": torch.zeros(2000), "list": [1]}
    first = io.load_checkpoint(path)
    same("a checkpoint after a change of the dictionary that was saved", first, expected)
    first["t"].add_(5)
    first["list"].append(3)
    second = io.load_checkpoint(path)
    same("a checkpoint after a change of what an earlier load returned", second, expected)
    save(io, {"t": torch.ones(2000), "list": [9]}, path)
    same("what a load returned before the checkpoint was replaced", second, expected)
    third = io.load_checkpoint(path)
    same("the checkpoint that has replaced it", third["list"], [9])
    io.remove_checkpoint(path)
    same("what a load returned before the checkpoint was removed", third["t"], torch.ones(2000))


@check("CIO-28")
def repeated_teardown(context: CheckContext) -> None:
    """teardown() flushes, may be called twice and before any use, and the instance works afterwards.

    An instance that was not used pickles. Many saves and loads leave no file open and no thread behind.

    Why: teardown runs after errors too, and a Trainer fits several times.
    Fix: end what was started, and let the next save start it again.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    io.teardown()
    try:
        io = pickle.loads(pickle.dumps(io))
    except Exception as error:
        raise CheckFailed(f"an unused instance doesn't pickle ({type(error).__name__}: {error})") from error
    io.save_checkpoint(small_checkpoint(1), path)
    io.teardown()
    io.teardown()
    same(
        "what was saved before teardown()",
        load("what was saved before teardown()", context.create(), path),
        small_checkpoint(1),
    )
    save(io, small_checkpoint(2), path)
    same("what was saved after teardown()", io.load_checkpoint(path), small_checkpoint(2))
    io.teardown()
    for numbers in range(3):  # what is made once
        save(io, small_checkpoint(numbers), path)
        io.load_checkpoint(path)
    io.teardown()
    files, threads = open_files(), threading.active_count()
    for numbers in range(25):
        save(io, small_checkpoint(numbers), path)
        io.load_checkpoint(path)
        io.exists(path), io.list_checkpoints(context.folder)
    io.teardown()
    left = open_files() - files
    require(left <= 2, f"25 saves and loads left {left} files open after teardown()")
    more = threading.active_count() - threads
    require(more <= 2, f"25 saves and loads left {more} threads after teardown()")
