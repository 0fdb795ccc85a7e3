"""A model recorded as one graph: what the device computes for one micro-batch, backward included.

The model's Python runs once. Whatever it decided then, and every number that isn't a tensor, is part of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch_stub import blocks, structure
from poptorch_stub.machine import Error
from poptorch_stub.marks import Marks, recording

Tensors = dict[str, torch.Tensor]


class Graph:
    """A recorded forward, to be run with the device's weights.

    Args:
        model: whose ``forward`` is recorded, with the weights of ``weights`` and ``buffers``.
        weights: by name; those with a gradient in ``trained``.
        buffers: by name.
        args, kwargs: of one micro-batch.
        trained: names of the parameters that get gradients; None for inference, which needs no loss.

    Raises:
        Error: no loss, or several; Python code that wants to see a tensor's value.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Tensors,
        buffers: Tensors,
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        trained: list[str] | None,
    ) -> None:
        self.outputs: Any = None
        """What the model returned, with tensors that stand for others."""
        tensors = [_plain(tensor) for tensor in structure.flatten((args, kwargs))]

        def step(
            weights: Tensors, buffers: Tensors, tensors: list[torch.Tensor], scale: torch.Tensor
        ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
            own = {name: weight.detach().requires_grad_(name in (trained or ())) for name, weight in weights.items()}
            given_args, given_kwargs = structure.rebuild((args, kwargs), iter(tensors))
            with torch.set_grad_enabled(trained is not None), recording(Marks()) as marks:
                self.outputs = functional_call(model, {**own, **buffers}, tuple(given_args), given_kwargs)
                gradients: tuple[torch.Tensor | None, ...] = ()
                if trained is not None:
                    loss = marks.final_loss() * scale
                    gradients = torch.autograd.grad(loss, [own[name] for name in trained], allow_unused=True)
            return [_returned(tensor) for tensor in structure.flatten(self.outputs)], list(gradients)

        copies = {name: buffer.clone() for name, buffer in buffers.items()}  # recording writes to them
        before = torch.get_rng_state()
        try:
            with blocks.counting() as counted:
                self._graph = make_fx(step)(weights, copies, tensors, torch.ones(()))
        except RuntimeError as error:
            if "value out of a tracing tensor" in str(error):
                raise Error(
                    "The model's Python code asks for the value of a tensor, which isn't known when the graph is made: "
                    f"{error}"
                ) from error
            raise
        finally:
            torch.set_rng_state(before)
        self.ipus = counted.ipus
        self.trained = trained or []
        self.writes = [name for name, copy in copies.items() if not torch.equal(copy, buffers[name])]
        """The buffers that a run changes."""

    def run(
        self, weights: Tensors, buffers: Tensors, tensors: list[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """One micro-batch: the outputs, and the gradients of the loss times ``scale``. Writes to ``buffers``."""
        with torch.no_grad():
            outputs, gradients = self._graph(weights, buffers, tensors, torch.tensor(scale))
        found = {
            name: gradient for name, gradient in zip(self.trained, gradients, strict=False) if gradient is not None
        }
        return outputs, found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _returned(tensor: torch.Tensor) -> torch.Tensor:
    """As it leaves the device, which has neither wide integers nor wide floats."""
    tensor = tensor.detach()
    if tensor.dtype is torch.int64:
        return tensor.int()
    return tensor.float() if tensor.dtype is torch.float64 else tensor
