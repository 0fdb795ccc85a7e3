"""Explain torch's errors about sharded tensors: which code has met one, and what works there instead.

torch raises them deep inside of an operator. The message or the traceback shows where in the user's code it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from traceback import walk_tb
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ModelError, message_of

_HOOK_CALLS = "torchhal.trainer.loops."

_UNSUPPORTED = (
    "not have a sharding strategy registered", "Sharding propagation failed", "not supported for tensor subclasses",
    "in-place operations that require placement changes", "not supported with DTensor", "along the sharded dim",
)  # fmt: skip
"""Words of torch's errors for what it can't do with a divided tensor."""

_NO_COPY = ("FSDP does not support deepcopy", "copy_() on an invalid python storage")
"""torch's error messages for a deepcopy of a module of ``fully_shard``, and for a gradient in parts."""

WRITE_WHOLE: Final = (
    "write a whole result back, by weight.data = weight.full_tensor() * mask say. full_tensor() gives all of a "
    "parameter or gradient, and all ranks must call it. Or use strategy='ddp' or 'zero1', under which each rank has "
    "whole ones"
)
"""What to do in a hook that computes with a plain tensor and a divided one."""


def explain_mixed(error: BaseException, alias: str) -> ModelError | None:
    """Return what an error about plain and divided tensors together means in an optimizer or a hook, else None."""
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
    """Return what torch's assertion without words means: the result of an operator on divided tensors is one."""
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


def explain_sharded(
    error: BaseException,
    *,
    alias: str,
    model: str,
    replaced: Callable[[], Iterable[tuple[str, nn.Parameter]]] | None,
) -> ModelError | None:
    """Return what an error of an operator on sharded tensors means; None for any other error.

    Args:
        error: as torch raised it.
        alias: of the strategy.
        model: the name of the module's class.
        replaced: gives the names and the emptied objects of parameters that others stand for; None if there are none.
    """
    if (found := explain_number(error, alias)) is not None:
        return found
    text = message_of(error)
    if isinstance(error, RuntimeError) and "_fused_" in text and "not have a shard" in text:
        return ModelError(
            f"{error} Strategy {alias!r} divides parameters among the ranks, and torch can't step them with this "
            "optimizer's fused kernel: leave out fused=True, or use strategy='zero1' or 'ddp'"
        )
    if isinstance(error, RuntimeError) and any(words in text for words in _UNSUPPORTED):
        return ModelError(
            f"{error} Strategy {alias!r} divides parameters and gradients among the ranks, and torch can't do this "
            "with a divided tensor: compute with what its full_tensor() gives, which all ranks must call, and "
            "write a whole result back by weight.data = value, or use strategy='ddp' or 'zero1'"
        )
    if isinstance(error, RuntimeError) and replaced is not None and "functorch transforms" in text:
        return ModelError(
            f"transforms of torch.func can't go through layers that strategy {alias!r} divides: let "
            f"{model} take the gradient by torch.autograd.grad, or use strategy='ddp' or "
            "'zero1'"
        )
    words = "more than one element of the written-to tensor refers to a single memory location"
    cause = error.__cause__ if isinstance(error, ModelError) else error  # the capture of a forward has wrapped it
    if isinstance(cause, RuntimeError) and words in str(cause) and (name := _written_original(cause, replaced)):
        return ModelError(
            f"{model} writes to {name!r} by a reference from before the model was divided, "
            f"and strategy {alias!r} trains another object in its place: look parameters up where they are used, "
            "by self.get_parameter(name) say"
        )
    return None


def _written_original(
    error: BaseException, replaced: Callable[[], Iterable[tuple[str, nn.Parameter]]] | None
) -> str | None:
    """Return the name of an emptied parameter of the user's that the code which raised ``error`` refers to."""
    originals = {id(each): name for name, each in replaced()} if replaced is not None else {}
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        held = [*frame.f_locals.values(), *map(frame.f_globals.get, frame.f_code.co_names)]
        for value in (*held, *(each for one in held if type(one) is dict for each in one.values())):
            if id(value) in originals:
                return originals[id(value)]
    return None


def explain_unit(error: BaseException, *, alias: str, model: str) -> ModelError | None:
    """Return what an error about a part of a ``fully_shard`` unit means, used or copied while it was sharded."""
    text = message_of(error)
    words = ("mixed torch.Tensor and DTensor", "inputs with different meshes")
    if isinstance(error, RuntimeError) and any(word in text for word in words):
        if (found := explain_mixed(error, alias)) is not None:
            return found
        return ModelError(
            f"{error}. Under strategy {alias!r} the parameters of a unit are whole only while its "
            f"own forward runs: {model} uses a part of one outside of it, as a penalty over self.parameters() "
            "does, or by a transform of torch.func. Call the unit, choose units that are called by 'wrap_policy', "
            "or use strategy='ddp'"
        )
    if "differentiated Tensor" in text and "not have been used" in text:
        return ModelError(
            f"{error} Under strategy {alias!r} the parameters of a unit are others while its own "
            f"forward runs, and {model} asks for a gradient by those of before or after it: "
            "leave gradients by parameters to the backward of the loss, or use strategy='ddp' or 'zero1'"
        )
    if any(words in text for words in _NO_COPY):
        return ModelError(
            f"{model} was copied while strategy {alias!r} has it in parts, by "
            "copy.deepcopy or by AveragedModel(self) say, and torch's fully_shard can't copy its modules: keep an "
            "average or a snapshot as {name: parameter.detach().clone() for name, parameter in "
            "self.named_parameters()}, whose tensors are in the same parts, or copy the module before the fit"
        )
    return None


def explain_tensor_parallel(
    error: BaseException, *, alias: str, module: nn.Module | None, sharded: bool
) -> ModelError | None:
    """Return what an error about the divided layers of a tensor parallel plan means; None for any other error.

    Args:
        error: as torch raised it.
        alias: of the strategy.
        module: the model.
        sharded: ``fully_shard`` divides the parameters, too; what it raises is not of the plan.
    """
    model = type(module).__name__
    if "running_mean should contain" in message_of(error):
        norms = {id(each): name for name, each in module.named_modules()} if module is not None else {}
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            norm: Any = frame.f_locals.get("self")
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and id(norm) in norms:
                return ModelError(
                    f"{norms[id(norm)]!r} is a {type(norm).__name__} of {norm.num_features} features, and is "
                    "called with a rank's part of the outputs of a 'colwise' layer, while its statistics and "
                    "weights are those of all features: give the layer before it the style 'colwise_rep' and the "
                    "layer behind it 'rowwise_rep', or leave both out of the tensor parallel plan"
                )
    if sharded or "mixed torch.Tensor and DTensor" not in message_of(error):
        return None
    frames = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    if "torch.nn.utils.clip_grad" in frames:
        return ModelError(
            f"{error}. torch.nn.utils can't clip the gradients of {model}, of which those in the tensor "
            "parallel plan are divided and the others are not: set Trainer(gradient_clip_val=...), or call "
            "self.clip_gradients(...) in configure_gradient_clipping. The norm of all gradients is "
            "trainer.strategy.grad_norm(optimizer)"
        )
    if (found := explain_mixed(error, alias)) is not None:
        return found
    return ModelError(
        f"{error}. The parameters of layers in a tensor parallel plan are divided, and {model} computes with "
        "one outside of its layer, as a penalty over self.parameters() does: leave that layer "
        "out of the plan, let the optimizer do it (weight_decay), or use strategy='ddp'"
    )


def _stepping(error: BaseException) -> str | None:
    """Return the name of the user's optimizer whose method the error comes from."""
    for frame, _ in walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        of_torch = str(frame.f_globals.get("__name__")).startswith("torch.")
        if isinstance(own, Optimizer) and not of_torch:
            return type(own).__name__
    return None


def _hook(error: BaseException) -> str | None:
    """Return the name of the hook that the error comes from."""
    calling = False
    for frame, _ in walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        of_trainer = str(frame.f_globals.get("__name__")).startswith(_HOOK_CALLS)
        if calling and not of_trainer and (name.startswith("on_") or name == "configure_gradient_clipping"):
            return name
        calling = calling or of_trainer
    return None
