"""Divide and gather the state of an optimizer whose parameters Colossal-AI has divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.distributed import collectives
from torchhal_colossalai._divided_tensors import is_of

if TYPE_CHECKING:
    from torchhal_colossalai._zero_engine import ZeroEngine


@torch.no_grad()
def gather_state(engine: ZeroEngine, *, keep: bool) -> dict[int, dict[str, Any]]:
    """Return the state of every parameter by its number, whole and on the CPU. Called on every rank.

    Colossal-AI's own takes every tensor but ``step`` for a shard; some optimizers have numbers in others, too.

    Args:
        engine: of the optimizer.
        keep: False on a rank that only helps.
    """
    entries: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(engine.numbered):
        shard = engine.shard_of(parameter)
        entry = engine.optimizer.state.get(parameter)
        if not entry:
            continue
        whole = {name: _gathered(value, shard, parameter) for name, value in entry.items()}
        if keep:
            entries[number] = whole
    return entries


def _gathered(value: Any, shard: torch.Tensor | None, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if shard is None or value.shape != shard.shape:
        return value.detach().cpu().clone()
    flat = value.new_empty(value.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(flat, value.contiguous())
    return flat[: parameter.numel()].view(parameter.shape).cpu()


def part_of_state(engine: ZeroEngine, parameter: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a parameter's whole state."""
    shard = engine.shard_of(parameter)
    if shard is None:
        return entry
    return {name: _part(name, value, shard, parameter) for name, value in entry.items()}


def _part(name: str, value: Any, shard: torch.Tensor, parameter: torch.Tensor) -> Any:
    if not is_of(value, name, parameter):
        return value
    flat = value.detach().reshape(-1)
    flat = nn.functional.pad(flat, [0, shard.numel() * dist.get_world_size() - flat.numel()])
    return torch.split(flat, shard.numel())[dist.get_rank()].clone()


@torch.no_grad()
def divide_state(engine: ZeroEngine) -> None:
    """Replace what the optimizer has come with by this rank's part of rank 0's. Called on every rank.

    It has been loaded, or it is from an earlier fit, after which rank 0 alone has it. A tensor travels at a time.
    """
    state = engine.optimizer.state
    mine = [dict(entry) if (entry := state.get(parameter)) else {} for parameter in engine.numbered]
    kinds = [{name: _kind(value) for name, value in entry.items()} for entry in mine]
    kinds = collectives.all_gather_object(kinds if dist.get_rank() == 0 else None)[0]
    for parameter, entry, names in zip(engine.numbered, mine, kinds, strict=True):
        state.pop(parameter, None)
        whole: dict[str, Any] = {}
        for name, kind in names.items():
            whole[name] = _received(kind, entry.get(name), parameter)
            if isinstance(kind, _Tensor):
                whole[name] = part_of_state(engine, parameter, {name: whole[name]})[name]
        if whole:
            state[parameter] = whole


class _Tensor:
    """Shape, dtype and place of a tensor of rank 0's."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype, self.is_on_host = value.shape, value.dtype, value.device.type == "cpu"


def _kind(value: Any) -> Any:
    return _Tensor(value) if isinstance(value, torch.Tensor) else value


def _received(kind: Any, value: Any, parameter: torch.Tensor) -> Any:
    """Return rank 0's ``value``, which is of that kind."""
    if not isinstance(kind, _Tensor):
        return kind
    if dist.get_rank() == 0:
        sent = value.detach().to(parameter.device, copy=True, memory_format=torch.contiguous_format)
    else:
        sent = torch.empty(kind.shape, dtype=kind.dtype, device=parameter.device)
    collectives.broadcast_tensors([sent])
    return sent.cpu() if kind.is_on_host else sent
