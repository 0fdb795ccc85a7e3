"""Export the weights of a checkpoint, or the model with them, with a model card beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from torchhal._arguments import check_bool, check_path
from torchhal.checkpoint._safetensors_file import facts_as_text, save_safetensors
from torchhal.checkpoint._staged_files import refuse_existing, sibling, staged_files
from torchhal.errors import ConfigurationError
from torchhal.export._example_input import ExampleInput
from torchhal.export._formats import check_format, require_packages
from torchhal.export._model import build_model, count_parameters
from torchhal.export._model_card import NAME as CARD
from torchhal.export._model_card import model_card as card_of
from torchhal.export._model_card import refuse_foreign_card
from torchhal.export._onnx_file import save_onnx
from torchhal.export._result import Export
from torchhal.export._torch_export_file import save_torch_export
from torchhal.export._weights import WEIGHTS, check_dtype, read_for_export
from torchhal.rng import host_generators_restored
from torchhal.suggestions import one_of

__all__ = ["Export", "export"]

_SAVE: Final = {"torch_export": save_torch_export, "onnx": save_onnx}


def export(
    checkpoint_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    model: Callable[..., nn.Module] | None = None,
    model_args: Mapping[str, Any] | Sequence[Any] | None = None,
    example_input: Any = None,
    weights: str | None = None,
    dtype: torch.dtype | str | None = None,
    dynamic_batch: bool = True,
    model_card: bool = True,
    force: bool = False,
) -> Export:
    """Write the weights of a checkpoint, or the model's ``forward`` in evaluation mode, to the file ``output``.

    The checkpoint may be of any strategy, and whatever an installed checkpoint IO reads. A file of ``torch.export`` or
    ONNX is compared with the module before it takes its name, on batches of one and of three samples; ONNX by
    onnxruntime, where that is installed. The files appear when they are complete. The states of the random-number
    generators on the host are afterwards as before.

    Args:
        checkpoint_path: a file, a folder or a URL.
        output: the new file, a path or a URL. ``README.md`` beside it becomes the model card.
        format: ``"safetensors"``, ``"torch_export"`` or ``"onnx"``; None: by the ending of ``output``,
            ``.safetensors``, ``.pt2`` or ``.onnx``.
        model: the model's class, or a function that returns one. It is called with the hyperparameters in the
            checkpoint. None: the class that the checkpoint names, if it has been imported; safetensors needs none, and
            with one checks that the weights fit.
        model_args: its arguments, by name or in order; they count more than those in the checkpoint.
        example_input: what ``forward`` is called with: a tensor, a tuple of arguments, a dict of arguments by name, or
            texts such as ``"float32[1,3,32,32]"`` and ``"mask=bool[1,32]"``. None: the module's
            ``example_input_array``. Values and batch size don't matter.
        weights: None: the checkpoint's ``state_dict``, as ``load_from_checkpoint`` gives it. ``"average"``: those that
            WeightAveraging, EMAWeightAveraging or StochasticWeightAveraging has averaged. ``"running"``: those that
            training continues from.
        dtype: of floating-point weights; None: as they are in the checkpoint.
        dynamic_batch: whether the first dimension of the input, and of all tensors in it with the same, stays free.
            False: the shapes are those of ``example_input``.
        model_card: whether to write ``README.md``.
        force: replace what is there.

    Returns:
        What was written; see :class:`Export`.

    Raises:
        ConfigurationError, TypeError: an argument outside its domain, or a package that the format needs is missing.
        CheckpointError: the checkpoint is missing, damaged or of another model; the output exists or can't be written.
        ModelError: the model can't be built or exported, or the file computes something else.

    .. versionadded:: 0.2
    """
    source, target = check_path("checkpoint_path", checkpoint_path), check_path("output", output)
    for name, flag in (("dynamic_batch", dynamic_batch), ("model_card", model_card), ("force", force)):
        check_bool(name, flag)
    chosen = check_format(format, target)
    if weights is not None and weights not in WEIGHTS:
        raise ConfigurationError(f"'weights' must be {one_of(WEIGHTS)}, or None for the state_dict (got {weights!r})")
    kind = check_dtype(dtype)
    if model is not None and (isinstance(model, nn.Module) or not callable(model)):
        raise ConfigurationError(
            f"'model' must be the model's class, or a function that returns a new model (got {type(model).__name__!r} "
            "object)"
        )
    ExampleInput.check(example_input)
    require_packages(chosen)
    if target == source:
        raise ConfigurationError(f"'output' must be another path than the checkpoint's (got {target!r})")
    refuse_existing(target, force=force)
    if model_card:
        if os.path.basename(target) == CARD:
            raise ConfigurationError(f"'output' must have another name than {CARD!r}, which is that of the model card")
        refuse_foreign_card(sibling(target, CARD), force=force)

    # an output that can't be written is found before anything is read
    with staged_files(target) as folder, host_generators_restored():
        content, state, origin, notes = read_for_export(source, weights, kind)
        module = None
        if model is not None or model_args is not None or chosen in _SAVE:
            module = build_model(model, model_args, content, state, source)
        path = folder / os.path.basename(target)
        tied: Mapping[str, str] = {}
        difference: float | None = None
        sizes: tuple[int, ...] = ()
        facts = facts_as_text(content)
        if module is None or chosen not in _SAVE:
            tied = save_safetensors(state, path, facts)
        else:
            inputs = ExampleInput.of(example_input, module, dynamic_batch=dynamic_batch)
            difference, sizes, more = _SAVE[chosen](module, inputs, path, facts)
            notes = (*notes, *more)
        count, dtypes = count_parameters(module, state)
        done = Export(target, chosen, origin, count, dtypes, tied, difference, sizes, notes)
        if model_card:
            text = card_of(done, content, None if module is None else type(module).__name__)
            (folder / CARD).write_text(text, encoding="utf-8")
    return done
