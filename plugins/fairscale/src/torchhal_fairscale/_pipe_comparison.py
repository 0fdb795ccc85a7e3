"""Compare what layers make of a batch with what they make of its micro-batches, before the first is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.errors import ModelError
from torchhal.pytree import move_to_device

_DRAWING = (_DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase)
"""Layers of torch's that draw random numbers in training, some if they were told to, and are alike otherwise."""


class PipeComparison:
    """A run of the layers over a batch, and one through Pipe, in training mode.

    Layers that draw random numbers are in evaluation mode meanwhile. Modes, buffers and generators are as before at the
    end.

    Args:
        layers: what Pipe divides.
        pipe: fairscale's.
        alias: of the strategy.
        accelerator: whose generators are restored.
        home: the first device.
    """

    def __init__(
        self, layers: nn.Sequential, pipe: Any, *, alias: str, accelerator: Accelerator, home: torch.device
    ) -> None:
        self._layers = layers
        self._pipe = pipe
        self._alias = alias
        self._accelerator = accelerator
        self._home = home

    @torch.no_grad()
    def run(self, input: Any, *, divided: bool, recomputed: bool) -> None:
        """Raise ModelError where the layers train otherwise than on one device.

        Args:
            input: a batch of theirs, on any device.
            divided: whether there are micro-batches.
            recomputed: whether layers are computed again in backward.
        """
        modes = {layer: layer.training for layer in self._layers.modules()}
        before, state = _Buffers(self._layers), rng.collect(self._accelerator, self._home)
        try:
            for part in self._pipe.partitions:
                part.training = False  # by which Pipe decides about checkpoints
            for layer in modes:
                if isinstance(layer, _DRAWING):
                    layer.eval()
            whole = self._whole(input)
            expected = _Buffers(self._layers)
            if recomputed:
                again = self._whole(input)
                if name := expected.find_difference(_Buffers(self._layers)):
                    raise self._changed(name, "computes layers again in backward", "checkpoint='never'")
                if not _are_alike(whole, again):
                    raise self._changed("", "computes layers again in backward", "checkpoint='never'")
            before.restore()
            if divided:
                parts = self._pipe(move_to_device(input, self._pipe.devices[0]))
                if not _are_alike(whole, parts):
                    raise ModelError(
                        f"strategy {self._alias!r} divides a batch along its first dimension, and the layers compute "
                        "something else with parts of it than with all of it: they use other samples, or have them "
                        "along another dimension, as an LSTM with batch_first=False. Use chunks=1, or layers that "
                        "compute sample by sample"
                    )
                if name := expected.find_difference(_Buffers(self._layers)):
                    raise self._changed(name, "runs the layers on each part of a batch", "chunks=1")
        finally:
            before.restore()
            for layer, mode in modes.items():
                layer.training = mode
            for part in self._pipe.partitions:
                part.training = self._layers.training
            rng.restore(state, self._accelerator, self._home)

    def _whole(self, input: Any) -> Any:
        for part, device in zip(self._pipe.partitions, self._pipe.devices, strict=True):
            input = move_to_device(input, device)
            for layer in part:
                input = self._without_drawing(layer, input, device)
        return input

    def _without_drawing(self, layer: nn.Module, input: Any, device: torch.device) -> Any:
        """Return the layer's output; put it into evaluation mode first if it draws random numbers else."""
        buffers, states = _Buffers(layer), self._generators(device)
        output = layer(input)
        if not all(map(torch.equal, states, self._generators(device))):
            buffers.restore()
            layer.eval()
            output = layer(input)
        return output

    def _generators(self, device: torch.device) -> list[torch.Tensor]:
        on_host = [torch.get_rng_state()]
        if device.type == "cpu":
            return on_host
        return [*on_host, torch.as_tensor(self._accelerator.get_rng_state(device))]

    def _changed(self, name: str, does: str, instead: str) -> ModelError:
        what = f"buffer {name!r} of them" if name else "what they compute"
        return ModelError(
            f"strategy {self._alias!r} {does}, and {what} changes with each time that they run: use {instead}, or "
            "layers without such a state"
        )


class _Buffers:
    """The buffers of a module and its layers: the tensors, and their values."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [(layer, dict(layer._buffers)) for layer in module.modules()]
        self._values = {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
        self._module = module

    def restore(self) -> None:
        for layer, buffers in self._found:  # which a layer may have replaced
            layer._buffers.clear()
            layer._buffers.update(buffers)
        for name, buffer in self._module.named_buffers(remove_duplicate=False):
            if not torch.equal(buffer, self._values[name]):
                buffer.copy_(self._values[name])

    def find_difference(self, other: _Buffers) -> str:
        """Return the name of a buffer whose values aren't alike, or nothing."""
        for name in {**self._values, **other._values}:
            one, another = self._values.get(name), other._values.get(name)
            if one is None or another is None or not _are_alike(one, another):
                return name
        return ""


def _are_alike(whole: Any, divided: Any) -> bool:
    one = whole if isinstance(whole, tuple) else (whole,)
    other = divided if isinstance(divided, tuple) else (divided,)
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return False
            continue
        rough = 1e-3 if a.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else 5e-2
        scale = float(a.abs().max()) if a.numel() else 0.0
        if not torch.allclose(a, b, rtol=rough, atol=rough * scale, equal_nan=True):
            return False
    return True
