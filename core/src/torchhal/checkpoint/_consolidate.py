"""Write one portable file from any checkpoint: in the Trainer's own format, or its weights as safetensors."""

from __future__ import annotations

import json
import os
from typing import Any, Final

import torch

from torchhal.checkpoint._inspection import is_tensor
from torchhal.checkpoint._local_file import atomic_replace, sync_file
from torchhal.checkpoint._map_location import read
from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.torch_file import TorchCheckpointIO
from torchhal.errors import CheckpointError, CheckpointMismatchError

TRAINING: Final = (
    "optimizer_states", "lr_schedulers", "trained_by", "frozen", "precision", "strategy", "callbacks", "loops",
    "ranks", "rank_states", "gradients", "digests",
)  # fmt: skip
"""Fields that are only needed to continue a run."""


def consolidate(
    io: CheckpointIO, source: str, target: str, *, weights_only: bool = False, force: bool = False
) -> dict[str, str]:
    """Write the checkpoint of ``io`` at ``source`` as the one file ``target``. Holds its tensors once, and no more.

    ``target`` is in the format of the IO ``torch``, which a Trainer loads under any strategy. If it ends in
    ``.safetensors`` only the weights are written, in the format of that name.

    Args:
        io: the checkpoint IO that recognises ``source``.
        source: a path or URL of a completed checkpoint.
        target: the new file.
        weights_only: leave out what is only needed to continue a run, such as the optimizer's state.
        force: replace a ``target`` that exists.

    Returns:
        The weights that ``target`` holds under another name only, each with that name: safetensors supports no weights
        that share memory. Empty for a file of torch's.

    Raises:
        CheckpointError: ``target`` exists, or can't be written; safetensors isn't installed, or can't hold a value
            of the state_dict; ``source`` is damaged.
    """
    as_safetensors = target.endswith(".safetensors")
    if as_safetensors:
        _import_safetensors()  # before anything is read
    own = TorchCheckpointIO()
    if not force and (os.path.lexists(target) or own.exists(target)):
        raise CheckpointError(f"{target!r} exists already: choose another name, or replace it with --force")
    # what one file holds is verified as a whole; of many, each part is when it is read
    content = io.open_checkpoint(source) if "sharded" in io.features else io.load_checkpoint(source)
    if weights_only or as_safetensors:
        content = {key: value for key, value in content.items() if key not in TRAINING}
    if as_safetensors:
        return _save_weights(content, source, target)
    own.save_checkpoint(read(content), target)
    return {}


def _import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "a file that ends in .safetensors is written by safetensors, which can't be imported "
            f"({error}): pip install torchhal[safetensors], or choose another ending for a file of torch's"
        ) from error
    return safetensors.torch


def _save_weights(content: dict[str, Any], source: str, target: str) -> dict[str, str]:
    state = content.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointMismatchError(
            f"{source!r} is no checkpoint of a Trainer: it has no 'state_dict' (it has "
            f"{', '.join(map(str, list(content)[:8]))})"
        )
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    storages: set[int] = set()
    for name, value in state.items():
        if not is_tensor(value) or (isinstance(value, torch.Tensor) and value.layout is not torch.strided):
            what = f"a tensor of layout {value.layout}" if is_tensor(value) else f"a {type(value).__name__}"
            raise CheckpointError(
                f"{name!r} of {source!r} is {what}, and safetensors holds dense tensors only: choose another ending "
                "than .safetensors, with --weights-only"
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
    # as safetensors.torch.save_model writes it, so that its load_model ties them
    metadata = {"format": "pt", **tied}
    for key in ("torchhal_version", "epoch", "global_step"):
        if key in content:
            metadata.setdefault(key, content[key] if isinstance(content[key], str) else json.dumps(content[key]))
    try:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        with atomic_replace(target) as temporary:
            _import_safetensors().save_file(tensors, temporary, metadata=metadata)
            sync_file(temporary)
    except Exception as error:
        raise CheckpointError(f"{target!r} could not be saved ({type(error).__name__}: {error})") from error
    return tied
