"""CIO-67 to CIO-69: names that look like patterns, names that are links, and saves that take long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import load, save, small_checkpoint

_PATTERNS: Final = {
    "best[val].ckpt": "bestv.ckpt", "loss*.ckpt": "loss-1.ckpt", "step?.ckpt": "step1.ckpt", "{a,b}.ckpt": "a.ckpt",
    "a(1)+$.ckpt": "a1.ckpt", "x#y;z&.ckpt": "x.ckpt",
}  # fmt: skip
"""Names with the characters of patterns -> one that such a pattern would match, or that is left without them."""


@check("CIO-67", since="0.2", needs=["posix"], after=("CIO-11", "CIO-13"))
def names_like_patterns(context: CheckContext) -> None:
    """A name with brackets, stars or question marks is this one name: in saves, loads, lists and removals.

    So are those of its folder.

    Why: "best[val].ckpt" was never removed, and "bestv.ckpt", which another run had saved, was.
    Fix: escape names in glob and re, or compare them.
    """
    io = context.create()
    for number, (name, other) in enumerate(_PATTERNS.items()):
        folder = context.folder / f"run[{number}]*"
        folder.mkdir()
        path, beside = folder / name, folder / other
        save(io, small_checkpoint(1), beside)
        require(not io.exists(path), f"{name!r} exists, of which {other!r} alone was saved")
        save(io, small_checkpoint(2), path)
        same(f"the checkpoint {name!r}", load(repr(name), io, path), small_checkpoint(2))
        listed = sorted(os.path.basename(os.fspath(one)) for one in io.list_checkpoints(folder))
        same(f"the checkpoints beside {name!r}", listed, sorted((name, other)))
        io.remove_checkpoint(path)
        require(not io.exists(path), f"{name!r} exists after its removal")
        same(f"{other!r} after the removal of {name!r}", load(repr(other), io, beside), small_checkpoint(1))


@check("CIO-68", since="0.2", needs=["posix"], after=("CIO-13",))
def name_that_is_a_link(context: CheckContext) -> None:
    """A save to a path that is a symbolic link replaces the link; what it pointed to stays.

    Why: "last.ckpt", a link to the best checkpoint, was saved: the best one was gone, and the last one with it later.
    Fix: write beside the path and rename; don't resolve it.
    """
    io, best, last = context.create(), context.folder / "best.ckpt", context.folder / "last.ckpt"
    save(io, small_checkpoint(1), best)
    last.symlink_to(best, target_is_directory=best.is_dir())
    save(io, small_checkpoint(2), last)
    same("what the link pointed to, after a save to it", load("best.ckpt", io, best), small_checkpoint(1))
    same("the checkpoint that was saved to a link", load("last.ckpt", io, last), small_checkpoint(2))
    io.remove_checkpoint(best)
    same("the checkpoint after a removal of the other", load("last.ckpt", io, last), small_checkpoint(2))


_LONG: Final = 12.0
"""Seconds of a write: more than the patience of ten that waits often have."""


@check("CIO-69", since="0.2", features=["async"], timeout=60, after=("CIO-17",))
def save_that_takes_long(context: CheckContext) -> None:
    """wait() returns when a save is durable that takes twelve seconds.

    Asked of an IO that writes in this process.

    Why: a checkpoint of a slow disk was reported and linked, and the one before it deleted, while it wasn't there yet.
    Fix: wait without a limit; a limit belongs to the file system.
    """
    slept = threading.Event()

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not slept.is_set():
                slept.set()
                time.sleep(_LONG)
            return real(*arguments, **options)

        return call

    io, path = context.create(), context.folder / "x.ckpt"
    replaced: dict[str, Any] = {name: slow(getattr(os, name)) for name in ("fsync", "replace", "rename", "link")}
    with mock.patch.multiple(os, **replaced):
        io.save_checkpoint(small_checkpoint(3), path)
        io.wait()
        there = context.create().exists(path)
        if slept.is_set() and not there:
            time.sleep(_LONG)  # what writes still does so into this folder
    if not slept.is_set():
        raise NotApplicable("it doesn't write in this process")
    require(there, f"wait() returned before a save that takes {_LONG:g} s was there")
    same("a checkpoint after wait()", load("x.ckpt", io, path), small_checkpoint(3))
