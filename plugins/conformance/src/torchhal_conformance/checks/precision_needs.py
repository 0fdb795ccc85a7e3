"""PRE: a precision declares every capability that its set-up and its steps use."""

from __future__ import annotations

import torch

from torchhal.capabilities import LOSS_SCALING, autocast, check_capabilities, compute, store
from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun


@check("PRE-29", since="0.2", needs=["device"])
def complete_needs(context: CheckContext) -> None:
    """``needs`` holds what a step uses: the dtypes of weights and products, autocast, a scaled loss, a matmul mode.

    Why: an accelerator or an engine without it is not refused, and fails or trains otherwise after the start.
    Fix: declare ``param_dtype``, ``compute_dtype``, ``wraps_autocast`` and ``"scales_loss"``, or add to ``needs``.
    """
    switch = torch.get_float32_matmul_precision()
    trained = PrecisionRun(context)
    precision, device = trained.precision, trained.device
    needs = check_capabilities(precision.needs, f"{type(precision).__name__}.needs")
    used = {f"weights in {dtype}": store(dtype) for dtype in {p.dtype for p in trained.model.parameters()}}
    with precision.forward_context():
        output = trained.model(precision.convert_input(trained.batch[0]))
        used[f"products in {output.dtype}"] = compute(output.dtype)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            used[f"autocast to {dtype}"] = autocast(dtype)
    if abs(trained.scale() - 1) > 1e-2:
        used["a scaled loss"] = frozenset({LOSS_SCALING})
    for what, capability in used.items():
        require(
            capability <= needs, f"it uses {what}, and 'needs' holds no {sorted(capability)[0]!r} (got {sorted(needs)})"
        )
    changed = torch.get_float32_matmul_precision() != switch
    require(
        not changed or any(need.startswith("matmul:") for need in needs),
        f"setup() set the float32 matmul precision, and 'needs' holds no 'matmul:...' (got {sorted(needs)})",
    )
