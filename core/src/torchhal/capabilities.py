"""Name what hardware and engines have and what precisions and strategies need, as words that are compared.

A capability is a string, ``word`` or ``word:value``: ``"compute:bfloat16"``, ``"loss_scaling"``. An accelerator
declares those that it has (``Accelerator.capabilities``), a precision and a strategy those that they need
(``Precision.needs``, ``Strategy.needs``), and a strategy those that it can't carry (``Strategy.lacks``). ``resolve``
compares them before anything starts and names what is missing, so no component lists the names of others.

The vocabulary is open. :data:`VOCABULARY` explains the words that core's components use; a vendor declares a word of
its own, such as ``"fp8:e4m3"``, in the accelerator that has it and in the precision that needs it, and no other
component has to know it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from torchhal.errors import ConfigurationError

__all__ = [
    "LOSS_SCALING",
    "STANDARD",
    "TF32",
    "VOCABULARY",
    "autocast",
    "check_capabilities",
    "collective",
    "compute",
    "describe",
    "dtypes_of",
    "missing",
    "other_stores",
    "store",
]

VOCABULARY: Final[Mapping[str, str]] = {
    "compute": "arithmetic in a dtype, forward and backward: 'compute:bfloat16'",
    "store": "parameters, gradients and optimizer state in a dtype: 'store:float64'",
    "autocast": "torch.autocast to a dtype: 'autocast:bfloat16'",
    "loss_scaling": "torch.amp.GradScaler: a scaled loss, and steps that are skipped",
    "matmul": "a faster mode of float32 products: 'matmul:tf32'",
    "collective": "an operation of the process-group backend: 'collective:reduce_scatter', 'collective:avg'",
}
"""Word -> meaning, of the words that core's components use. Any other word may be declared."""

LOSS_SCALING: Final = "loss_scaling"
"""Capability of a loss that is scaled by ``torch.amp.GradScaler``, and of steps that are skipped."""

TF32: Final = "matmul:tf32"
"""Capability of float32 products with 10 bits of mantissa."""

_FLOATING: Final = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.is_floating_point)
)
_FORM: Final = re.compile(r"[a-z][a-z0-9_]*(:[a-z0-9][a-z0-9_.-]*)?")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the capabilities of arithmetic in ``dtypes``, such as ``{"compute:bfloat16"}``."""
    return frozenset(f"compute:{_name(dtype)}" for dtype in dtypes)


def store(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the capabilities of weights and optimizer state in ``dtypes``, such as ``{"store:float64"}``."""
    return frozenset(f"store:{_name(dtype)}" for dtype in dtypes)


def autocast(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the capabilities of ``torch.autocast`` to ``dtypes``, such as ``{"autocast:bfloat16"}``."""
    return frozenset(f"autocast:{_name(dtype)}" for dtype in dtypes)


def collective(*operations: str) -> frozenset[str]:
    """Return the capabilities of a process-group backend with ``operations``, such as ``{"collective:avg"}``.

    Args:
        operations: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` (of tensors of one
            size), ``"avg"`` (``ReduceOp.AVG``), or others in torch's words.
    """
    return frozenset(f"collective:{operation}" for operation in operations)


def other_stores(*dtypes: torch.dtype) -> frozenset[str]:
    """Return the capabilities of storage in every floating-point dtype of torch's but ``dtypes``.

    For ``Strategy.lacks`` of an engine that carries gradients in ``dtypes`` only.
    """
    return store(*_FLOATING) - store(*dtypes)


STANDARD: Final[frozenset[str]] = (
    compute(torch.float32, torch.float16, torch.bfloat16)
    | store(torch.float32, torch.float16, torch.bfloat16)
    | autocast(torch.float16, torch.bfloat16)
    | collective("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "avg")
    | {LOSS_SCALING}
)
"""Capabilities of hardware that torch drives like a GPU: the default of ``Accelerator.capabilities``."""


def dtypes_of(word: str, capabilities: Iterable[str]) -> list[torch.dtype]:
    """Return the dtypes that ``capabilities`` have of ``word``, sorted by name.

    Args:
        word: ``"compute"``, ``"store"`` or ``"autocast"``.
        capabilities: any capabilities; values that this torch has no dtype of are left out.
    """
    found = []
    for capability in sorted(capabilities):
        name, _, value = capability.partition(":")
        dtype = getattr(torch, value, None) if name == word else None
        if isinstance(dtype, torch.dtype):
            found.append(dtype)
    return found


def check_capabilities(capabilities: object, owner: str) -> frozenset[str]:
    """Return ``capabilities`` if they are a set of words.

    Args:
        capabilities: the declared value.
        owner: attribute and class for the message, such as ``"MyAccelerator.capabilities"``.

    Raises:
        ConfigurationError: it is no set of strings, or one of them is not of the form ``word`` or ``word:value``.
    """
    rule = f"{owner} must be a frozenset of words such as 'compute:bfloat16' or 'loss_scaling'"
    if not isinstance(capabilities, frozenset | set):
        raise ConfigurationError(f"{rule} (got {capabilities!r})")
    for capability in capabilities:
        if not isinstance(capability, str) or not _FORM.fullmatch(capability):
            raise ConfigurationError(f"{rule}, in lower case without blanks (got {capability!r})")
    return frozenset(capabilities)


def missing(needs: Iterable[str], has: Iterable[str]) -> frozenset[str]:
    """Return the capabilities of ``needs`` that ``has`` does not hold."""
    return frozenset(needs) - frozenset(has)


def describe(capabilities: Iterable[str]) -> str:
    """Return capabilities as text for a message, such as ``"compute:bfloat16, loss_scaling"``."""
    return ", ".join(sorted(capabilities)) or "none"
