"""Provide checkpoints to save, and the steps that the checks of checkpoint IOs share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from torchhal.checkpoint import CheckpointIO
from torchhal_conformance._check import CheckFailed

MIB = 1 << 20

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


class Custom:
    """A class that a load with weights_only=True refuses."""


def save(io: CheckpointIO, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Save ``state`` and return when the checkpoint is durable."""
    io.save_checkpoint(state, path)
    io.wait()


def load(what: str, io: CheckpointIO, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a checkpoint that must exist; ``what`` names it in the failure."""
    try:
        return io.load_checkpoint(path)
    except Exception as error:
        raise CheckFailed(f"{what} can't be loaded ({type(error).__name__}: {error})") from error


def slow_data() -> list[int]:
    """Return plain data that takes long to serialize, for the first key of a checkpoint.

    What follows it, and is shared with the caller, is not yet written when an asynchronous save returns.
    """
    return list(range(200_000))


def small_checkpoint(value: float = 1.0) -> dict[str, Any]:
    return {"weights": {"w": torch.full((64,), float(value)), "b": torch.arange(5)}, "step": int(value)}


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: the path itself, or the files in its folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def file_sizes(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*"))}


def numbered_checkpoint(number: int) -> dict[str, Any]:
    return {"version": number, "x": torch.full((MIB,), float(number)), "y": [torch.full((1000,), number)] * 3}
