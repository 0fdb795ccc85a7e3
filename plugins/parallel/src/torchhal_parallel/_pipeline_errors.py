"""Explain torch's errors in a pipeline, where a rank has the parameters of its own stages only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torchhal.errors import ModelError
from torchhal_parallel._remote_tensor import INSTEAD, RemoteWriteError


def explain_in_pipeline(error: BaseException, model: str) -> ModelError | None:
    """Return what an error of torch's means where the steps of ``model`` run in a pipeline, else None."""
    text = str(error)
    if "appears to not have been used in the graph" in text:
        return ModelError(
            f"{error} A step of {model} differentiates by torch.autograd.grad: on the rank of a pipeline that "
            "makes the loss it leads to parameters of its stages at most, as earlier layers are on other ranks. A "
            "penalty on gradients needs a strategy under which each rank has the model, such as 'ddp' or 'zero1'"
        )
    if isinstance(error, RemoteWriteError):
        return ModelError(text)
    if "assign a gradient with device type 'meta'" in text or "set_data(tensor)" in text:
        return ModelError(
            f"{error}. In a pipeline that is what becomes of a number made of all parameters or gradients, which "
            f"are in several stages: {INSTEAD}"
        )
    return None


@contextmanager
def explained_in_pipeline(model: str) -> Iterator[None]:
    """Raise what :func:`explain_in_pipeline` makes of an error inside, from that error."""
    try:
        yield
    except Exception as error:
        if (found := explain_in_pipeline(error, model)) is None:
            raise
        raise found from error


def refuse_call(module: Any, alias: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise the error for a call in training of a model whose stages are on several ranks, outside of a step.

    Args:
        module: the user's model.
        alias: of the strategy.
        *args: of the call.
        **kwargs: of the call.
    """
    raise ModelError(
        f"strategy {alias!r} runs the stages of {type(module).__name__} on several ranks, forward and backward "
        "interleaved: train by run.forward_backward(function, batch), where function(batch) calls the model and "
        "returns the loss"
    )
