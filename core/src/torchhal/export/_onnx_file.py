"""Export to ONNX, by ``torch.export`` and onnxscript."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal.export._compare import compare
from torchhal.export._example_input import ExampleInput, tensors_in
from torchhal.export._torch_export_file import export_program

ONE_FILE: Final = 1_900_000_000
"""Bytes of weights up to which they are in the file itself: protobuf reads messages of less than 2 GiB."""


def save_onnx(
    module: nn.Module, inputs: ExampleInput, path: Path, facts: Mapping[str, str]
) -> tuple[float | None, tuple[int, ...], tuple[str, ...]]:
    """Write the model to ``path`` and compare it with the module, where onnxruntime is installed.

    Large weights are in a second file, ``path`` with ``.data`` behind it.

    Returns:
        The largest difference, the batch sizes at which it was looked for, and notes.
    """
    program = export_program(module, inputs)
    shapes = inputs.dynamic_shapes(module, "batch")
    try:
        with _quiet():
            model: Any = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=shapes)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{type(module).__name__} can't be exported to ONNX ({type(error).__name__}: {reason[:600]}). As "
            "torch.export's program, a file that ends in .pt2, it can"
        ) from error
    model.model.metadata_props.update(facts)
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    model.save(str(path), external_data=size > ONE_FILE)
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None, (), ("its outputs were not compared with the module's: onnxruntime is not installed",)
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()})
        return (
            None,
            (),
            (
                f"its outputs were not compared with the module's: onnxruntime can't run it on the CPU, in "
                f"{', '.join(dtypes)} ({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            ),
        )
    names = [each.name for each in session.get_inputs()]

    def compute(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        values = [tensor.numpy() for tensor in tensors_in((arguments, keywords))]
        return [torch.as_tensor(value) for value in session.run(None, dict(zip(names, values, strict=True)))]

    difference, sizes = compare(module, inputs, compute, "ONNX")
    return difference, sizes, ()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the exporter's warnings of packages that it doesn't need, such as torchvision."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
