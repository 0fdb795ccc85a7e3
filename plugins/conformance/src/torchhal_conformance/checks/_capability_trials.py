"""Try the capabilities of core's vocabulary on a device and on its process-group backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from torchhal.accelerators import Accelerator
from torchhal.capabilities import LOSS_SCALING
from torchhal_conformance._assertions import close, require, same

_Generator = Callable[[int], torch.Generator]


def try_capability(capability: str, accelerator: Accelerator, device: torch.device, generator: _Generator) -> None:
    """Raise an error if a declared capability of the device isn't there; one of a vendor's own is left untried.

    Args:
        capability: one declared word.
        accelerator: the accelerator, set up.
        device: its device.
        generator: makes a generator of random numbers from a seed.
    """
    word, _, value = capability.partition(":")
    trial = _TRIALS.get(word)
    if trial is None:
        require(capability != LOSS_SCALING or _scales(device), f"torch has no gradient scaler for {device.type!r}")
        return
    dtype = getattr(torch, value, None)
    require(isinstance(dtype, torch.dtype), f"'capabilities' holds {capability!r}, and torch has no dtype {value!r}")
    trial(dtype, device, generator)


def _compute(dtype: torch.dtype, device: torch.device, generator: _Generator) -> None:
    left, right = (torch.randn(8, 8, generator=generator(number)) for number in range(2))
    one = left.to(dtype).to(device).requires_grad_()
    (one @ right.to(dtype).to(device)).sum().backward()  # type: ignore[no-untyped-call]
    expected = right.to(dtype).float().sum(1).expand(8, 8)
    assert one.grad is not None
    close(f"the gradient of a product in {dtype}", one.grad.float(), expected, 0.02)


def _store(dtype: torch.dtype, device: torch.device, generator: _Generator) -> None:
    parameter = nn.Parameter(torch.ones(8).to(dtype).to(device))
    parameter.grad = torch.full_like(parameter, 2.0)
    torch.optim.SGD([parameter], lr=0.25).step()
    same(f"a parameter in {dtype} after its update", parameter.detach().cpu(), torch.full((8,), 0.5).to(dtype))


def _autocast(dtype: torch.dtype, device: torch.device, generator: _Generator) -> None:
    one = torch.randn(8, 8, generator=generator(0)).to(device)
    with torch.autocast(device.type, dtype):
        product = one @ one
    same(f"the dtype of a product under autocast to {dtype}", product.dtype, dtype)


_TRIALS: dict[str, Callable[[Any, torch.device, _Generator], None]] = {
    "compute": _compute,
    "store": _store,
    "autocast": _autocast,
}


def _scales(device: torch.device) -> bool:
    return torch.amp.GradScaler(device.type).is_enabled()


def try_collectives(component: Any, operations: Sequence[str]) -> dict[str, str]:
    """Return the operations that fail in a process group of this process alone, each with its error.

    Args:
        component: the accelerator under test.
        operations: values of ``collective:...``; those that aren't known here are left untried.
    """
    accelerator: Accelerator = component.make_accelerator()
    device = accelerator.get_parallel_devices([0])[0]
    accelerator.setup_device(device)
    try:
        dist.init_process_group(accelerator.backend, rank=0, world_size=1, store=cast(Any, dist).HashStore())
    except Exception:  # a backend that needs its vendor's launcher; the checks of strategies use it
        return {}
    failed = {}
    try:
        for operation in operations:
            if operation not in _COLLECTIVES:
                continue
            given, result = torch.arange(4.0, device=device), torch.zeros(4, device=device)
            try:
                _COLLECTIVES[operation](given, result)
                accelerator.synchronize(device)
                same(operation, result.cpu(), torch.arange(4.0))
            except Exception as error:
                failed[operation] = f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return failed


def _all_reduce(op: Any, given: torch.Tensor, result: torch.Tensor) -> None:
    dist.all_reduce(given, op)
    result.copy_(given)


_COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda given, result: _all_reduce(dist.ReduceOp.SUM, given, result),
    "avg": lambda given, result: _all_reduce(dist.ReduceOp.AVG, given, result),
    "all_gather": lambda given, result: dist.all_gather_into_tensor(result, given),
    "reduce_scatter": lambda given, result: dist.reduce_scatter_tensor(result, given),
    "all_to_all": lambda given, result: dist.all_to_all_single(result, given),
}
