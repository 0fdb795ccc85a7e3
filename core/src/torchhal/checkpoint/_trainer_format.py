"""Check that a checkpoint is a Trainer's, in the format that this release reads."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from torchhal.errors import CheckpointMismatchError

FORMAT = 1

RUN_KEY: Final = "run_facts"
"""Field with what a run consisted of: versions, aliases of its components, the class of its model."""


def target_of(model: type) -> str:
    """Return ``"package.module:Class"``, the form in which ``--model`` names a class."""
    module = "__main__" if model.__module__ == "__mp_main__" else model.__module__
    return f"{module}:{model.__qualname__}"


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


def check_dtypes(state_dict: Mapping[str, Any], module: nn.Module, path: str) -> None:
    """Raise CheckpointMismatchError for weights of another kind than the module's parameters.

    torch would cast integers and complex numbers to floats, or back, without a warning.
    """
    for name, parameter in module.named_parameters():
        saved = getattr(state_dict.get(name), "dtype", None)
        if isinstance(saved, torch.dtype) and _kind(saved) != _kind(parameter.dtype):
            raise CheckpointMismatchError(
                f"{path!r} (field 'state_dict'): {name!r} is of {saved}, and that of {type(module).__name__} of "
                f"{parameter.dtype}: no save of this model wrote it. Continue from another checkpoint"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
