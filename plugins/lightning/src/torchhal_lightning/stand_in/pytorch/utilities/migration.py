"""Read the version of a checkpoint that Lightning has written."""

from __future__ import annotations

from typing import Any

from torchhal.errors import CheckpointCorruptError


def migrate_checkpoint(checkpoint: dict[str, Any], target_version: str | None = None) -> tuple[dict[str, Any], Any]:
    """Return a checkpoint of Lightning 2; Lightning itself reads older ones.

    Raises:
        CheckpointCorruptError: an older one.
    """
    version = str(checkpoint["pytorch-lightning_version"])
    if not version.partition(".")[0].isdecimal() or int(version.partition(".")[0]) < 2:
        raise CheckpointCorruptError(
            f"it is of Lightning {version}, and without Lightning only those of 2.0 and later are read: pip install "
            "lightning, or upgrade it there (python -m lightning.pytorch.utilities.upgrade_checkpoint)"
        )
    return checkpoint, {}
