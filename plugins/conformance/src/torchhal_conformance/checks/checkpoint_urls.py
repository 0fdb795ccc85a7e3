"""CIO: options of storage, and URLs in the forms in which users have them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import save, small_checkpoint


@contextlib.contextmanager
def _options_of_storage() -> Iterator[list[dict[str, Any]]]:
    """Yield a list to which the options of each file system in memory are added that fsspec makes in the block."""
    try:
        from fsspec.implementations.memory import MemoryFileSystem
    except ImportError:
        raise NotApplicable("fsspec is not installed") from None
    given: list[dict[str, Any]] = []
    original = MemoryFileSystem.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        given.append(options)
        original(self, *arguments, **options)

    with mock.patch.object(MemoryFileSystem, "__init__", made):
        yield given


@check("CIO-58", since="0.2", after=("CIO-01", "CIO-24"))
def storage_options(context: CheckContext) -> None:
    """Options of storage reach fsspec with every URL: those of the instance, and over them those of a save.

    The instance's are those that its constructor was given, if it takes any. open_checkpoint, recognizes and saved_ns
    take URLs as the other methods do. A Path that was made of a URL, and has lost a slash, is refused. It applies to
    an IO with ``fsspec``.

    Why: credentials that reach the save and not the load are found when the run is resumed.
    Fix: torchhal.checkpoint.location_of(path, self.storage_options, storage_options).
    """
    if "fsspec" not in context.component.declared:
        raise NotApplicable("it takes no URLs")
    root = f"memory://torchhal-conformance-{context.folder.name}"
    path, mark = f"{root}/x.ckpt", context.folder.name
    io = context.create()
    with _options_of_storage() as given:
        io.save_checkpoint(small_checkpoint(), path, storage_options={"token": f"{mark}-call"})
        io.wait()
        same("the options of a save with some", _last(given), {"token": f"{mark}-call"})
        for name in ("load_checkpoint", "open_checkpoint", "exists", "recognizes", "saved_ns"):
            _is_url_taken(name, getattr(io, name)(path))
        _given_to_the_constructor(context, root, given)
    io.remove_checkpoint(path)
    before = os.getcwd()
    os.chdir(context.folder)
    try:
        for flat in (Path(path), Path(f"{root}/y.ckpt")):
            error = (ConfigurationError, CheckpointError)
            raises(f"a save to {flat!r}", error, partial(save, io, small_checkpoint(), flat))
        require(not os.path.exists("memory:"), "a folder 'memory:' was made")
    finally:
        os.chdir(before)


def _last(given: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of the last file system, without what fsspec adds."""
    last = given[-1] if given else {}
    return {name: value for name, value in last.items() if name in ("token", "endpoint")}


def _read(found: dict[str, Any]) -> dict[str, Any]:
    weights = {name: one.read() if hasattr(one, "read") else one for name, one in found["weights"].items()}
    return {**found, "weights": weights}


def _is_url_taken(name: str, found: Any) -> None:
    """Check the result of this method for a URL that was saved."""
    if name in ("load_checkpoint", "open_checkpoint"):
        same(f"{name} of a URL", _read(found), small_checkpoint())
    elif name == "exists":
        require(found is True, "exists() of a URL that was saved is false")
    elif name == "recognizes":
        require(type(found) is bool, f"recognizes() of a URL must be a bool (got {found!r})")
    else:
        require(type(found) is int and found > 0, f"saved_ns() of a URL must be an int above 0 (got {found!r})")


def _given_to_the_constructor(context: CheckContext, root: str, given: list[dict[str, Any]]) -> None:
    """Check options that the constructor takes, if it takes any; each call has others, as fsspec keeps what it made."""
    path, mark = f"{root}/own.ckpt", f"{context.folder.name}-own"
    try:
        io: CheckpointIO = context.create(storage_options={"token": mark, "endpoint": "e"})
    except TypeError:
        return
    save(io, small_checkpoint(), path)
    same("the options of a save", _last(given), {"token": mark, "endpoint": "e"})
    io.save_checkpoint(small_checkpoint(), path, storage_options={"token": f"{mark}-call"})
    io.wait()
    same("the options of a save, over the instance's", _last(given), {"token": f"{mark}-call", "endpoint": "e"})
    names = ("load_checkpoint", "open_checkpoint", "exists", "recognizes", "saved_ns", "list_checkpoints")
    for name in (*names, "remove_checkpoint"):
        options = {"token": f"{mark}-{name}"}
        io = context.create(storage_options=options)
        options["token"] = "changed"
        given.clear()
        getattr(io, name)(root if name == "list_checkpoints" else path)
        same(f"the options of {name}", _last(given), {"token": f"{mark}-{name}"})
    same("the list of an empty URL", io.list_checkpoints(root)[1:], [])
    raises("options that are no mapping", (TypeError, ConfigurationError), lambda: context.create(storage_options=3))
