"""Write one portable file from any checkpoint: in the Trainer's own format, or its weights as safetensors."""

from __future__ import annotations

import os
from typing import Any, Final

from torchhal.checkpoint._map_location import read
from torchhal.checkpoint._safetensors_file import facts_as_text, import_safetensors, save_safetensors
from torchhal.checkpoint._staged_files import refuse_existing, staged_files
from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.torch_file import TorchCheckpointIO
from torchhal.errors import CheckpointMismatchError

TRAINING: Final = (
    "optimizer_states", "lr_schedulers", "trained_by", "frozen", "precision", "strategy", "callbacks", "loops",
    "ranks", "rank_states", "gradients", "digests", "current_model_state", "averaging_state",
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
        import_safetensors()  # before anything is read
    own = TorchCheckpointIO()
    refuse_existing(target, force=force)
    # what one file holds is verified as a whole; of many, each part is when it is read
    content = io.open_checkpoint(source) if "sharded" in io.features else io.load_checkpoint(source)
    if weights_only or as_safetensors:
        content = {key: value for key, value in content.items() if key not in TRAINING}
    if as_safetensors:
        return _save_weights(content, source, target)
    own.save_checkpoint(read(content), target)
    return {}


def _save_weights(content: dict[str, Any], source: str, target: str) -> dict[str, str]:
    state = content.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointMismatchError(
            f"{source!r} is no checkpoint of a Trainer: it has no 'state_dict' (it has "
            f"{', '.join(map(str, list(content)[:8]))})"
        )
    with staged_files(target) as folder:
        return save_safetensors(state, folder / os.path.basename(target), facts_as_text(content))
