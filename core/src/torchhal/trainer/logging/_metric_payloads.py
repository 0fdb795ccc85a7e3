"""Exchange accumulations between ranks and checkpoints as plain data, and reduce them to values of an epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhal.errors import ConfigurationError
from torchhal.pytree import map_tensors, move_to_device
from torchhal.strategies.base import STEPS
from torchhal.trainer.logging._metric_accumulators import MetricAccumulator, join_totals

_NARROW = (torch.float32, torch.float16, torch.bfloat16)

Payload = dict[str, Any]
"""An accumulation as plain data: what ranks exchange and checkpoints hold."""


class Ranks(Protocol):
    """Methods of a strategy that logging uses."""

    @property
    def world_size(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def is_data_leader(self) -> bool: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...

    def reduce(self, value: Any, op: str = "mean") -> Any: ...


def pack(accumulator: MetricAccumulator, *, keep: bool = False) -> Payload:
    """Return the accumulation of ``accumulator`` as plain data, and begin a new one unless ``keep`` is True.

    Args:
        accumulator: of this rank.
        keep: leave the accumulation as it is, for a checkpoint: totals are numbers, and the state of a metric object
            is included.
    """
    total: Any = accumulator.total if accumulator.device_total is None else accumulator.device_total
    weight = accumulator.weight
    payload: Payload = {
        "name": accumulator.name,
        "identity": accumulator.identity,
        "suffix": accumulator.suffix,
        "loaders": set(accumulator.loaders),
        "both": accumulator.both,
        "reduction": accumulator.options.reduction,
        "logger": accumulator.options.logger,
        "prog_bar": accumulator.options.prog_bar,
        "sync": accumulator.options.sync_epoch,
        "wide": accumulator.dtype not in _NARROW,
        "metric": (accumulator.metric_attribute or True) if accumulator.metric is not None else False,
        "total": total,
        "weight": weight,
    }
    if keep:
        payload["total"], payload["weight"] = _number(total), _number(weight)
        if accumulator.metric is not None:
            payload["metric_state"] = _metric_state(accumulator.metric)
    else:
        accumulator.total = accumulator.device_total = None
        accumulator.weight = 0
        accumulator.metric_dirty = False
    return payload


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _metric_state(metric: Any) -> dict[str, Any] | None:
    """Return the accumulated state of a torchmetrics object; None for objects of other kinds."""
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
    """Load the state that :func:`pack` has read into a torchmetrics object."""
    for name, value in state.items():
        default = metric._defaults.get(name)
        setattr(metric, name, move_to_device(value, default.device) if isinstance(default, Tensor) else value)


def merge_by_key(payloads: list[Payload]) -> list[Payload]:
    """Return one payload per key, with the payloads of the same key joined.

    Raises:
        ConfigurationError: the options of a key differ between ranks.
    """
    joined: dict[Any, Payload] = {}
    for payload in payloads:
        known = joined.get(payload["identity"])
        if known is None:
            joined[payload["identity"]] = dict(payload)
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
        known["loaders"] = known["loaders"] | payload["loaders"]
        known["weight"] = known["weight"] + payload["weight"]
        if known["total"] is None or payload["total"] is None:
            known["total"] = payload["total"] if known["total"] is None else known["total"]
        else:
            known["total"] = join_totals(known["reduction"], known["total"], payload["total"])
    return list(joined.values())


def find_metric(payload: Payload, module: Any) -> Any:
    """Return the metric object of ``payload`` in ``module``, on a rank that has not logged it itself.

    Raises:
        ConfigurationError: it is no attribute of the module.
    """
    path = payload["metric"]
    metric: Any = None
    if isinstance(path, str):
        try:
            metric = operator.attrgetter(path)(module)
        except AttributeError:
            pass
    if metric is None:
        raise ConfigurationError(
            f"the metric object logged as {payload['name']!r} can't be found on this rank, which did not log it "
            "itself but must take part in its compute(): make it an attribute of the module, or pass "
            "metric_attribute"
        )
    return metric


def combine(
    payloads: list[Payload], ranks: Ranks, beside: Any = None, *, leader: int = 0
) -> tuple[list[Payload], list[Any]]:
    """Gather the payloads of all ranks and join them by key; unsynced keys stay this rank's own.

    Totals are sent as exact numbers together with the keys: one collective, in which a rank without a key
    sends none. Of ranks that see the same samples, one sends them. An unsynced key of ``leader``, another rank than
    0, is shown by those that have no value of their own. Every rank must call.

    Args:
        payloads: of this rank.
        ranks: the strategy.
        beside: any further object that this rank sends.
        leader: the first data leader.

    Returns:
        The payloads, the same on every rank where they are synced, and the ``beside`` of each rank.
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


def join_numbers(reduction: str, values: list[Any]) -> Any:
    """Return the numbers of several ranks as one."""
    total = values[0]
    for value in values[1:]:
        total = join_totals(reduction, total, value)
    return total / len(values) if reduction == "mean" else total


def to_host(totals: Iterable[Any]) -> list[Any]:
    """Return tensors as numbers, with one transfer for all of a device and dtype; numbers stay as they are."""
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


def reduce_payload(payload: Payload) -> Tensor:
    """Return the value of the epoch as a 0-d tensor on the device of the values.

    Its dtype is float64 if they were wider than float32, else float32.
    """
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
    """Return the value of the epoch of a metric object, whose ``compute`` may communicate between ranks."""
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
