"""What recording a model looks out for: its losses, and layers with float32 weights that get float16 inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from poptorch_stub.machine import Error

_LOSSES = {
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cross_entropy, F.ctc_loss,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss,
}  # fmt: skip

# where both are given, the weights follow the inputs
_FOLLOWING = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
}  # fmt: skip


class Marks(TorchFunctionMode):
    """Entered while a model is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self._inside = 0

    def mark(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _FOLLOWING:
            args, kwargs = _as_halves(args, kwargs)
        if function not in _LOSSES:
            return function(*args, **kwargs)
        self._inside += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside -= 1
        if not self._inside:  # cross_entropy is one loss, whatever it is made of
            self.mark(result)
        return result

    def final_loss(self) -> torch.Tensor:
        """Return the loss that all others lead to.

        Raises:
            Error: there is none, there are several, or it isn't one number.
        """
        earlier = {id(node) for loss in self.losses for node in _behind(loss)}
        final = [loss for loss in self.losses if loss.grad_fn is None or id(loss.grad_fn) not in earlier]
        if not final:
            raise Error("Couldn't find a loss in graph! Use a torch loss function, or poptorch.identity_loss")
        if len(final) > 1:
            raise Error(f"the graph has {len(final)} losses that lead to no common one: join them by identity_loss")
        if final[0].numel() != 1:
            raise Error("the loss must be one number: reduce it by 'mean' or 'sum'")
        return final[0]


def _as_halves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not any(value.dtype is torch.float16 for value in given):
        return args, kwargs

    def half(value: Any) -> Any:
        return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value

    return tuple(map(half, args)), {name: half(value) for name, value in kwargs.items()}


def _behind(loss: torch.Tensor) -> list[Any]:
    """Return the nodes of autograd's graph that ``loss`` is computed from, its own left out."""
    found: list[Any] = []
    waiting = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node is not loss.grad_fn:
            found.append(node)
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return found


_current: list[Marks] = []


class recording:
    """Makes ``marks`` the ones that :func:`current` answers."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __enter__(self) -> Marks:
        _current.append(self.marks)
        self.marks.__enter__()  # type: ignore[no-untyped-call]
        return self.marks

    def __exit__(self, *error: Any) -> None:
        self.marks.__exit__(*error)  # type: ignore[no-untyped-call]
        _current.pop()


def current() -> Marks | None:
    """Return what is being recorded; None outside."""
    return _current[-1] if _current else None
