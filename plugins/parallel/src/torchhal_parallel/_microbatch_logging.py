"""Combine what a step logs for the parts of one batch into the value that it would log for the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchhal.trainer.logging import REDUCTIONS, changed, check_batch_size, check_value, decide, is_metric


@dataclass
class _Key:
    """One call of ``self.log`` in the step, met once per part."""

    asked: tuple[Any, ...]
    metric_attribute: str | None
    reduction: str
    values: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    weighed: bool = False
    """Whether the step gave a batch_size, or some part did not log."""


class MicrobatchLog:
    """A replacement of a Trainer's results while the parts of a batch run; :meth:`flush` logs what they logged.

    The n-th call with a name in one part belongs to the n-th in the others.
    """

    def __init__(self, results: Any, sizes: Sequence[int], device: torch.device) -> None:
        self.results = results
        self.sizes = sizes
        self.device = device
        self._keys: dict[tuple[str, str | None, int], _Key] = {}
        self.start_part(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.results, name)

    def start_part(self, part: int) -> None:
        """Take what is logged from now on as that of part ``part``."""
        self.part = part
        self._calls: dict[tuple[str, str | None], int] = {}

    def log(
        self,
        name: str,
        value: Any,
        hook: str | None,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """See ``Results.log``; its errors are raised here, while the user's line is still on the stack."""
        asked = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        call = self._calls.get((name, hook), 0)
        self._calls[name, hook] = call + 1
        key = self._keys.get((name, hook, call))
        if key is None:
            decide(name, hook, asked)
            key = self._keys[name, hook, call] = _Key(asked, metric_attribute, REDUCTIONS[reduce_fx])
        elif key.asked != asked:
            raise changed(name, str(hook), key.asked, asked)
        check_value(name, value)
        check_batch_size(name, batch_size)
        key.values.append(_kept(value))
        key.weights.append(self.sizes[self.part] if batch_size is None else batch_size)
        key.weighed = key.weighed or batch_size is not None

    def flush(self) -> None:
        """Log each value once, combined over the parts: a mean by their sizes, a sum, the least or the greatest."""
        for (name, hook, _), key in self._keys.items():
            prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only = key.asked
            metric = key.values[-1].metric if isinstance(key.values[-1], _MetricValue) else None
            if metric is None:
                value = combine(key.values, key.weights, key.reduction, self.device)
            else:
                value = metric
                self._combine_forward_values(key)
            whole = not key.weighed and len(key.values) == len(self.sizes)
            self.results.log(
                name, value, hook, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx,
                None if whole else _sum(key.weights, self.device), key.metric_attribute, rank_zero_only,
            )  # fmt: skip

    def _combine_forward_values(self, key: _Key) -> None:
        """Combine the values of a metric object for this step; it has accumulated over the parts by itself."""
        seen = [value.forward for value in key.values]
        if all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in seen):
            key.values[-1].metric._forward_cache = combine(seen, key.weights, "mean", self.device)


@contextmanager
def merged_log(trainer: Any, sizes: Sequence[int], device: torch.device) -> Iterator[Callable[[int], None]]:
    """Log one value for what parts of ``sizes`` samples log inside; yield the function that begins a part.

    Without a ``trainer`` there is nothing to log to.
    """
    if trainer is None:
        yield lambda part: None
        return
    results = trainer.results
    log = trainer.results = MicrobatchLog(results, sizes, device)
    try:
        yield log.start_part
    finally:
        trainer.results = results
    log.flush()


@dataclass
class _MetricValue:
    metric: Any
    forward: Any


def _kept(value: Any) -> Any:
    """Return a copy: what was logged must not follow when the model changes its tensor in place."""
    if isinstance(value, torch.Tensor):
        kept = value.detach()
        if hasattr(kept, "full_tensor"):
            kept = kept.full_tensor()
        return kept.clone().reshape(())
    if is_metric(value):
        forward = getattr(value, "_forward_cache", None)
        return _MetricValue(value, forward.detach().clone() if isinstance(forward, torch.Tensor) else forward)
    return value


def combine(values: Sequence[Any], weights: Sequence[Any], reduction: str, device: torch.device) -> Any:
    """Numbers or 0-d tensors of the parts as one: a number if all are, else a tensor, without waiting for a device.

    A part of weight 0 has no mean, and its nan must not spoil the others'.
    """
    if len(values) == 1:
        return _on(device, values[0]) if _off_host(values[0]) else values[0]
    given = [*values, *(weights if reduction == "mean" else ())]
    if any(map(_off_host, given)):
        return _combine_on_device(values, weights, reduction, device)
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    if reduction == "mean":
        shares = [weight.item() if isinstance(weight, torch.Tensor) else weight for weight in weights]
        total = sum(shares)
        pairs = zip(numbers, shares, strict=True)
        result = sum(number * share for number, share in pairs if share) / total if total else math.nan
    elif reduction == "sum":
        result = sum(numbers)
    elif any(number != number for number in numbers):
        result = math.nan
    else:
        result = min(numbers) if reduction == "min" else max(numbers)
    floating = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point}
    if len(floating) == 1 and all(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(result, dtype=_wide(floating.pop()))
    return result


def _combine_on_device(
    values: Sequence[Any], weights: Sequence[Any], reduction: str, device: torch.device
) -> torch.Tensor:
    here = [_on(device, value) for value in values]
    if reduction == "sum":
        return torch.stack(here).sum()
    if reduction != "mean":
        return torch.stack(here).amin() if reduction == "min" else torch.stack(here).amax()
    here = [value.to(_wide(value.dtype)) for value in here]
    if any(isinstance(weight, torch.Tensor) for weight in weights):
        shares = torch.stack([_on(device, weight) for weight in weights]).to(here[0].dtype)
        return torch.where(shares == 0, 0.0, torch.stack(here) * shares).sum() / shares.sum()
    total = sum(weights)
    shared = [value * (weight / total) for value, weight in zip(here, weights, strict=True) if weight]
    return torch.stack(shared).sum() if shared else torch.full_like(here[0], math.nan)


def _on(device: torch.device, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, non_blocking=device.type != "cpu")
    return torch.full((), value, device=device)  # filled there: a copy from the host would synchronize


def _off_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of at least float32, in which parts are added up without losing digits of each."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _sum(weights: Sequence[Any], device: torch.device) -> Any:
    if any(isinstance(weight, torch.Tensor) for weight in weights):
        return torch.stack([_on(device, weight) for weight in weights]).sum()
    return sum(weights)
