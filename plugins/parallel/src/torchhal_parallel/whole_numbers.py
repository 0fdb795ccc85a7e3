"""Let a Python number that is taken from a divided tensor be that of the whole tensor.

torch's DTensor gives for ``.item()``, ``float()``, ``int()`` and ``bool()`` the number that stands in this rank's
memory, without a word: of a norm of a sharded gradient that of this rank's part. A sum of ``p.grad.norm().item() ** 2``
would be another on every rank, and so would what is scaled by it. Operators between tensors are right or errors, and
``.tolist()`` and ``.numpy()`` are errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhal_parallel.layout import whole

if not hasattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers"):
    raise ImportError(
        f"torch {torch.__version__} has no DTensor._op_dispatcher._custom_op_handlers, without which .item() of a "
        "divided tensor would be the number of one rank's part: use another torch, or another torchhal-parallel"
    )

_OPERATOR = torch.ops.aten._local_scalar_dense.default
_WHAT = "the number (.item(), float(), int() or bool()) of a divided tensor, which all ranks must ask for"

_lock = threading.Lock()
_enabled: list[WholeNumbers] = []
_before: list[Any] = []


class WholeNumbers:
    """While enabled, such a number is gathered by all ranks that have a part of its tensor; they all must ask for it.

    Args:
        guard: makes a context, given what is done in it, in which the ranks communicate.
    """

    def __init__(self, guard: Callable[[str], AbstractContextManager[None]]) -> None:
        self.guard = guard

    def enable(self) -> None:
        with _lock:
            if not _enabled:
                handlers = _handlers()
                _before.append(handlers.get(_OPERATOR))
                handlers[_OPERATOR] = _number_of_whole
            if self not in _enabled:
                _enabled.append(self)

    def disable(self) -> None:
        """Let torch do what it does by itself, if no other run needs this one. Idempotent."""
        with _lock:
            if self not in _enabled:
                return
            _enabled.remove(self)
            if not _enabled:
                handlers, before = _handlers(), _before.pop()
                if handlers.pop(_OPERATOR, None) is not None and before is not None:
                    handlers[_OPERATOR] = before


def _handlers() -> dict[Any, Any]:
    """torch's handlers of operators on DTensors; it may put another dict in the place of this one."""
    return DTensor._op_dispatcher._custom_op_handlers


def _number_of_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0].detach()
    if all(placement.is_replicate() for placement in tensor.placements):
        return operator(tensor.to_local())
    with _enabled[-1].guard(_WHAT):
        return operator(whole(tensor))
