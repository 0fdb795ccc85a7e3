"""Which operators autocast runs in which width, where files say so in place of the simulator's lists."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

LOWER = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"
FULL = "PT_HPU_AUTOCAST_FP32_OPS_LIST"
_KEY = "AutocastHPU"

# What the simulator runs in the lower width (CUDA's list), by the operators' names.
_LOWER_BY_DEFAULT = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear",
    "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "linalg_vecdot",
}  # fmt: skip
# These take the widest width among their arguments, whatever the lists say.
_PROMOTED = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
    "stack", "tensordot", "vdot",
}  # fmt: skip

_library: Any = None  # what it registers is there as long as it is


def apply() -> None:
    """Follow the files that the environment names, once, as the bridge does when it is imported."""
    global _library
    lists = {variable: _read(os.environ[variable]) for variable in (LOWER, FULL) if os.environ.get(variable)}
    if not lists:
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    } - _PROMOTED
    lower = lists.get(LOWER, registered & _LOWER_BY_DEFAULT)
    full = lists.get(FULL, registered - _LOWER_BY_DEFAULT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name in registered - lower - full:
            _register(name, lambda _: torch.library.fallthrough_kernel)
        for variable, make in ((LOWER, _in_lower), (FULL, _in_full)):
            for name in lists.get(variable, set()) - _PROMOTED:
                _register(name, make)


def _read(path: str) -> set[str]:
    return {line.strip() for line in Path(path).read_text().splitlines() if line.strip()}


def _register(name: str, make: Callable[[Any], Any]) -> None:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return  # the vendor's lists know names that aren't aten's
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        if "out" not in overload:
            _library.impl(operator, make(operator), _KEY)


def _in_lower(operator: Any) -> Callable[..., Any]:
    return _casting(operator, lambda: torch.get_autocast_dtype("hpu"))


def _in_full(operator: Any) -> Callable[..., Any]:
    return _casting(operator, lambda: torch.float32)


def _casting(operator: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype()

        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "hpu"
            return value.to(wanted) if is_float else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
            args, kwargs = tree_map(cast, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel
