"""Export by ``torch.export``, to a ``.pt2`` file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal.export._compare import compare
from torchhal.export._example_input import EXAMPLE_SIZE, ExampleInput, run, tensors_in

FACTS: Final = "torchhal.json"
"""Name of the file with the run's facts in the archive."""


def save_torch_export(
    module: nn.Module, inputs: ExampleInput, path: Path, facts: Mapping[str, str]
) -> tuple[float, tuple[int, ...], tuple[str, ...]]:
    """Write the program to ``path``, read it back and compare it with the module.

    Returns:
        The largest difference, the batch sizes at which it was looked for, and notes.
    """
    program = export_program(module, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the file's ending, which the user has chosen
        torch.export.save(program, path, extra_files={FACTS: json.dumps(dict(facts))})
        loaded: Any = torch.export.load(path).module()
    difference, sizes = compare(
        module, inputs, lambda *args, **kwargs: tensors_in(loaded(*args, **kwargs)), "torch.export's program"
    )
    return difference, sizes, ()


def export_program(module: nn.Module, inputs: ExampleInput) -> Any:
    """Return ``torch.export``'s program of the module's ``forward``, with a free batch dimension.

    Raises:
        ModelError: torch.export can't trace it; the reason is chained.
    """
    run(module, inputs, EXAMPLE_SIZE)
    arguments, keywords = inputs.at(EXAMPLE_SIZE)
    shapes = inputs.dynamic_shapes(module, torch.export.Dim("batch"))
    try:
        with torch.no_grad():
            return torch.export.export(module, arguments, keywords, dynamic_shapes=shapes)
    except Exception as error:
        reason = " ".join(str(error).split())
        remedy = (
            "Take sizes from the input, as x.shape[0], or export with fixed shapes: dynamic_batch=False, --fixed-shapes"
        )
        raise ModelError(
            f"{type(module).__name__}.forward can't be exported for the input {inputs} ({type(error).__name__}: "
            f"{reason[:600]}). " + (remedy if shapes else "See torch.export's documentation for what it can trace")
        ) from error
