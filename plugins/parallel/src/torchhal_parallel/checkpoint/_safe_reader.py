"""Read a folder of ``torch.distributed.checkpoint`` that may be damaged or hostile."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from torchhal.errors import CheckpointCorruptError, CheckpointError

METADATA = ".metadata"

_AGAIN = "copy the whole folder again, or continue from another checkpoint"

# What the metadata of dense tensors consists of; a pickle may name nothing else.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},  # where Python 3.13 has them
    "collections": {"OrderedDict"},
    "torch.distributed.checkpoint.api": set(),
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warning that one process saves or loads alone, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle a member of an Enum
            return _enum_member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of tensors needs")


def _enum_member(cls: Any, name: Any) -> Any:
    """Return a member of an Enum that :data:`_ALLOWED` names, and nothing else that ``getattr`` could reach."""
    if isinstance(cls, EnumMeta) and isinstance(name, str) and name in cls.__members__:
        return cls.__members__[name]
    raise pickle.UnpicklingError(f"it reads the attribute {name!r} of {cls!r}, which no metadata of tensors needs")


class CheckedReader(FileSystemReader):
    """A reader that verifies each record's checksum before it is used, and executes nothing.

    Args:
        folder: the checkpoint.
        sums: what :func:`checksums` gave on each rank; None while the checkpoint is being written.
        metadata_sum: CRC-32 of the metadata file, or None.
    """

    def __init__(self, folder: Path, sums: dict[str, int] | None, metadata_sum: int | None) -> None:
        super().__init__(folder)
        self.folder = folder
        self.sums = sums
        self.metadata_sum = metadata_sum
        self._metadata: Metadata | None = None
        self._verified: set[str] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            try:
                data = (self.folder / METADATA).read_bytes()
            except FileNotFoundError as error:
                raise self._corrupt(METADATA, "is missing") from error
            except OSError as error:
                raise CheckpointError(f"{str(self.folder / METADATA)!r} can't be read: {error}") from error
            if self.metadata_sum is not None and zlib.crc32(data) != self.metadata_sum:
                raise self._corrupt(METADATA, "is damaged: its checksum is wrong")
            try:
                self._metadata = _Unpickler(io.BytesIO(data)).load()
            except Exception as error:
                raise CheckpointCorruptError(f"{str(self.folder / METADATA)!r} is refused: {error}") from error
            if not isinstance(self._metadata, Metadata):
                raise CheckpointCorruptError(f"{str(self.folder / METADATA)!r} holds no metadata")
        return self._metadata

    def _corrupt(self, name: str, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{str(self.folder / name)!r} {what}: {_AGAIN}")

    def check_files(self) -> None:
        """Raise CheckpointCorruptError unless all files of tensors are there and as long as they were."""
        ends: dict[str, int] = {}
        for about in self.read_metadata().storage_data.values():
            ends[about.relative_path] = max(ends.get(about.relative_path, 0), about.offset + about.length)
        for name, end in sorted(ends.items()):
            try:
                size = os.stat(self.folder / name).st_size
            except FileNotFoundError as error:
                raise self._corrupt(name, "is missing") from error
            if size < end:
                raise self._corrupt(name, f"is damaged: it has {size} bytes of at least {end}")

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """Read and verify a record for torch's reader; :meth:`read_data` makes sure that it does so for each."""
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        record = _record(sinfo)
        if self.sums is not None and zlib.crc32(data) != self.sums.get(record):
            raise self._corrupt(sinfo.relative_path, f"is damaged at byte {sinfo.offset}: its checksum is wrong")
        self._verified.add(record)
        return io.BytesIO(data)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._verified.clear()
        done = super().read_data(plan, planner)
        read = {_record(self.storage_data[item.storage_index]) for item in plan.items}
        if unverified := sorted(read - self._verified):
            raise CheckpointError(
                f"torch {torch.__version__} reads sharded checkpoints past their checksums ({unverified[0]} of "
                f"{str(self.folder)!r}), so nothing is read: use a torch that this torchhal-parallel knows"
            )
        return done

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill ``tensor``, plain or sharded, from what is saved as ``name``; nothing is sent."""
        try:
            with quiet():
                load({name: tensor}, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0] if error.failures else error
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(f"{name!r} of {str(self.folder)!r} can't be read: {cause}") from error


def _record(about: Any) -> str:
    """Return the key that checksums are known by."""
    return f"{about.relative_path}:{about.offset}"


def checksums(folder: Path, rank: int) -> dict[str, int]:
    """Return the CRC-32 of each record in the files of ``rank``, from the metadata that rank 0 has written."""
    sums = {}
    for about in CheckedReader(folder, None, None).read_metadata().storage_data.values():
        if about.relative_path.startswith(f"__{rank}_"):
            with open(folder / about.relative_path, "rb") as file:
                file.seek(about.offset)
                sums[_record(about)] = zlib.crc32(file.read(about.length))
    return sums
