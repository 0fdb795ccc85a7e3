"""Run a region between column- and row-wise layers twice with random weights, whole and divided, and compare inputs."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchhal_parallel._dtensor_layout import is_below_float32
from torchhal_parallel._tensor_swap import TensorSwap, swapped_tensors

TOLERANCE = 1e-3
"""Of the norm: float32 rounds to 1e-6 of it, a mean over half of 4,096 random numbers is off by 1e-2."""

DROPOUT = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
"""Functions of torch that drop elements of their first argument."""

_RANDOM = {
    "bernoulli", "bernoulli_", "exponential_", "normal", "normal_", "rand", "rand_like", "randn", "randn_like",
    "uniform_",
}  # fmt: skip


class RegionRuns:
    """Forwards of layers with random weights: with whole outputs first, then, :attr:`divided`, with this rank's."""

    def __init__(self, layers: Mapping[nn.Module, str], styles: Mapping[str, str], rank: int, size: int) -> None:
        self.layers = layers
        self.styles = styles
        self.rank = rank
        self.size = size
        self.divided = False
        self.differing: tuple[str, float] | None = None
        self._weights = {
            name: _random_weights(layer, name) for layer, name in layers.items() if styles[name] != "sequence_parallel"
        }
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._row = 0

    @contextmanager
    def in_places(self) -> Iterator[None]:
        """Let the layers compute so, without what divides their inputs and outputs. Their users' hooks run."""
        before = [(layer, dict(vars(layer))) for layer in self.layers]
        try:
            for layer, name in self.layers.items():
                vars(layer)["forward"] = lambda given, *, layer=layer, name=name: self._forward(layer, name, given)
                for kind in ("_forward_hooks", "_forward_pre_hooks"):
                    hooks = {key: hook for key, hook in vars(layer)[kind].items() if not _divides(hook)}
                    vars(layer)[kind] = OrderedDict(hooks)
            yield
        finally:
            for layer, attributes in before:
                vars(layer).clear()
                vars(layer).update(attributes)

    def _forward(self, layer: Any, name: str, given: torch.Tensor) -> torch.Tensor:
        style = self.styles[name]
        if style == "sequence_parallel":
            norm = F.rms_norm if isinstance(layer, nn.RMSNorm) else F.layer_norm
            return norm(given, layer.normalized_shape)
        if style == "rowwise" and self.divided:
            return self._compare_row(name, given)
        weight, bias = self._weights[name]
        if isinstance(layer, nn.Embedding):
            output = F.embedding(given, weight)
        else:
            output = F.linear(given.to(weight.dtype), weight, bias)
        if style == "rowwise":
            self._rows.append((given.detach(), output))
        if style == "colwise" and self.divided:
            return output.chunk(self.size, -1)[self.rank]
        return output

    def _compare_row(self, name: str, given: torch.Tensor) -> torch.Tensor:
        whole, output = self._rows[self._row]
        self._row += 1
        wanted = whole.chunk(self.size, -1)[self.rank]
        off = 1.0
        if given.shape == wanted.shape:
            norm = wanted.double().norm()
            off = float((given.detach().double() - wanted.double()).norm() / norm.clamp(min=1e-30))
        if off > TOLERANCE and self.differing is None:
            self.differing = (name, off)
        return output


def _random_weights(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, all of it, and a bias for a Linear or an Embedding; the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    rows, columns = layer.weight.shape
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    scale = 1.0 if isinstance(layer, nn.Embedding) else columns**-0.5
    weight = torch.randn(rows, columns, generator=generator, dtype=dtype).mul_(scale)
    bias = torch.randn(rows, generator=generator, dtype=dtype)
    return weight.to(layer.weight.device), bias.to(layer.weight.device)


class WithoutRandomNumbers(TorchFunctionMode):
    """Dropout drops nothing, and random numbers are all the same: a part can't draw those of the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _RANDOM and isinstance(result, torch.Tensor):
            with torch.no_grad():
                result.fill_(0.5)
        return result


@contextmanager
def in_full_precision(module: nn.Module) -> Iterator[None]:
    """Compute in at least float32 inside, in which rounding can't be taken for something else, or hide it."""
    wide: list[TensorSwap] = [
        (members, name, tensor.detach().float())
        for each in module.modules()
        for members in (each._parameters, each._buffers)
        for name, tensor in members.items()
        if tensor is not None
        and not tensor.is_meta
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and is_below_float32(tensor)
    ]
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} - {"meta"}
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(swapped_tensors(wide))
        yield


def _divides(hook: Any) -> bool:
    """Return whether a hook is torch's, which divides or joins inputs and outputs of a layer, or this package's."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "torchhal_parallel"))
