"""Batch norms over the batches of all ranks, as ``torch.nn.SyncBatchNorm``, which torch has for GPUs only.

The layers are kept, with another forward for the duration of a run. References to them, their hooks and the names in
checkpoints remain valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as _TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from torchhal.errors import ModelError

_ForwardOf = Callable[[nn.Module], Callable[..., Any]]


def synchronize_batchnorms(module: nn.Module, group: Any) -> list[nn.Module]:
    """Let the batch norms of ``module`` compute over the batches of all ranks of ``group`` when they train.

    Returns:
        The layers, for :func:`restore_batchnorms`.

    Raises:
        ModelError: a batch norm has its own forward, which can't be divided over ranks.
    """
    layers = []
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
            continue
        if type(layer).forward is not _BatchNorm.forward or not _is_torch_forward(layer):
            raise ModelError(
                f"{name or 'the model'!r} is a {type(layer).__name__} with a forward of its own, which can't be made "
                "to compute over the batches of all ranks: use torch's batch norm, or leave sync_batchnorm out"
            )
        layers.append(layer)
    for layer in layers:
        layer.__dict__["forward"] = _SynchronizedForward(layer, group)
    return list(layers)


def _is_torch_forward(layer: nn.Module) -> bool:
    """Return whether the layer has no forward of its own; a copy made in a run keeps torch's as an attribute."""
    own = layer.__dict__.get("forward")
    return own is None or (isinstance(own, MethodType) and own == MethodType(type(layer).forward, layer))


def restore_batchnorms(layers: list[nn.Module]) -> None:
    """Restore the layers' own forward, over the batch of one rank."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def check_sync_batchnorm_layers(module: nn.Module, device: torch.device) -> None:
    """Raise ModelError for torch's own ``SyncBatchNorm`` on a CPU, before its first step would."""
    if device.type == "cpu" and (name := next(_torch_layers(module), None)) is not None:
        raise ModelError(
            f"{name!r} is a torch.nn.SyncBatchNorm, which torch runs on GPUs alone: build the model with "
            "nn.BatchNorm2d and the like, and let Trainer(sync_batchnorm=True) synchronize them on any device"
        )


def _torch_layers(module: nn.Module) -> Iterator[str]:
    return (name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm))


class _SynchronizedForward:
    """The forward of one layer. In a copy of the model, which isn't part of the run, the layer uses its own."""

    def __init__(self, layer: _BatchNorm, group: Any) -> None:
        self.layer = layer
        self.group = group

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        if not layer.training:
            return _BatchNorm.forward(layer, input)
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        momentum = 0.0 if layer.momentum is None else layer.momentum
        if layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                momentum = 1.0 / float(layer.num_batches_tracked)
        if input.is_cpu:
            return _synchronized_batch_norm(input, layer, momentum, self.group)
        # whether statistics are tracked is the layer's to say, as in its own forward
        mean, variance = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
        output: torch.Tensor = _TorchSyncBatchNorm.apply(  # type: ignore[no-untyped-call]
            input, layer.weight, layer.bias, mean, variance, layer.eps, momentum, self.group,
            dist.get_world_size(self.group),
        )  # fmt: skip
        return output

    def __reduce__(self) -> tuple[_ForwardOf, tuple[nn.Module]]:
        return _own_forward, (self.layer,)


def _own_forward(layer: nn.Module) -> Callable[..., Any]:
    return MethodType(type(layer).forward, layer)


def _synchronized_batch_norm(input: torch.Tensor, layer: _BatchNorm, momentum: float, group: Any) -> torch.Tensor:
    """Normalise ``input``, shape (N, C, ...) with an N of each rank's own, by means over all ranks."""
    dims = [0, *range(2, input.dim())]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    channels = values.shape[1]
    count = values.new_full((1,), values.numel() / channels)
    total = _SumOverRanks.apply(torch.cat([values.sum(dims), count]), group)  # type: ignore[no-untyped-call]
    mean, count = total[:channels] / total[channels], total[channels]
    # Not from the sum of squares, which is inaccurate for a variance that is small relative to the mean.
    centered = values - mean.view(shape)
    variance = _SumOverRanks.apply(centered.square().sum(dims), group) / count  # type: ignore[no-untyped-call]
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            for running, seen in (
                (layer.running_mean, mean),
                (layer.running_var, variance * (count / (count - 1).clamp(min=1))),
            ):
                running.mul_(1 - momentum).add_(seen.to(running.dtype), alpha=momentum)
    output: torch.Tensor = centered * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        output = output * layer.weight.view(shape)
    if layer.bias is not None:
        output = output + layer.bias.view(shape)
    return output.to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks, which the loss of each depends on: backward sums the gradients of all losses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
