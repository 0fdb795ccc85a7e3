"""Checkpoints of {{ cookiecutter.project_name }}."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchhal.checkpoint import TorchCheckpointIO


class {{ cookiecutter.__class }}CheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that writes torch's file, in one step and with a checksum.

    Copy tensors to host memory here that only the vendor's packages can read: whoever loads the file need not have
    them. For another format derive from :class:`torchhal.checkpoint.CheckpointIO`.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
