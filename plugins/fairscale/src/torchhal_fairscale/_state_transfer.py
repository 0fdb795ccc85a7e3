"""Send the state that an optimizer has of single parameters from rank to rank, one parameter's at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def send_entries(
    entries: Mapping[int, Any], routes: Sequence[tuple[int, int, int]], host: torch.device
) -> dict[int, dict[str, tuple[Any, bool]]]:
    """Return the entries that came to this rank, by number, for :func:`placed`.

    Tensors travel in host memory: unpickled, they would be on the sender's device.

    Args:
        entries: this rank's, by the numbers of their parameters.
        routes: number, source and destination of each that is sent; the same on every rank.
        host: the device of objects that are sent.
    """
    rank = dist.get_rank()
    come = {}
    for number, source, destination in routes:
        if rank == source:
            packed = {name: _packed(value) for name, value in entries[number].items()}
            dist.send_object_list([packed], dst=destination, device=host)
        elif rank == destination:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=source, device=host)
            come[number] = received[0]
    return come


def placed(entry: Mapping[str, tuple[Any, bool]], device: torch.device) -> dict[str, Any]:
    """Return an entry that came, with what was on the sender's device on this one; some counts are on the host."""
    return {name: value.to(device) if was_on_device else value for name, (value, was_on_device) in entry.items()}


def _packed(value: Any) -> tuple[Any, bool]:
    if not isinstance(value, torch.Tensor):
        return value, False
    return value.detach().cpu(), value.device.type != "cpu"
