"""What a model may call while it is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poptorch_stub import blocks, marks


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """``x`` reduced by ``"sum"``, ``"mean"`` or ``"none"``, and marked as a loss."""
    assert reduction in ("sum", "mean", "none"), "Unsupported reduction type!"
    loss = x.sum() if reduction == "sum" else x.mean() if reduction == "mean" else x.clone()
    recorded = marks.current()
    if recorded is not None:
        recorded.mark(loss)
    return loss


class Block(nn.Module):
    """What is computed in it lies on one IPU."""

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        blocks.begin(ipu_id)

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._ipu_id = ipu_id

    def __enter__(self) -> None:
        blocks.begin(self._ipu_id)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        pass


def BeginBlock(layer_to_call: nn.Module, user_id: str | None = None, ipu_id: int | None = None) -> nn.Module:
    """From this layer on, what is computed lies on another IPU."""
    layer_to_call.register_forward_pre_hook(lambda module, inputs: blocks.begin(ipu_id))
    return layer_to_call
