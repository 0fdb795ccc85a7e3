"""CIO: values that a load with weights_only can't return, and values at the bounds of what it can."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import io as streams
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import file_sizes, save, small_checkpoint


class _Own(dict[str, Any]):
    """A dict of another class."""


class _Colour(enum.Enum):
    RED = 1


_Pair = collections.namedtuple("_Pair", ["one", "two"])


def _plain() -> Iterator[Any]:
    """Yield plain data, which every checkpoint IO has to take."""
    yield from (2**62, -(2**63), 2**64, 2**1000, -(2**1000), 0.1, float("inf"), "", "a\0b\n", True, None)
    yield from ([], (), {}, [[]], ((),), {"": {}}, {0: {1: 2}}, {None: 1, True: 2, 1.5: 3, "x": 4})
    yield from (torch.float16, torch.Size([2, 0]), torch.device("cpu"), {(1, "a"): [torch.zeros(1)]})
    shared = [1, 2]
    yield {"one": shared, "two": shared}
    yield collections.OrderedDict(b=1, a=collections.OrderedDict())
    deep: Any = 1
    for _ in range(30):
        deep = [deep]
    yield deep


def _unusual() -> Iterator[Any]:
    """Yield values that an IO may refuse; the key that messages name is in no name of theirs."""
    yield from (2**2039 - 1, -(2**2039), 2**2039, -(2**2039) - 1, 2**5000, b"", b"bytes", bytearray(b"x"), 1j)
    yield from (slice(1), range(3), {1, 2}, set(), frozenset({1}), collections.Counter("aab"), _Colour.RED, _Colour)
    yield from (_Pair(1, 2), _Own(a=1), _Own(), collections.deque([1]), collections.defaultdict(list, a=[1]), object())
    yield from (datetime.date(2024, 1, 1), PurePosixPath("a"), len, lambda: None, iter([1]), type, Ellipsis)
    yield from ({_Colour.RED: 1}, {frozenset({1}): 1}, [_Own(a=1)], {"a": (1, [{"b": lambda: None}])})
    yield from ({(1, _Colour.RED): 1}, {b"": 1}, [b""], {2**2039: 1}, ([2**2039],), {"a": _Pair(1, [2])})
    yield from ([torch.ones(1), _Own(a=torch.ones(1))], [_Own(), b"x"], {"a": [1j, {"b": _Colour.RED}]})
    shared = [_Own(a=1)]
    yield {"one": shared, "two": shared}
    tensor = torch.ones(2)
    tensor.note = lambda: None  # type: ignore[attr-defined]
    yield tensor
    tensor = torch.ones(2)
    tensor.note = "kept"  # type: ignore[attr-defined]
    yield tensor
    ordered: Any = collections.OrderedDict(a=1)
    ordered._metadata = {"version": 2}
    yield ordered
    for wrong in (lambda: None, _Own(a=1), b""):
        ordered = collections.OrderedDict(a=1)
        ordered._metadata = wrong
        yield ordered
        tensor = torch.ones(2)
        tensor.note = wrong  # type: ignore[attr-defined]
        yield tensor
    yield torch.nn.Parameter(torch.ones(2))


@check("CIO-53", since="0.2", after=("CIO-01", "CIO-41"))
def values(context: CheckContext) -> None:
    """Plain data of any form is saved; another value comes back, or is a CheckpointError of the save or of the load.

    An error of the save names the key of the value, and leaves the checkpoint that was there. An IO that derives from
    TorchCheckpointIO refuses nothing that a load of torch's with weights_only returns; another format may hold less.
    An IO whose saves refuse an object saves nothing that its loads refuse.

    Why: a save that fails for an enum in a callback's state ends the run; one that passes ends the next run.
    Fix: walk the checkpoint before a byte is written, and name the path of what a load would refuse.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    for value in _plain():
        state = {"step": 1, "nest": {"odd": [value, value]}}
        told = f"{value!r:.60}"
        try:
            save(io, state, path)
            loaded = io.load_checkpoint(path)
        except CheckpointError as error:
            raise CheckFailed(f"plain data {told} is refused: {error}") from error
        same(f"plain data {told}", loaded, state)
    strict, of_torch = _refuses(io, path), isinstance(io, TorchCheckpointIO)
    save(io, small_checkpoint(3), path)
    before = file_sizes(context.folder)
    for value in _unusual():
        state, told = {"step": 1, "nest": {"odd": [value]}}, f"a {type(value).__name__} {value!r:.60}"
        try:
            save(io, state, path)
        except CheckpointError as error:
            less = of_torch and _loads(state)
            require(not less, f"{told} is refused, though a load with weights_only returns it: {error}")
            named = "odd" in str(error) or (not _is_copied(value) and type(value).__name__ in str(error))
            require(named, f"{told}: the error must name the key 'odd' (got {error})")
            same(f"the files after {told} was refused", file_sizes(context.folder), before)
            same(f"the checkpoint after {told} was refused", io.load_checkpoint(path), small_checkpoint(3))
            continue
        except Exception as error:
            raise CheckFailed(
                f"{told}: a save must raise CheckpointError (got {type(error).__name__}: {error})"
            ) from error
        try:
            loaded = io.load_checkpoint(path)
        except CheckpointError as error:
            require(not strict, f"{told} was saved, and the load refuses it, though such a save is refused: {error}")
            loaded = None
        if loaded is not None:
            kind = torch.Tensor if isinstance(value, torch.Tensor) else type(value)
            found = loaded["nest"]["odd"][0]
            require(isinstance(found, kind), f"{told} came back as a {type(found).__name__} {found!r:.60}")
        save(io, small_checkpoint(3), path)


def _refuses(io: CheckpointIO, path: Path) -> bool:
    """Return whether the IO refuses in a save what a load with weights_only would refuse."""
    try:
        save(io, {"step": 1, "odd": object()}, path)
    except CheckpointError:
        return True
    return False


def _is_copied(value: Any) -> bool:
    """Return whether copy.deepcopy() takes ``value``: an IO that copies it first may know no key."""
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def _loads(state: dict[str, Any]) -> bool:
    """Return whether torch itself returns ``state`` with weights_only."""
    stream = streams.BytesIO()
    try:
        torch.serialization.save(state, stream)  # torch.save and torch.load may be a vendor's
        stream.seek(0)
        torch.serialization.load(stream, weights_only=True)
    except Exception:
        return False
    return True
