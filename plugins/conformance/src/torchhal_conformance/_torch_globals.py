"""Read and restore the switches that torch keeps for a whole process, which components must not change."""

from __future__ import annotations

from typing import Any

import torch

_DENORMAL = 1e-310


def torch_state() -> dict[str, Any]:
    """Return every switch by a name for messages; two states are compared by ``==``."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": str(torch.get_default_device()),
        "the number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "grad mode": torch.is_grad_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "the dtype of autocast on the CPU": torch.get_autocast_dtype("cpu"),
        "whether denormal numbers are flushed to zero": not torch.tensor(_DENORMAL, dtype=torch.float64)
        .mul(1.0)
        .item(),
    }


def restore(state: dict[str, Any]) -> None:
    """Restore the switches that :func:`torch_state` returned, after a component that didn't."""
    torch.set_default_dtype(state["the default dtype"])
    if str(torch.get_default_device()) != state["the default device"]:
        torch.set_default_device(state["the default device"])
    torch.set_num_threads(state["the number of threads"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])
    torch.set_float32_matmul_precision(state["the precision of matrix products"])
    torch.set_grad_enabled(state["grad mode"])
    torch.set_autocast_enabled("cpu", state["autocast on the CPU"])
    torch.set_autocast_dtype("cpu", state["the dtype of autocast on the CPU"])
    torch.set_flush_denormal(state["whether denormal numbers are flushed to zero"])
