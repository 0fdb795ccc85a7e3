"""Accumulate the values of one key of ``self.log`` on this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchhal.errors import ConfigurationError
from torchhal.trainer.logging._log_options import HOOKS, LogOptions


class MetricAccumulator:
    """Values logged under one name from one hook, for one dataloader, on this rank.

    Args:
        name: the name of the metric.
        hook: the hook that logs it, one of :data:`HOOKS`.
        dataloader_idx: the dataloader; None where there is one, or where all are put into one value.
        asked: the options as the user gave them, in the order of :data:`ASKED`.
        options: the same with every default decided.
    """

    __slots__ = (
        "asked",
        "borrowed",
        "dataloader_idx",
        "device_total",
        "dtype",
        "hook",
        "loaders",
        "metric",
        "metric_attribute",
        "metric_dirty",
        "muted",
        "name",
        "options",
        "plain_name",
        "simple",
        "stage",
        "step",
        "step_name",
        "sync_step",
        "total",
        "unseen",
        "weight",
        "weighted",
    )

    def __init__(
        self, name: str, hook: str, dataloader_idx: int | None, asked: tuple[Any, ...], options: LogOptions
    ) -> None:
        self.name = name
        self.hook = hook
        self.stage = HOOKS[hook].stage
        self.dataloader_idx = dataloader_idx
        self.loaders: set[int] = set()
        """The dataloaders for which it was logged, where all are put into one value."""
        self.asked = asked
        self.options = options
        self.plain_name = name + self.suffix
        self.step_name = f"{name}_step{self.suffix}" if self.both else self.plain_name
        self.muted = self.sync_step = self.simple = self.weighted = False
        self.borrowed = False
        """True for an accumulator that shows the values of steps of another rank, and has none of its own."""
        self.dtype = torch.float32
        self.metric: Any = None
        self.metric_attribute: str | None = None
        self.step: Any = None
        self.unseen = 0
        self.reset()

    def reset(self) -> None:
        """Drop the accumulation and reset a metric object. The value of the last step stays readable."""
        self.total: Any = None
        self.device_total: Tensor | None = None
        self.weight: Any = 0
        self.metric_dirty = False
        if self.metric is not None:
            self.metric.reset()

    @property
    def both(self) -> bool:
        """True where both the value of the step and that of the epoch are kept."""
        return self.options.on_step and self.options.on_epoch

    @property
    def suffix(self) -> str:
        """The end of the name that distinguishes the dataloaders."""
        return "" if self.dataloader_idx is None else f"/dataloader_idx_{self.dataloader_idx}"

    @property
    def identity(self) -> tuple[str, str, int | None]:
        """Name, hook and dataloader, which are the same on every rank."""
        return self.name, self.hook, self.dataloader_idx

    @property
    def dirty(self) -> bool:
        """True if values came since the last epoch was finalized."""
        return self.total is not None or self.device_total is not None or self.metric_dirty

    def add(self, value: Any, weight: Any) -> None:
        """Add a value, a number or a detached 0-d tensor, to the accumulation with its weight in a mean."""
        reduction = self.options.reduction
        if isinstance(value, Tensor):
            self._add_on_device(value, weight)
        elif reduction == "mean":
            if isinstance(weight, Tensor):
                weight = weight.item() if weight.is_cpu else weight
            if isinstance(weight, Tensor):
                self._add_on_device(torch.as_tensor(value, dtype=torch.float32, device=weight.device), weight)
            else:
                # an empty batch has no mean: its nan must not enter the total
                self.total = (self.total or 0) + (value * weight if weight else 0)
                self.weight = self.weight + weight
        else:
            self.weight = 1
            self.total = value if self.total is None else join_totals(reduction, self.total, value)

    def _add_on_device(self, value: Tensor, weight: Any) -> None:
        reduction = self.options.reduction
        total = self.device_total
        if total is None:
            # A normal tensor even under inference mode, or it could not be added to after it.
            with torch.inference_mode(False):
                dtype = _accumulator_dtype(value.device)
                if self.total is not None:  # resumed, or earlier values came from the host
                    total = torch.tensor(float(self.total), dtype=dtype, device=value.device)
                    self.total = None
                elif reduction in ("min", "max"):
                    start = float("inf") if reduction == "min" else -float("inf")
                    total = torch.full((), start, dtype=dtype, device=value.device)
                else:
                    total = torch.zeros((), dtype=dtype, device=value.device)
            self.device_total = total
        if value.device != total.device:
            value = value.to(total.device)
        if reduction == "mean":
            if isinstance(weight, Tensor):
                total.add_(value * weight.detach().to(total.device))
            elif weight:
                total.add_(value, alpha=weight)
            self.weight = self.weight + weight
        elif reduction == "sum":
            self.weight = 1
            total.add_(value)
        else:
            self.weight = 1
            smaller_or_larger = torch.minimum if reduction == "min" else torch.maximum
            total.copy_(smaller_or_larger(total, value.to(total.dtype)))

    def take_metric(self, metric: Any, attribute: str | None, module: Any) -> None:
        """Keep a metric object, which accumulates itself.

        Args:
            metric: the object, the same at every call.
            attribute: its path in the module; None to look for it.
            module: the user's module.

        Raises:
            ConfigurationError: another object than before, or one that keeps no value of its last step.
        """
        if self.metric is not metric:
            if self.metric is not None:
                raise ConfigurationError(
                    f"self.log({self.name!r}, ...) must get the same metric object at every call (got another "
                    f"{type(metric).__name__}); make it once, in the module's __init__"
                )
            if self.options.on_step and not hasattr(metric, "_forward_cache"):
                raise ConfigurationError(
                    f"self.log({self.name!r}, ...) can't have on_step=True: {type(metric).__name__} keeps no value of "
                    "its last step; log it with on_step=False, on_epoch=True"
                )
            self.metric = metric
            self.metric_attribute = attribute or _attribute_of(metric, module)
        self.metric_dirty = self.options.on_epoch

    def take_forward_value(self) -> None:
        """Take the value of the step that the metric object computed in its latest forward."""
        value = self.metric._forward_cache
        if value is None:
            raise ConfigurationError(
                f"self.log({self.name!r}, ..., on_step=True) needs the metric's value of this step: call the "
                f"{type(self.metric).__name__} itself (not only its update) before logging it"
            )
        self.step = value.detach().clone() if isinstance(value, Tensor) else float(value)
        self.dtype = self.step.dtype if isinstance(self.step, Tensor) else torch.float64

    def step_value(self) -> Tensor:
        """Return the value of the last step as a 0-d tensor."""
        if isinstance(self.step, Tensor):
            return as_normal_tensor(self.step)
        floating = self.dtype.is_floating_point or isinstance(self.step, bool | int)
        with torch.inference_mode(False):
            return torch.tensor(self.step, dtype=self.dtype if floating else torch.float64)


def as_normal_tensor(value: Tensor) -> Tensor:
    """Return ``value``, or a copy of it that is no inference tensor, which may be used outside inference mode."""
    if not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


def join_totals(reduction: str, left: Any, right: Any) -> Any:
    """Return two accumulations of one key, as numbers, as one; nan stays."""
    if reduction in ("mean", "sum"):
        return left + right
    if left != left or right != right:
        return float("nan")
    return min(left, right) if reduction == "min" else max(left, right)


_accumulator_dtypes: dict[torch.device, torch.dtype] = {}


def _accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return float64, so that the sum of a long epoch loses nothing, or float32 on a device without it."""
    dtype = _accumulator_dtypes.get(device)
    if dtype is None:
        try:
            dtype = torch.zeros((), dtype=torch.float64, device=device).dtype
        except (TypeError, RuntimeError):
            dtype = torch.float32
        _accumulator_dtypes[device] = dtype
    return dtype


def _attribute_of(metric: Any, module: Any) -> str | None:
    if isinstance(module, nn.Module):
        for path, child in module.named_modules():
            if child is metric:
                return str(path)
    for name, value in getattr(module, "__dict__", {}).items():
        if value is metric:
            return str(name)
    return None
