"""Define what an export reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Export:
    """What :func:`export` has written.

    Attributes:
        path: the exported file.
        format: ``"safetensors"``, ``"torch_export"`` or ``"onnx"``.
        weights: which weights of the checkpoint these are: ``"state_dict"``, ``"average"`` or ``"running"``.
        parameters: elements of all parameters; without a model of all tensors.
        dtypes: those of the weights, such as ``("float32",)``.
        tied: names of the state_dict that are in a safetensors file under another name only -> that name.
        max_difference: the largest absolute difference between outputs of the file and of the module; None where they
            were not compared.
        batch_sizes: those at which they were compared.
        notes: what a user should know about it.

    .. versionadded:: 0.2
    """

    path: str
    format: str
    weights: str
    parameters: int
    dtypes: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    max_difference: float | None = None
    batch_sizes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
