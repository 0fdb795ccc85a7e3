"""Write a state dict as a safetensors file: dense tensors, each memory once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from torchhal.checkpoint._inspection import is_tensor
from torchhal.errors import CheckpointError


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "a file that ends in .safetensors is written by safetensors, which can't be imported "
            f"({error}): pip install torchhal[safetensors], or choose another ending for a file of torch's"
        ) from error
    return safetensors.torch


def facts_as_text(content: Mapping[str, Any]) -> dict[str, str]:
    """Return version, epoch and step of a checkpoint, as the metadata of a file of another format hold them."""
    found = {key: content[key] for key in ("torchhal_version", "epoch", "global_step") if key in content}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}


def save_safetensors(
    state: Mapping[str, Any], path: str | os.PathLike[str], facts: Mapping[str, str]
) -> dict[str, str]:
    """Write the tensors of ``state`` to the new file ``path``, and return the names that share another's memory.

    safetensors supports no tensors that share memory, and none with gaps. Of names for one tensor, such as those of
    tied weights, the first is written and the others stand in the metadata, as ``safetensors.torch.save_model`` writes
    it, so that its ``load_model`` ties them. A part of another tensor's memory becomes a copy.

    Args:
        state: names to tensors, or to objects with ``read()`` that return one.
        path: a local file.
        facts: further metadata.

    Returns:
        Name to the name that it is in the file as.

    Raises:
        CheckpointError: a value that is no dense tensor; the message names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    storages: set[int] = set()
    for name, value in state.items():
        if not is_tensor(value) or (isinstance(value, torch.Tensor) and value.layout is not torch.strided):
            what = f"a tensor of layout {value.layout}" if is_tensor(value) else f"a {type(value).__name__}"
            raise CheckpointError(
                f"{name!r} of the state_dict is {what}, and safetensors holds dense tensors only: choose another "
                "format, such as a file of torch's by torchhal checkpoint consolidate --weights-only"
            )
        tensor = value.detach() if isinstance(value, torch.Tensor) else value.read()
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if memory in names:
            tied[name] = names[memory]
            continue
        names[memory] = name
        tensor = tensor.contiguous()
        start = tensor.untyped_storage().data_ptr()
        if tensor.numel() and start in storages:  # a part of another's memory
            tensor = tensor.clone()
        storages.add(start)
        tensors[name] = tensor
    import_safetensors().save_file(tensors, path, metadata={"format": "pt", **facts, **tied})
    return tied
