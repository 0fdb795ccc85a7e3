"""One key of ``self.log``: its accumulation on this rank, and how those of all ranks become one value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchhal.errors import ConfigurationError
from torchhal.pytree import map_tensors, move_to_device
from torchhal.strategies.base import STEPS
from torchhal.trainer.logging._log_options import HOOKS, LogOptions

_NARROW = (torch.float32, torch.float16, torch.bfloat16)

Payload = dict[str, Any]
"""An accumulation as plain data: what ranks exchange and checkpoints hold."""

Step = tuple[str, str, int | None, tuple[Any, ...], torch.dtype, float]
"""The value of a step as plain data: name, hook, dataloader, the options asked for, dtype, number."""


class Ranks(Protocol):
    """The part of a strategy that is needed here."""

    @property
    def world_size(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def is_data_leader(self) -> bool: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...

    def reduce(self, value: Any, op: str = "mean") -> Any: ...


class MetricAccumulator:
    """What was logged under one name from one hook, for one dataloader, on this rank."""

    __slots__ = (
        "asked",
        "borrowed",
        "dataloader_idx",
        "device_total",
        "dtype",
        "hook",
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
        self.asked = asked
        self.options = options
        self.plain_name = name + self.suffix
        self.step_name = f"{name}_step{self.suffix}" if self.both else self.plain_name
        self.muted = self.sync_step = self.simple = self.weighted = False
        self.borrowed = False
        """Whether it only shows what another rank logged."""
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
        return self.options.on_step and self.options.on_epoch

    @property
    def suffix(self) -> str:
        return "" if self.dataloader_idx is None else f"/dataloader_idx_{self.dataloader_idx}"

    @property
    def identity(self) -> tuple[str, str, int | None]:
        return self.name, self.hook, self.dataloader_idx

    @property
    def dirty(self) -> bool:
        return self.total is not None or self.device_total is not None or self.metric_dirty

    def add(self, value: Any, weight: Any) -> None:
        """Take one value, a number or a detached 0-d tensor, into the accumulation."""
        reduction = self.options.reduction
        if isinstance(value, Tensor):
            self._add_on_device(value, weight)
        elif reduction == "mean":
            if isinstance(weight, Tensor):
                weight = weight.item() if weight.is_cpu else weight
            if isinstance(weight, Tensor):
                self._add_on_device(torch.as_tensor(value, dtype=torch.float32, device=weight.device), weight)
            else:
                # an empty batch has no mean: its nan must not spoil the others'
                self.total = (self.total or 0) + (value * weight if weight else 0)
                self.weight = self.weight + weight
        else:
            self.weight = 1
            self.total = value if self.total is None else _together(reduction, self.total, value)

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
        value = self.metric._forward_cache
        if value is None:
            raise ConfigurationError(
                f"self.log({self.name!r}, ..., on_step=True) needs the metric's value of this step: call the "
                f"{type(self.metric).__name__} itself (not only its update) before logging it"
            )
        self.step = value.detach().clone() if isinstance(value, Tensor) else float(value)
        self.dtype = self.step.dtype if isinstance(self.step, Tensor) else torch.float64

    def step_value(self) -> Tensor:
        """The value of the last step as a 0-d tensor."""
        if isinstance(self.step, Tensor):
            return is_plain_number(self.step)
        floating = self.dtype.is_floating_point or isinstance(self.step, bool | int)
        with torch.inference_mode(False):
            return torch.tensor(self.step, dtype=self.dtype if floating else torch.float64)


def is_plain_number(value: Tensor) -> Tensor:
    """``value`` as a tensor that may be used anywhere, also when it was made under inference mode."""
    if not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


def _together(reduction: str, left: Any, right: Any) -> Any:
    """Two accumulations of one key, as numbers; nan stays."""
    if reduction in ("mean", "sum"):
        return left + right
    if left != left or right != right:
        return float("nan")
    return min(left, right) if reduction == "min" else max(left, right)


def reduce_numbers(reduction: str, values: list[Any]) -> Any:
    """Numbers of several ranks as one."""
    total = values[0]
    for value in values[1:]:
        total = _together(reduction, total, value)
    return total / len(values) if reduction == "mean" else total


_accumulator_dtypes: dict[torch.device, torch.dtype] = {}


def _accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, in which a long epoch's sum loses nothing, where the device has it."""
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


def pack(entry: MetricAccumulator, *, keep: bool = False) -> Payload:
    """The entry's accumulation; the entry begins anew unless it is to ``keep`` it.

    Kept (for a checkpoint), totals are numbers, and a metric object's state goes along.
    """
    total: Any = entry.total if entry.device_total is None else entry.device_total
    weight = entry.weight
    payload: Payload = {
        "name": entry.name,
        "identity": entry.identity,
        "suffix": entry.suffix,
        "both": entry.both,
        "reduction": entry.options.reduction,
        "logger": entry.options.logger,
        "prog_bar": entry.options.prog_bar,
        "sync": entry.options.sync_epoch,
        "wide": entry.dtype not in _NARROW,
        "metric": (entry.metric_attribute or True) if entry.metric is not None else False,
        "total": total,
        "weight": weight,
    }
    if keep:
        payload["total"], payload["weight"] = _number(total), _number(weight)
        if entry.metric is not None:
            payload["metric_state"] = _metric_state(entry.metric)
    else:
        entry.total = entry.device_total = None
        entry.weight = 0
        entry.metric_dirty = False
    return payload


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _metric_state(metric: Any) -> dict[str, Any] | None:
    """A torchmetrics object's accumulated state; None for other objects, which keep theirs as they like."""
    defaults = getattr(metric, "_defaults", None)
    if not isinstance(defaults, dict):
        return None
    state = {name: map_tensors(getattr(metric, name), _host_copy) for name in defaults}
    if isinstance(getattr(metric, "_update_count", None), int):
        state["_update_count"] = metric._update_count
    return state


def _host_copy(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    """Give a torchmetrics object the state that :func:`pack` kept."""
    for name, value in state.items():
        default = metric._defaults.get(name)
        setattr(metric, name, move_to_device(value, default.device) if isinstance(default, Tensor) else value)


def merge_by_key(payloads: list[Payload]) -> list[Payload]:
    """One payload per key, those of the same key taken together."""
    folded: dict[Any, Payload] = {}
    for payload in payloads:
        known = folded.get(payload["identity"])
        if known is None:
            folded[payload["identity"]] = dict(payload)
            continue
        for option in ("reduction", "both", "logger", "prog_bar", "sync"):
            if known[option] != payload[option]:
                raise ConfigurationError(
                    f"{payload['name']!r} must be logged with the same options on every rank (got {option}="
                    f"{known[option]!r} and {payload[option]!r})"
                )
        if bool(known["metric"]) != bool(payload["metric"]):
            raise ConfigurationError(f"{payload['name']!r} must be a metric object on every rank, or on none")
        if known["metric"] is True:
            known["metric"] = payload["metric"]
        known["wide"] = known["wide"] or payload["wide"]
        known["weight"] = known["weight"] + payload["weight"]
        if known["total"] is None or payload["total"] is None:
            known["total"] = payload["total"] if known["total"] is None else known["total"]
        else:
            known["total"] = _together(known["reduction"], known["total"], payload["total"])
    return list(folded.values())


def combine(
    payloads: list[Payload], ranks: Ranks, beside: Any = None, *, leader: int = 0
) -> tuple[list[Payload], list[Any]]:
    """The payloads of all ranks folded key by key, the same on every rank; unsynced keys stay this rank's own.

    Totals travel as exact numbers together with the keys: one collective, in which a rank without a key simply
    brings none. Of ranks that see the same samples, one brings them. An unsynced key of ``leader``, another rank than
    0, is shown by those that have no value of their own.

    Returns:
        The payloads, and what every rank brought ``beside`` them.
    """
    shared = [payload for payload in payloads if payload["sync"]]
    own = [payload for payload in payloads if not payload["sync"]]
    shown = [payload for payload in own if leader and payload["identity"][1] in STEPS]
    sent = [*shared, *shown]
    for payload, total in zip(sent, to_host([payload["total"] for payload in sent]), strict=True):
        payload["total"], payload["weight"] = total, _number(payload["weight"])
    gathered = ranks.all_gather_object((shared if ranks.is_data_leader else [], shown, beside))
    known = {payload["identity"] for payload in own}
    own += [payload for payload in gathered[leader][1] if payload["identity"] not in known]
    return merge_by_key([payload for rank in gathered for payload in rank[0]]) + own, [rank[2] for rank in gathered]


def to_host(totals: Iterable[Any]) -> list[Any]:
    """Tensors as numbers, with one transfer for all that lie together; numbers as they are."""
    host = list(totals)
    groups: dict[Any, list[int]] = {}
    for position, total in enumerate(host):
        if isinstance(total, Tensor):
            groups.setdefault((total.device, total.dtype), []).append(position)
    for positions in groups.values():
        first = host[positions[0]]
        numbers = [first.item()] if len(positions) == 1 else _stacked([host[position] for position in positions])
        for position, number in zip(positions, numbers, strict=True):
            host[position] = number
    return host


def _stacked(values: list[Tensor]) -> list[Any]:
    with torch.no_grad():
        return list(torch.stack([value.reshape(()) for value in values]).tolist())


def reduced(payload: Payload) -> Tensor:
    """The value of the epoch: a 0-d tensor, where the values were; float64 if they were wider than float32."""
    total = payload["total"]
    if payload["reduction"] == "mean":
        weight = payload["weight"]
        if isinstance(total, Tensor) or isinstance(weight, Tensor):
            total = total / weight
        else:
            total = total / weight if weight else float("nan")
    dtype = torch.float64 if payload["wide"] else torch.float32
    with torch.inference_mode(False):
        if not isinstance(total, Tensor):
            return torch.tensor(total, dtype=dtype)
        return total.clone() if payload["wide"] else total.to(dtype, copy=True)


def compute_metric(name: str, metric: Any) -> Tensor:
    """A metric object's value of the epoch; between ranks it is the object that communicates."""
    with torch.no_grad():
        value = metric.compute()
    with torch.inference_mode(False):
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.detach().clone().reshape(())
        if isinstance(value, bool | int | float):
            return torch.tensor(float(value), dtype=torch.float64)
    raise ConfigurationError(
        f"the metric object logged as {name!r} must compute one number (got {value!r}); log what it computes "
        "with self.log_dict instead"
    )
