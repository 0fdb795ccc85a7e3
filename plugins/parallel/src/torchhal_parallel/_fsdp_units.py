"""Check which modules and parameters torch's ``fully_shard`` can shard, and which parameters stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchhal.errors import ModelError, UnsupportedCombinationError
from torchhal.precision import Precision


def check_torch(alias: str) -> None:
    """Raise UnsupportedCombinationError on a torch whose ``fully_shard`` lacks the methods that are called here."""
    needed = ("set_reshard_after_forward", "set_reshard_after_backward", "set_force_sum_reduction_for_comms")
    if missing := [name for name in needed if not hasattr(FSDPModule, name)]:
        raise UnsupportedCombinationError(
            f"strategy {alias!r} shards by torch's fully_shard and needs torch 2.8 or later: torch {torch.__version__} "
            f"has no FSDPModule.{missing[0]}. Use another torch, or strategy='zero1', which divides the optimizer's "
            "state alone"
        )


def check_shardable(module: nn.Module, alias: str) -> None:
    """Raise ModelError, with the names, for what ``fully_shard`` would refuse in the midst of training."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ModelError(
                f"{name!r} is a {type(submodule).__name__} with sparse=True, whose gradients strategy {alias!r} can't "
                "shard: use sparse=False, or strategy='ddp'"
            )
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous():
            raise ModelError(
                f"{name!r} is not contiguous (its shape is {tuple(parameter.shape)}, its strides are "
                f"{parameter.stride()}), and strategy {alias!r} shards contiguous parameters alone: make it of "
                "tensor.contiguous(), leave memory_format=torch.channels_last to inputs, or use strategy='zero1'"
            )


def is_called_in_parts(module: nn.Module) -> bool:
    """Return whether the parts of ``module`` are called one by one, rather than by its own forward or step."""
    return not getattr(module, "automatic_optimization", True) or getattr(module, "called_in_parts", False)


def called_submodules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that are called and have parameters: containers aren't, their elements are."""
    parts: list[nn.Module] = []
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            parts += called_submodules(child)
        elif next(child.parameters(), None) is not None:
            parts.append(child)
    return parts


def kept_whole(module: nn.Module, units: Sequence[nn.Module], roots: Sequence[nn.Module]) -> dict[str, str]:
    """Return names of the parameters that stay whole on every rank, and why: ``fully_shard`` can't divide them.

    Those in no root or in several, those without a dimension or an element, and of each unit, inner ones first, the
    trained ones in another dtype than most of its trained elements have.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, str] = {}
    holders = [id(parameter) for root in roots for parameter in root.parameters()]
    for identity, name in names.items():
        if (count := holders.count(identity)) != 1:
            found[name] = "is shared by parts that are called one by one" if count else "is in no part that is called"
    seen: set[int] = set()
    for unit in units:
        own = [parameter for parameter in unit.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        sizes: dict[torch.dtype, int] = {}
        for parameter in own:
            if not parameter.dim() or not parameter.numel():
                found[names[id(parameter)]] = "has no dimension" if not parameter.dim() else "has no element"
            elif parameter.requires_grad:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        for parameter in own:
            if parameter.requires_grad and parameter.dtype != most:
                found.setdefault(names[id(parameter)], f"is {parameter.dtype} beside {most}")
    return found


def check_scaled(whole: Mapping[str, str], precision: Precision, alias: str) -> None:
    """Raise ModelError for parameters that stay whole beside sharded ones, where a scaler handles them together."""
    if getattr(precision, "scaler", None) is None:
        return
    for name, reason in whole.items():
        raise ModelError(
            f"{name!r} {reason}, so strategy {alias!r} keeps it whole, and the scaler of precision "
            f"{precision.alias!r} takes no whole and sharded gradients together: give it the shape (1,) and the dtype "
            "of the others, or use precision='bf16-mixed'"
        )
