"""A strategy under the names and with the arguments that Lightning's modules and callbacks use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchhal.trainer.adapters import RunState
from torchhal_lightning import _trees as trees
from torchhal_lightning._foreign_parts import WrappedCheckpointIO
from torchhal_lightning._translated_parts import ACCELERATORS

_CLASSES = {
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp zero2 zero3",
    "DeepSpeedStrategy": "deepspeed",
    "SingleDeviceStrategy": "single_device",
    "SingleDeviceXLAStrategy": "single_xla",
    "XLAStrategy": "xla",
}
_CLASS_OF = {alias: name for name, aliases in _CLASSES.items() for alias in aliases.split()}

_ACCELERATORS = {alias: name for name, alias in ACCELERATORS.items()}

_PRECISIONS = {"64-true": "DoublePrecision", "16-true": "HalfPrecision", "bf16-true": "HalfPrecision"}

_made: dict[tuple[type, ...], type] = {}


def _passing_for(package: str, name: str | None) -> type | None:
    """Return a class that is a subclass of both trees' class of that name; None where there is none."""
    bases = () if name is None else trees.classes(f"{package}.{name}")
    if bases and bases not in _made:
        _made[bases] = type(str(name), bases, {})
    return _made[bases] if bases else None


class AcceleratorView:
    """``trainer.accelerator``; what isn't named here is the accelerator's own."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.strategy.accelerator, name)

    @property
    def __class__(self) -> type:  # isinstance(trainer.accelerator, CPUAccelerator) asks for it
        return _passing_for("accelerators", _ACCELERATORS.get(self._run.strategy.accelerator.name)) or AcceleratorView

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a Trainer's accelerator is fixed")

    def get_device_stats(self, device: Any) -> dict[str, float]:
        """Return what the accelerator measures; of a host what Lightning measures there."""
        if torch.device(device).type == "cpu":
            stats: dict[str, float] = trees.first(None).accelerators.cpu.get_cpu_stats()
            return stats
        return dict(self._run.strategy.accelerator.device_stats(torch.device(device)))


class StrategyView:
    """``trainer.strategy``; what isn't named here is the strategy's own."""

    def __init__(self, run: RunState) -> None:
        object.__setattr__(self, "_run", run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.strategy, name)

    @property
    def __class__(self) -> type:  # isinstance(trainer.strategy, DDPStrategy) asks for it
        alias = self._run.strategy.alias
        words = (alias, alias.partition("_")[0])  # ddp_spawn is a DDPStrategy, deepspeed_stage_3 a DeepSpeedStrategy
        name = next((_CLASS_OF[word] for word in words if word in _CLASS_OF), None)
        return _passing_for("strategies", name) or StrategyView

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a Trainer's strategy is fixed")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizers":
            self._run.trainer.optimizers = value
        else:
            setattr(self._run.strategy, name, value)

    @property
    def parallel_devices(self) -> list[torch.device]:
        return list(self._run.strategy.devices)

    @property
    def lightning_module(self) -> Any:
        return self._run.module

    @property
    def checkpoint_io(self) -> Any:
        """The one that was given, where it is Lightning's."""
        io = self._run.strategy.checkpoint_io
        return io.io if isinstance(io, WrappedCheckpointIO) else io

    @property
    def precision_plugin(self) -> PrecisionView:
        return PrecisionView(self._run)

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return list(self._run.trainer.wrapped_optimizers)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        self._run.strategy.manual_backward(closure_loss, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward sends no gradients."""
        return self._run.strategy.no_backward_sync() or nullcontext()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        word = str(getattr(reduce_op, "name", reduce_op)).lower() if reduce_op is not None else "mean"
        return self._run.strategy.reduce(tensor, "mean" if word == "avg" else word)


class PrecisionView:
    """``trainer.precision_plugin``; what isn't named here is the precision's own."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.strategy.precision, name)

    @property
    def __class__(self) -> type:  # isinstance(trainer.precision_plugin, MixedPrecision) asks for it
        alias = self._run.strategy.precision.alias
        name = "MixedPrecision" if alias.endswith("-mixed") else _PRECISIONS.get(alias, "Precision")
        return _passing_for("plugins", name) or PrecisionView

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a Trainer's precision is fixed")

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if not clip_val:
            return
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        self._run.strategy.clip_gradients(getattr(optimizer, "optimizer", optimizer), float(clip_val), algorithm)
