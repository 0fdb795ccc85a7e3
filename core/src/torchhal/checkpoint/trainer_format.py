"""Check that a checkpoint is a Trainer's, in the format that this release reads."""

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


def check_has_weights(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointMismatchError for a file without a Trainer's ``state_dict``, as a bare state dict is."""
    if "state_dict" not in checkpoint:
        raise CheckpointMismatchError(
            f"{path!r} is no checkpoint of a Trainer: it has no 'state_dict' (it has "
            f"{', '.join(map(str, list(checkpoint)[:8]))}). If it is a state dict itself, load it by "
            f"load_state_dict(torch.load({path!r}))"
        )
