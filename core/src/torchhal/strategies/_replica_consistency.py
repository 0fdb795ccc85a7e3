"""Refuse layers that would let replicas of a model diverge, and compare the replicas' weights after a fit."""

from __future__ import annotations

import hashlib
import math
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.distributed import collectives
from torchhal.errors import ModelError

_PIECE, _PROJECTIONS = 1 << 17, 8
_PLAIN = (torch.Tensor, nn.Parameter)  # other classes can't be compared by their bytes

NamedPart = tuple[str, Any, torch.Tensor]
"""A parameter's name, the part of it (any value with one ``repr`` on all ranks with the same one), and that part."""


def check_lookups(module: nn.Module, why: str) -> None:
    """Raise ModelError for an embedding with ``max_norm``, which scales the rows that it looks up in its own weight.

    Args:
        module: the whole model.
        why: the effect of these writes, to end the sentence with.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            bound = f"self.{name}.weight.data.renorm_({layer.norm_type}, 0, {layer.max_norm})"
            raise ModelError(
                f"{name!r} is an {type(layer).__name__} with max_norm={layer.max_norm}, which writes to its weight "
                f"whenever rows are looked up, and {why}. Leave max_norm out and bound all rows alike between the "
                f"steps, by {bound} in on_train_batch_start, or train on one device"
            )


def check_frequencies(module: nn.Module, who: str) -> None:
    """Raise ModelError for an embedding with ``scale_grad_by_freq``.

    It divides the gradient of a row by how often a batch looks it up.

    Args:
        module: the whole model.
        who: what counts only in its own share of the batch, to continue the sentence with.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            raise ModelError(
                f"{name!r} is an {type(layer).__name__} with scale_grad_by_freq=True, which divides the gradient of a "
                f"row by how often the batch looks it up, and {who} would count in its own share of the batch alone. "
                "Leave scale_grad_by_freq out, or train on one device"
            )


def find_difference(parts: Iterable[NamedPart], when: str = "after the fit") -> str:
    """Describe, equally on every rank, where ranks with the same part have other values in it; "" if nowhere.

    ``when`` begins the sentence.

    A difference within :func:`rounding` is a warning on rank 0 instead. Called on every rank of the process group. Each
    sends one digest; a checksum of each part where these differ, as those of ranks with different parts do; and names
    only of the parts that differ.
    """
    mine = {_digest(name, place): (name, part) for name, place, part in parts if type(part) in _PLAIN}
    sums = {key: _crc(part) for key, (_, part) in mine.items()}
    what = "comparison of the replicas"
    if len(set(collectives.all_gather_object(_digest(*sorted(sums.items())), name=what))) == 1:
        return ""
    differing = _differing(collectives.all_gather_object(sums, name=what))
    if not differing:
        return ""
    found = {
        key: (mine[key][0], rounding(mine[key][1].dtype), _sketch(mine[key][1])) for key in differing if key in mine
    }
    everybody = collectives.all_gather_object(found, name=what)
    apart = {key: _distance([everybody[rank][key][2] for rank in ranks]) for key, ranks in differing.items()}
    named = {key: everybody[ranks[0]][key][:2] for key, ranks in differing.items()}
    excess = {key: apart[key] / named[key][1] if apart[key] else 0.0 for key in differing}
    key = max(differing, key=lambda each: excess[each])
    ranks = ", ".join(map(str, differing[key]))
    count = len({name for name, _ in named.values()})
    others = f" and {count - 1} more" if count > 1 else ""
    said = f"{when} {named[key][0]!r}{others} differ between ranks {ranks}, by {apart[key]:.1e} of the norm"
    if excess[key] < 1:
        if dist.get_rank() == 0:
            warnings.warn(f"{said}: they have rounded differently. Checkpoints hold the first one's", stacklevel=2)
        return ""
    return (
        f"{said}, though each should have the same weights. Something changes them on each rank by itself: a forward "
        "that writes to a parameter by what is in its batch (F.embedding with max_norm), a layer made while training "
        "with each rank's own random numbers, a step with gradients that were not averaged. Checkpoints hold the "
        "first one's"
    )


def parts_differ(parts: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Return, equally on every rank, whether any part has another value on some rank. Called on every rank."""
    sums = [(name, _crc(part.detach())) for name, part in parts]
    return len(set(collectives.all_gather_object(_digest(*sums), name="comparison of the replicas"))) > 1


def rounding(dtype: torch.dtype) -> float:
    """Return the greatest distance, relative to their norm, of replicas that differ by rounding alone.

    Other kernels round otherwise: about 1e-4 in float32, 5e-9 in float64, 3e-2 in bfloat16; hardly anything in
    integers.
    """
    known = dtype.is_floating_point or dtype.is_complex
    return math.sqrt(torch.finfo(dtype).eps) / 3 if known else math.ulp(0.0)


def _digest(*values: Any) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()


def _differing(everybody: Sequence[dict[bytes, int]]) -> dict[bytes, list[int]]:
    """Return keys of the parts of which there are several checksums, each with the ranks that hold it."""
    holders: dict[bytes, list[int]] = {}
    for rank, sums in enumerate(everybody):
        for key in sums:
            holders.setdefault(key, []).append(rank)
    return {key: ranks for key, ranks in holders.items() if len({everybody[rank][key] for rank in ranks}) > 1}


def _host_bytes(part: torch.Tensor) -> torch.Tensor:
    dense = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def _crc(part: torch.Tensor) -> int:
    return zlib.crc32(_host_bytes(part).numpy().data) if part.numel() else 0


def _sketch(part: torch.Tensor) -> tuple[float, list[float]]:
    """Return the norm and a few random projections: those of two tensors are about as far apart as the tensors."""
    flat = part.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    generator = torch.Generator().manual_seed(0)
    square, projections = 0.0, torch.zeros(_PROJECTIONS, dtype=torch.float64)
    for piece in flat.split(_PIECE):  # type: ignore[no-untyped-call]
        exact = piece.double()
        square += exact.square().sum().item()
        projections += torch.randn(_PROJECTIONS, len(exact), generator=generator, dtype=torch.float64) @ exact
    return math.sqrt(square), projections.tolist()


def _distance(sketches: Sequence[tuple[float, list[float]]]) -> float:
    """Estimate the distance of the first from the furthest, relative to the largest norm; infinite if undefined."""
    norms = [norm for norm, _ in sketches]
    furthest = max(math.dist(sketches[0][1], projections) for _, projections in sketches)
    apart = furthest / math.sqrt(_PROJECTIONS) / (max(norms) or 1.0)
    return apart if math.isfinite(apart) else math.inf
