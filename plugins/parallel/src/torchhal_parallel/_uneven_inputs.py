"""Forwards that some ranks of a shard group have no batch for: they gather the units that the others gather."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def uneven_forward(
    ranks: Collection[int],
    group: Any,
    units: Sequence[Any],
    device: torch.device,
    *,
    keep: bool,
    guard: AbstractContextManager[Any],
) -> Iterator[None]:
    """Surround a forward without gradients that only ``ranks`` run; the others of ``group`` do nothing inside.

    The first of these ranks sends which unit comes next, and the others gather it with them: no batch is made up, and
    no user code runs twice. The forward may call the units in any order, which need not be known before.

    Args:
        ranks: global ones, in ``group`` or not.
        group: the ranks that share the parameters. All of them enter, with their units sharded.
        units: what ``fully_shard`` was applied to, in the same order on every rank.
        device: that the group's backend communicates from.
        keep: units stay whole from their forward to the end of the step.
        guard: context around what the ranks without a batch block on.
    """
    members = dist.get_process_group_ranks(group)
    leaders = [rank for rank in members if rank in ranks]
    if not leaders or len(leaders) == len(members):
        yield
        return
    word = torch.zeros((), dtype=torch.int64, device=device)

    def tell(index: int) -> int:
        """Return the unit that comes next, their number at the end; a leader's own, the same on all leaders."""
        word.fill_(index)
        dist.broadcast(word, src=leaders[0], group=group)
        return int(word)

    if dist.get_rank() in leaders:
        with _told(units, tell):
            yield
        tell(len(units))  # not after an error: the guard raises on the ranks that wait
        return
    for unit in reversed(units):  # a first forward would begin with the outermost
        unit._get_fsdp_state()._lazy_init()
    with guard:
        while (index := tell(-1)) < len(units):
            units[index].unshard()
            if not keep:
                units[index].reshard()
    yield


@contextmanager
def _told(units: Sequence[nn.Module], tell: Any) -> Iterator[None]:
    place = {id(unit): index for index, unit in enumerate(units)}

    def hook(unit: nn.Module, args: Any) -> None:
        tell(place[id(unit)])

    handles = [unit.register_forward_pre_hook(hook, prepend=True) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
