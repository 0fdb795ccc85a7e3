"""CIO: checkpoints opened for inspection, and the errors of those that can't be loaded."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.errors import CheckpointError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import Custom, checkpoint_files, save, small_checkpoint


def _read(value: Any) -> Any:
    """Return ``value`` with every stand-in of a tensor replaced by what it reads."""
    if isinstance(value, dict):
        return {key: _read(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_read(one) for one in value)
    if not isinstance(value, torch.Tensor) and hasattr(value, "read") and hasattr(value, "shape"):
        return value.read()
    return value


@check("CIO-40", since="0.2", after=("CIO-01",))
def inspection(context: CheckContext) -> None:
    """open_checkpoint returns the dictionary that was saved; its tensors have values, on the CPU, when they are read.

    Nothing at the path is a FileNotFoundError, and what is no checkpoint a CheckpointError.

    Why: a tool that shows a checkpoint must not need an interface of its own for each format.
    Fix: leave the inherited open_checkpoint, which loads, or return objects with shape, dtype and read().
    """
    io, path = context.create(), context.folder / "x.ckpt"
    state = {**small_checkpoint(3), "nest": [torch.ones(2, dtype=torch.bfloat16), {"text": "a"}]}
    save(io, state, path)
    found = _read(io.open_checkpoint(path))
    same("an opened checkpoint", found, state)
    same("the device of a tensor", found["weights"]["w"].device.type, "cpu")
    raises("open_checkpoint of nothing", FileNotFoundError, lambda: io.open_checkpoint(context.folder / "none"))
    for file in checkpoint_files(path):
        file.write_bytes(b"no checkpoint")
    raises("open_checkpoint of another file", CheckpointError, lambda: _read(io.open_checkpoint(path)))
    raises("load_checkpoint of another file", CheckpointError, lambda: io.load_checkpoint(path))


@check("CIO-41", since="0.2")
def refused_class(context: CheckContext) -> None:
    """A class that weights_only refuses is a CheckpointError: of the save, with its key, or of the load, with its name.

    The load with weights_only=False returns it, where the save let it through.

    Why: the run that saved it ends well, and the one that resumes has lost its checkpoint.
    Fix: refuse such values in save_checkpoint, and raise CheckpointError from a load.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    try:
        save(io, {**small_checkpoint(), "odd": Custom()}, path)
    except CheckpointError as error:
        require("odd" in str(error), f"the message must name the key 'odd' (got {error})")
        require(not io.exists(path), "a refused save left a checkpoint")
    else:
        raises("a load of a refused class", CheckpointError, lambda: io.load_checkpoint(path), "Custom")
        require(isinstance(io.load_checkpoint(path, weights_only=False)["odd"], Custom), "the value was lost")
    torch.save({**small_checkpoint(), "odd": Custom()}, context.folder / "plain")
    foreign = context.folder / "plain"
    raises("a load of a foreign file with a refused class", CheckpointError, lambda: io.load_checkpoint(foreign))
