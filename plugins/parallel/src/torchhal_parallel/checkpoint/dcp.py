"""Save sharded checkpoints: a folder that every rank writes its part into, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from torchhal.checkpoint import FolderCheckpointIO, TorchCheckpointIO, inspect_contents
from torchhal.errors import CheckpointCorruptError, CheckpointError, TorchhalError
from torchhal_parallel.checkpoint._flatten import as_plain, flatten, merge_flat, share, unflatten
from torchhal_parallel.checkpoint._lazy_tensor import StoredTensor
from torchhal_parallel.checkpoint._reference import Reference
from torchhal_parallel.checkpoint._safe_reader import METADATA, CheckedReader, checksums, quiet
from torchhal_parallel.checkpoint._shared_memory import shared_memory

PLAIN = "plain.ckpt"
"""What isn't a tensor, where the tensors belong, and the checksums of their records: written last."""

WITHOUT_VIEWS, WITH_VIEWS = FORMATS = (1, 2)
"""Formats of ``plain.ckpt``: a reader of the first knows no places in the memory of another tensor."""


class DCPCheckpointIO(FolderCheckpointIO):
    """One folder per checkpoint: each rank's tensors in files of its own, everything else in ``plain.ckpt``.

    Any number of ranks, under any strategy, loads it. Every rank reads only what it needs of each tensor; each record
    has a checksum that is verified when it is read, and nothing in the folder is ever executed. Views of a dense tensor
    that the same rank saves are saved as such, read with all of that tensor, and share its memory after a load.

    A save writes into a folder beside the target and renames it when all ranks are done: the path holds the old
    checkpoint or the new one. Local and shared file systems; all ranks must have access to it.
    """

    features: ClassVar[frozenset[str]] = frozenset({"atomic", "checksum", "sharded", "reshard", "links"})

    marker = PLAIN
    described = "sharded checkpoint"

    # -- save ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.check_arguments(checkpoint, storage_options)
        target = Path(path)
        failure: str | None = None
        plain: Any = None
        tensors: dict[str, Any] = {}
        shared: dict[str, Reference] = {}
        try:
            plain, tensors = flatten(checkpoint)
            shared = shared_memory(tensors)
            inspect_contents(as_plain(plain))  # before it is sent: what can't be saved can't be sent either
        except Exception as error:
            failure, plain, tensors, shared = f"{type(error).__name__}: {error}", {}, {}, {}
        sharded = {name: isinstance(tensor, DTensor) for name, tensor in tensors.items()}
        contributions = self.gather_results((sharded, plain, shared), failure, target)
        with self.new_folder(target) as temporary:
            self._write(target, temporary, tensors, contributions)

    def _write(self, target: Path, temporary: Path, tensors: dict[str, Any], contributions: list[Any]) -> None:
        failure: str | None = None
        sums: dict[str, int] = {}
        # of a tensor that several ranks have whole, the first rank's is saved: torch would mix them
        first: dict[str, int] = {}
        for rank, (names, _, _) in enumerate(contributions):
            for name in names:
                first.setdefault(name, rank)
        # a view, if the tensor whose memory it lies in is saved by the same rank
        views = {
            name: reference
            for rank, (_, _, shared) in enumerate(contributions)
            for name, reference in shared.items()
            if first[name] == first[reference.name] == rank
        }
        mine = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, DTensor) or (first[name] == self.rank and name not in views)
        }
        try:
            with quiet():
                save(
                    mine,
                    storage_writer=FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True),
                    process_group=self.group,
                    no_dist=len(contributions) == 1,
                )
            sums = checksums(temporary, self.rank)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            failure = self.describe_failure(error)
        sums_by_rank = self.gather_results(sums, failure, target)

        def content() -> dict[str, Any]:
            in_parts = any(reference.place is not None for reference in views.values())
            return {
                "format": WITH_VIEWS if in_parts else WITHOUT_VIEWS,
                "plain": as_plain(share(merge_flat([plain for _, plain, _ in contributions]), views)),
                "sums": {key: value for part in sums_by_rank for key, value in part.items()},
                "metadata": zlib.crc32((temporary / METADATA).read_bytes()),
            }

        self.finish_save(temporary, target, content)

    def describe_failure(self, error: BaseException) -> str:
        """Return the error behind torch's CheckpointException, which hides each rank's own."""
        failures = getattr(error, "failures", None)
        if failures:
            error = next(iter(failures.values()))[0]
        behind: BaseException | None = error
        while behind is not None:
            if isinstance(behind, OSError):  # of a full disk torch.save makes an "enforce fail", without its cause
                return super().describe_failure(behind)
            behind = behind.__cause__ or behind.__context__
        while error.__cause__ is not None and not isinstance(error, TorchhalError):
            error = error.__cause__
        return super().describe_failure(error)

    # -- load ------------------------------------------------------------------------------------------------

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the checkpoint with a :class:`StoredTensor` for each tensor, to be read where its layout is known."""
        folder, content = self._open(path)
        reader = CheckedReader(folder, content["sums"], content["metadata"])
        reader.check_files()
        known = reader.read_metadata().state_dict_metadata

        def stand_in(reference: Reference) -> StoredTensor:
            about = known.get(reference.name)
            if not isinstance(about, TensorStorageMetadata):
                raise CheckpointCorruptError(f"{str(path)!r} lacks the tensor {reference.name!r}")
            dtype, saved = about.properties.dtype, about.size
            if reference.place is None:
                return StoredTensor(reference.name, saved, dtype, reader.read_into, saved)
            size, stride, offset = reference.place
            last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
            if last >= saved.numel() or min(0, *size, *stride, offset) < 0:
                raise CheckpointCorruptError(f"{str(path)!r} has a view that reaches beyond {reference.name!r}")
            return StoredTensor(reference.name, torch.Size(size), dtype, reader.read_into, saved, (stride, offset))

        opened: dict[str, Any] = unflatten(content["plain"], stand_in)
        return opened

    def _open(self, path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
        folder = Path(path)
        if not folder.is_dir():
            if folder.is_file():
                raise CheckpointError(f"{str(path)!r} is a file, no sharded checkpoint: load it with the IO 'torch'")
            raise FileNotFoundError(errno.ENOENT, "no checkpoint at this path", str(path))
        try:
            content = TorchCheckpointIO().load_checkpoint(folder / PLAIN)
        except FileNotFoundError as error:
            if (folder / METADATA).exists():
                raise CheckpointCorruptError(
                    f"{str(folder / PLAIN)!r} is missing, which is written last: the checkpoint was never finished, or "
                    "copied in part"
                ) from error
            raise FileNotFoundError(
                errno.ENOENT, f"no sharded checkpoint: the folder has no {PLAIN}", str(path)
            ) from error
        if content.get("format") not in FORMATS:
            raise CheckpointError(
                f"{str(path)!r} is a sharded checkpoint of format {content.get('format')!r}, and this "
                f"torchhal-parallel reads formats {' and '.join(map(str, FORMATS))}"
            )
        return folder, content

    # -- what is there ---------------------------------------------------------------------------------------

    def exists(self, path: str | os.PathLike[str]) -> bool:
        folder = Path(path)
        return super().exists(folder) and (folder / METADATA).is_file() and TorchCheckpointIO().exists(folder / PLAIN)

    def recognizes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a folder of torch's distributed checkpoints is at ``path``, even if it was never finished."""
        return any(os.path.isfile(os.path.join(path, name)) for name in (PLAIN, METADATA))
