"""Tell from an error's traceback where the user's code has computed with divided tensors, and say what works there."""

from __future__ import annotations

from traceback import walk_tb
from typing import Final

from torch.optim import Optimizer

from torchhal.errors import ModelError

_HOOK_CALLS = "torchhal.trainer.loops."

WRITE_WHOLE: Final = (
    "write a whole result back, by weight.data = weight.full_tensor() * mask say. full_tensor() gives all of a "
    "parameter or gradient, and all ranks must call it. Or use strategy='ddp' or 'zero1', under which each rank has "
    "whole ones"
)
"""What to do in a hook that computes with a plain tensor and a divided one."""


def explain_mixed(error: BaseException, alias: str) -> ModelError | None:
    """What an error about plain and divided tensors together means in an optimizer or a hook; None elsewhere."""
    divided = f"Strategy {alias!r} divides parameters and gradients among the ranks"
    if (name := _stepping(error)) is not None:
        return ModelError(
            f"{error}. {divided}, and {name} computes with plain tensors beside them in its step, such as state of "
            "torch.zeros(...): make state by torch.zeros_like(parameter) and numbers by tensor.item(), and write a "
            "whole result by parameter.data = whole. Or use strategy='zero1', under which each rank steps whole "
            "parameters, or 'ddp'"
        )
    if (hook := _hook(error)) is not None:
        return ModelError(f"{error}. {divided}, and {hook} computes with a plain tensor and one of them: {WRITE_WHOLE}")
    return None


def explain_number(error: BaseException, alias: str) -> ModelError | None:
    """What torch's assertion without words means, that the result of an operator on divided tensors is one."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    if not isinstance(error, AssertionError) or str(error) or not module.startswith("torch.distributed.tensor"):
        return None
    where = _stepping(error) or _hook(error) or "the model"
    return ModelError(
        f"{where} writes what is made of divided tensors into a plain one, as state.add_(grad.square().mean()) does. "
        f"Strategy {alias!r} divides parameters and gradients among the ranks: add its number (tensor.item()), for "
        "which all ranks must ask, or use strategy='zero1' or 'ddp'"
    )


def _stepping(error: BaseException) -> str | None:
    """The name of the user's optimizer whose method the error comes from."""
    for frame, _ in walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        of_torch = str(frame.f_globals.get("__name__")).startswith("torch.")
        if isinstance(own, Optimizer) and not of_torch:
            return type(own).__name__
    return None


def _hook(error: BaseException) -> str | None:
    """The name of the hook that the error comes from."""
    calling = False
    for frame, _ in walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        of_trainer = str(frame.f_globals.get("__name__")).startswith(_HOOK_CALLS)
        if calling and not of_trainer and (name.startswith("on_") or name == "configure_gradient_clipping"):
            return name
        calling = calling or of_trainer
    return None
