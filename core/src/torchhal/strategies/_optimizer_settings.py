"""Compare over the ranks the numbers by which optimizers step, as learning rates: each rank steps other elements."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.errors import DistributedError


def find_differing_settings(optimizers: Sequence[Optimizer], alias: str) -> DistributedError | None:
    """Return the error, on every rank alike, for a value of a parameter group that isn't the same on each rank.

    Called on every rank. Each sends a checksum, and its values where these differ.
    """
    mine = _settings(optimizers)
    what = "comparison of the optimizers' settings"
    if len(set(collectives.all_gather_object(zlib.crc32(repr(mine).encode()), name=what))) == 1:
        return None
    everybody = collectives.all_gather_object(mine, name=what)
    for rank, others in enumerate(everybody[1:], start=1):
        for name in {**everybody[0], **others}:
            first, other = (each.get(name, "nothing") for each in (everybody[0], others))
            if first != other:
                return DistributedError(
                    f"{name} is {first} on rank 0 and {other} on rank {rank}, and under strategy {alias!r} each rank "
                    "steps its share of the elements by it, which would train something else. Make it of what all "
                    "ranks have: of a value that trainer.strategy.reduce(value) has averaged, say, instead of the loss "
                    "of a rank's own batch"
                )
    return None


def _settings(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    return {
        f"param_groups[{number}][{key!r}] of {type(optimizer).__name__}"
        + (f" {index}" if len(optimizers) > 1 else ""): text
        for index, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and (text := _text(value)) is not None
    }


def _text(value: Any) -> str | None:
    """Return ``value`` in words; None for what isn't compared, as an object or a large tensor."""
    if isinstance(value, torch.Tensor):
        return (
            repr(value.item()) if value.numel() == 1 and not isinstance(value, DTensor) and not value.is_meta else None
        )
    if isinstance(value, tuple | list):
        texts = list(map(_text, value))
        return None if None in texts else repr(texts)
    return repr(value) if value is None or isinstance(value, bool | int | float | complex | str) else None
