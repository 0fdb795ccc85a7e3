"""The number of the format in which a Trainer lays out a checkpoint, and its check."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from torchhal.errors import CheckpointMismatchError

FORMAT = 1


def check_format(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointMismatchError for a checkpoint in another format; one without a number passes."""
    found = checkpoint.get("torchhal_format", FORMAT)
    if type(found) is not int or found != FORMAT:
        raise CheckpointMismatchError(
            f"{path!r} has the format {reprlib.repr(found)} (field 'torchhal_format', written by torchhal "
            f"{checkpoint.get('torchhal_version')}), and this torchhal reads format {FORMAT}: install the release that "
            "wrote it, or a later one"
        )
