"""Write and read checkpoints of DeepSpeed's engine: a folder, every rank its part of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.distributed.tensor import DTensor

from torchhal.checkpoint import FolderCheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointError
from torchhal_deepspeed._partitioned_tensors import (
    Files,
    StoredPart,
    StoredTensorRef,
    checksum,
    decode_refs,
    encode_refs,
    in_engine,
    map_containers,
)

PLAIN: Final = "torchhal.ckpt"
"""What the engine doesn't write, and where in its files the parts of each tensor are: written last."""

FORMAT: Final = 1


class DeepSpeedCheckpointIO(FolderCheckpointIO):
    """One folder per checkpoint: the engine's own files, and ``torchhal.ckpt`` with everything else.

    The engine's files are as any program with DeepSpeed writes them, so that its tools take the folder
    (``zero_to_fp32.py``, ``ds_to_universal``). torchhal reads them itself: any number of ranks, under any strategy and
    any stage, and without executing what they hold.

    A save writes into a folder beside the target and renames it when all ranks are done: the path holds the old
    checkpoint or the new one. Local and shared file systems; all ranks must see one.
    """

    features: ClassVar[frozenset[str]] = frozenset({"atomic", "checksum", "sharded", "reshard", "links"})
    marker: ClassVar[str] = PLAIN
    described: ClassVar[str] = "checkpoint of torchhal-deepspeed"

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
        with self.new_folder(target) as temporary:
            self._write(checkpoint, target, temporary)

    def _write(self, checkpoint: dict[str, Any], target: Path, temporary: Path) -> None:
        found = list(in_engine(checkpoint))
        failure: str | None = None
        sums: dict[str, int] = {}
        parts: dict[tuple[str, str | None], StoredPart] = {}
        try:
            _check_whole(checkpoint)
        except CheckpointError as error:
            failure = str(error)
        if found:
            files = found[0].files
            written = files.save(temporary)
            try:
                if written.failure is not None:
                    raise written.failure
                for item in found:
                    part = files.stored_part(item.name, item.key)
                    if part is not None:
                        parts[item.name, item.key] = part
                sums = {str(file.relative_to(temporary)): checksum(file) for file in written.files}
            except Exception as error:
                failure = self.describe_failure(error)
        written_by_rank = self.gather_results((sums, parts), failure, target)
        sums_of_all = {file: value for own, _ in written_by_rank for file, value in own.items()}

        def content() -> dict[str, Any]:
            places: dict[tuple[str, str | None], list[tuple[Any, ...]]] = {}
            for _, own in written_by_rank:
                for item, part in own.items():
                    places.setdefault(item, []).append(tuple(part))
            return {"format": FORMAT, "plain": encode_refs(checkpoint), "parts": places, "sums": sums_of_all}

        folders = {(temporary / file).parent for file in sums_of_all}
        self.finish_save(temporary, target, content, folders=folders)

    # -- load ------------------------------------------------------------------------------------------------

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the checkpoint with a ``StoredTensorRef`` for each tensor that the engine wrote."""
        folder = Path(path)
        if not folder.is_dir():
            if folder.is_file():
                raise CheckpointError(f"{str(path)!r} is a file, no folder of DeepSpeed's: load it with the IO 'torch'")
            raise FileNotFoundError(errno.ENOENT, "no checkpoint at this path", str(path))
        try:
            content = TorchCheckpointIO().load_checkpoint(folder / PLAIN)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"no checkpoint of torchhal-deepspeed: the folder has no {PLAIN}", str(path)
            ) from error
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(path)!r} is a DeepSpeed checkpoint of format {content.get('format')!r}, and this "
                f"torchhal-deepspeed reads format {FORMAT}"
            )
        files = Files(folder, content["sums"])

        def stand_in(name: str, key: str | None, shape: torch.Size, dtype: torch.dtype) -> StoredTensorRef:
            parts = tuple(StoredPart(*part) for part in content["parts"].get((name, key), ()))
            return StoredTensorRef(shape, dtype, parts, files)

        opened: dict[str, Any] = decode_refs(content["plain"], stand_in)
        return opened


def _check_whole(nest: Any) -> Any:
    """Raise CheckpointError for a tensor that another strategy has divided."""
    if isinstance(nest, DTensor):
        raise CheckpointError(
            "the IO 'deepspeed' saves what DeepSpeed's engine holds, and another strategy's sharded tensors it doesn't "
            "know: use plugins=['dcp']"
        )
    return map_containers(nest, _check_whole)
