"""Stand in for tensors that no single rank has, in a running engine and in the folder of a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch

from torchhal.errors import CheckpointCorruptError, CheckpointError

_MARK: Final = "__engine__"
_BLOCK: Final = 1 << 22


class StoredPart(NamedTuple):
    """A stretch of a tensor in one of the engine's files.

    Args:
        file: its name in the checkpoint's folder.
        steps: keys and indices from the file's outermost value to the flat tensor that holds it.
        start: in that tensor, in elements.
        length: in elements.
        offset: where it begins in the whole, in elements.
    """

    file: str
    steps: tuple[Any, ...]
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class EngineTensorRef:
    """A stand-in, in a checkpoint to be saved, for a tensor that the engine writes itself.

    Args:
        name: of the parameter or buffer.
        key: of its optimizer state; None for the values.
        shape, dtype: of the whole.
        files: that the engine writes.
    """

    name: str
    key: str | None
    shape: torch.Size
    dtype: torch.dtype
    files: Any


@dataclass(frozen=True)
class StoredTensorRef:
    """A stand-in for a tensor in what ``open_checkpoint`` returns."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]
    files: Files

    def read(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole tensor, on the CPU; ``target`` is for stand-ins that can read less, and unused here.

        Raises:
            CheckpointCorruptError: a file is damaged, or the parts don't make a whole.
        """
        kept = self.files.read.get(self.parts)
        if kept is not None:
            return kept
        whole = torch.empty(self.shape.numel(), dtype=self.dtype)
        done = 0
        for part in self.parts:
            whole.narrow(0, part.offset, part.length).copy_(self.files.flat(part).narrow(0, part.start, part.length))
            done += part.length
        if done != whole.numel():
            raise CheckpointCorruptError(
                f"{str(self.files.folder)!r} holds {done} of {whole.numel()} elements of a tensor: a rank's part is "
                "missing"
            )
        whole = whole.view(self.shape)
        if self.parts:
            self.files.read[self.parts] = whole
        return whole


class Files:
    """The engine's files of one checkpoint, each opened once, when a tensor of it is read.

    Nothing in them is executed. Each is verified against its checksum before it is used.
    """

    def __init__(self, folder: Path, sums: Mapping[str, int]) -> None:
        self.folder = folder
        self.sums = sums
        self._open: dict[str, Any] = {}
        self.read: WeakValueDictionary[tuple[StoredPart, ...], torch.Tensor] = WeakValueDictionary()
        """Tensors that are still referenced, by their parts: of tied ones there is one."""

    def flat(self, part: StoredPart) -> torch.Tensor:
        """Return the tensor that ``part`` is a stretch of."""
        if part.file not in self._open:
            self._open[part.file] = self._read(part.file)
        value = self._open[part.file]
        try:
            for step in part.steps:
                value = value[step]
            return value.detach().flatten()  # type: ignore[no-any-return]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(f"{str(self.folder / part.file)!r} lacks {part.steps}") from error

    def _read(self, name: str) -> Any:
        path = self.folder / name
        try:
            if checksum(path) != self.sums.get(name):
                raise CheckpointCorruptError(f"{str(path)!r} is damaged: its checksum is wrong")
            with torch.serialization.safe_globals(_INERT):  # type: ignore[arg-type]
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{str(path)!r} is missing") from error
        except Exception as error:
            raise CheckpointError(f"{str(path)!r} can't be read ({type(error).__name__}: {error})") from error


class _Inert:
    """A replacement for the few classes of DeepSpeed's in its files, which hold nothing that is needed."""

    def __init__(self, *arguments: Any) -> None:
        """Accept any arguments: an enumeration's member is made from its value."""


def _inert_member(_cls: Any, _name: Any) -> _Inert:
    """Replace ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""
    return _Inert()


_INERT: Final = [
    *(
        (_Inert, f"deepspeed.{name}")
        for name in (
            "runtime.zero.config.ZeroStageEnum",
            "runtime.fp16.loss_scaler.LossScaler",
            "runtime.fp16.loss_scaler.DynamicLossScaler",
            "utils.tensor_fragment.fragment_address",
        )
    ),
    (_inert_member, "builtins.getattr"),
]


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


# -- nests of them ---------------------------------------------------------------------------------------------


def in_engine(nest: Any) -> Iterator[EngineTensorRef]:
    """Yield every :class:`EngineTensorRef` in dicts, lists and tuples."""
    if isinstance(nest, EngineTensorRef):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from in_engine(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from in_engine(value)


def encode_refs(nest: Any) -> Any:
    """Return the nest as plain data, with a mark for each :class:`EngineTensorRef`."""
    if isinstance(nest, EngineTensorRef):
        return {_MARK: (nest.name, nest.key), "shape": tuple(nest.shape), "dtype": nest.dtype}
    return map_containers(nest, encode_refs)


def decode_refs(nest: Any, make: Callable[[str, str | None, torch.Size, torch.dtype], StoredTensorRef]) -> Any:
    """Return the nest again, with what ``make`` returns for each mark."""
    if isinstance(nest, dict) and _MARK in nest:
        name, key = nest[_MARK]
        return make(name, key, torch.Size(nest["shape"]), nest["dtype"])
    return map_containers(nest, lambda value: decode_refs(value, make))


def map_containers(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to what is in dicts, lists and tuples; return the same object where nothing changes."""
    if isinstance(nest, Mapping):
        changed = {key: change(value) for key, value in nest.items()}
        return nest if all(changed[key] is value for key, value in nest.items()) else changed
    if isinstance(nest, list | tuple):
        items = [change(value) for value in nest]
        if all(item is value for item, value in zip(items, nest, strict=True)):
            return nest
        return type(nest)(items)
    return nest
