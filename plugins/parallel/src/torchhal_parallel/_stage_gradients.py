"""Add the gradients of one batch of a pipeline to those that this rank's stages have accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchhal.errors import ModelError
from torchhal_parallel._gradient_hooks import HooksOfBatch
from torchhal_parallel._remote_tensor import RemoteParameter, RemoteTensor, remote_gradient
from torchhal_parallel._shown import shown


class StageGradients:
    """The gradients of this rank's parameters, and what stands for those of other stages' parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]
        remote_ones = (each for each in module.parameters() if isinstance(each, RemoteParameter))
        self._remote = [(parameter, remote_gradient(parameter)) for parameter in remote_ones]

    @contextmanager
    def accumulated(self) -> Iterator[None]:
        """Add the gradients of the backward passes inside, one for each microbatch, to the earlier ones.

        The parameters' hooks run once, with the gradients of the batch.
        """
        hooks = HooksOfBatch(self._parameters)
        earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        with hooks.held_back():
            yield
        hooks.on_gradients()
        for parameter, before in zip(self._parameters, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        hooks.after_accumulation()
        for other, gradient in self._remote:  # so that a hook which reads all gradients gets an error
            if other.requires_grad:
                other.grad = gradient


def loss_of(result: Any, model: str) -> torch.Tensor:
    """Return the loss in what the training_step of ``model`` has returned.

    Raises:
        ModelError: it is no tensor of one element, or was computed from another stage's parameters.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ModelError(
            f"the training_step of {model} must return a tensor with one element, or a dict "
            f"with 'loss', under a pipeline (got {shown(result)})"
        )
    if isinstance(loss, RemoteTensor):
        loss.refuse("part of the loss")
    return loss
