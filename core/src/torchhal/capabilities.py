"""Name what one component needs and another one has, as words that anyone may add to.

A capability is a string, ``"word"`` or ``"word:value"``. Core gives a meaning to those below; a vendor may use others,
such as ``"acme:fp8"``, in a precision and in the accelerator that it works on, and nothing else has to know them.

==============================  ========================================================================================
``compute:DTYPE``               matrix products and the rest of the arithmetic of a model in that dtype
``store:DTYPE``                 parameters and their gradients in that dtype, and what a strategy sends of them
``autocast:DTYPE``              ``torch.autocast`` to that dtype
``loss_scaling``                gradients of a scaled loss, and steps that are skipped where they overflow
``matmul:MODE``                 products of float32 in another mode, such as ``matmul:tf32``
``collective:NAME``             an operation of the process group's backend: ``all_reduce``, ``all_gather``,
                                ``reduce_scatter``, ``broadcast``, ``send_recv``, ``all_to_all``
``deterministic_collectives``   an all-reduce gives the same bits on every rank, and again for the same input
``streams``                     work on one stream overlaps with work on another
==============================  ========================================================================================

An accelerator and a strategy say what they have, a precision and a strategy what they need;
``resolve`` compares the two before anything starts. So N accelerators and M precisions are N + M declarations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

__all__ = [
    "COLLECTIVES",
    "DETERMINISTIC_COLLECTIVES",
    "LOSS_SCALING",
    "STREAMS",
    "autocast",
    "collective",
    "compute",
    "describe",
    "dtypes",
    "matmul",
    "store",
]

LOSS_SCALING: Final = "loss_scaling"
"""The word for gradients of a scaled loss, and for steps that are skipped where they overflow."""

DETERMINISTIC_COLLECTIVES: Final = "deterministic_collectives"
"""The word for an all-reduce that gives the same bits on every rank, and again for the same input."""

STREAMS: Final = "streams"
"""The word for work on one stream that overlaps with work on another."""


def compute(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the words for arithmetic in each of ``dtypes``."""
    return frozenset(f"compute:{_name(dtype)}" for dtype in dtypes)


def store(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the words for parameters and gradients in each of ``dtypes``."""
    return frozenset(f"store:{_name(dtype)}" for dtype in dtypes)


def autocast(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the words for ``torch.autocast`` to each of ``dtypes``."""
    return frozenset(f"autocast:{_name(dtype)}" for dtype in dtypes)


def matmul(*modes: str) -> frozenset[str]:
    """Return the words for products of float32 in each of ``modes``."""
    return frozenset(f"matmul:{mode}" for mode in modes)


def collective(*names: str) -> frozenset[str]:
    """Return the words for each of the backend's operations in ``names``."""
    return frozenset(f"collective:{name}" for name in names)


COLLECTIVES: Final = collective("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "all_to_all")
"""The words for all operations of a backend that core's and torchhal-parallel's strategies use."""


def dtypes(capabilities: Iterable[str], word: str = "compute") -> list[torch.dtype]:
    """Return torch's dtypes among the words ``word:DTYPE`` in ``capabilities``, sorted by name.

    Args:
        capabilities: what a component declares.
        word: ``"compute"``, ``"store"`` or ``"autocast"``.
    """
    values = sorted(value for name, _, value in (one.partition(":") for one in capabilities) if name == word)
    found = [getattr(torch, value, None) for value in values]
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


def describe(missing: Iterable[str], among: Iterable[str] = ()) -> str:
    """Return ``missing`` for a message, with the words of the same kind that are there.

    Args:
        missing: capabilities that one component needs and another one doesn't have.
        among: all that the other one has.

    Returns:
        For example ``"'compute:float64' (it has 'compute:bfloat16' and 'compute:float32')"``.
    """
    absent = sorted(missing)
    kinds = {word.partition(":")[0] for word in absent if ":" in word}
    alike = sorted(word for word in among if word.partition(":")[0] in kinds)
    named = ", ".join(map(repr, absent))
    return f"{named} (it has {', '.join(map(repr, alike))})" if alike else named


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
