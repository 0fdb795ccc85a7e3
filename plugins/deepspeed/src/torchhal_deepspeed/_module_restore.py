"""Undo what the engine does to a user's module in place, so that it is an ordinary module again after a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from torchhal.errors import ModelError

_OF_MODULES: Final = frozenset(
    {
        "_external_params", "all_parameters", "_original_parameters", "pre_bwd_fn", "post_bwd_fn",
        "applied_pre_backward_ref_cnt",
    }
)  # fmt: skip
_OF_PARAMETERS: Final = frozenset(
    {
        "grad_accum", "param_idx_in_group", "_hp_mapping", "_hp_grad", "_dp_group", "get_full_hp_param",
        "get_full_hp_grad", "set_full_hp_param", "set_full_hp_grad", "_index_in_param_group",
        "load_hp_checkpoint_state", "is_external_param", "nvme_swapper", "all_gather", "all_gather_coalesced",
        "partition", "reduce_gradients_at_owner", "partition_gradients", "aligned_size", "padding_size",
        "partition_numel", "item", "convert_to_zero_parameters", "_z3_optimizer", "_zero_optimizer",
    }
)  # fmt: skip
"""Attributes that the engine sets, beside those that begin with ``ds_``."""


class ModuleSnapshot:
    """The attributes, dtypes and memory layouts of a module before the engine had it, which :meth:`undo` restores.

    Attributes that the user or a callback sets meanwhile stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(owner, set(vars(owner)), type(owner._parameters)) for owner in module.modules()]
        self._parameters = [
            (name, parameter, set(vars(parameter)), _like(parameter)) for name, parameter in module.named_parameters()
        ]
        self._buffers = [
            (owner, name, buffer.dtype)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def undo(self, whole: Mapping[str, torch.Tensor] | None = None) -> None:
        """Restore the module, with the tensors of ``whole``, by name, as values; None: it has its values."""
        for owner, attributes, kind in self._modules:
            _strip(owner, _OF_MODULES, attributes)
            if type(owner._parameters) is not kind:
                owner._parameters = kind(owner._parameters)
        for name, parameter, attributes, like in self._parameters:
            value: Any = parameter.data if whole is None else whole[name]
            # memory of its own, not the engine's
            parameter.data = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=value.device
            ).copy_(value.detach())
            _strip(parameter, _OF_PARAMETERS, attributes)
        for owner, name, dtype in self._buffers:
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.dtype is not dtype:
                owner._buffers[name] = buffer.to(dtype)


def divide_anew(module: nn.Module, init: Any) -> None:
    """Divide over the ranks of this run what ``zero.Init`` built in an earlier one, whose process groups are gone.

    No rank has more than one parameter whole at a time. Does nothing to what was built in this run.

    Args:
        module: the whole model.
        init: DeepSpeed's ``zero.Init`` of this run.

    Raises:
        ModelError: there were other ranks, or the parameters lie on NVMe.
    """
    old: list[tuple[str, Any]] = [item for item in module.named_parameters() if _is_left(item[1])]
    if not old:
        return
    for owner in module.modules():
        _strip(owner, _OF_MODULES)
        if type(owner._parameters) is not dict:
            owner._parameters = dict(owner._parameters)
    for name, parameter in old:
        part, ranks = parameter.ds_tensor, parameter.ds_zero_partition_world_size
        lost = part.final_location == "nvme" or ranks != dist.get_world_size()
        if lost or parameter.ds_zero_partition_rank != dist.get_rank():
            raise ModelError(
                f"{name!r} of {type(module).__name__} was built in parts for an earlier run of {ranks} rank(s), which "
                f"this one of {dist.get_world_size()} can't put together: build a new one, and continue from a "
                "checkpoint"
            )
        whole = torch.zeros(part.ds_numel * ranks, dtype=part.dtype, device=init.local_device)
        whole.narrow(0, part.ds_numel * dist.get_rank(), part.ds_numel).copy_(part.detach().flatten()[: part.ds_numel])
        dist.all_reduce(whole)
        shape = parameter.ds_shape
        _strip(parameter, _OF_PARAMETERS)
        parameter.data = whole[: shape.numel()].view(shape)
        init._convert_to_zero_parameters([parameter])


def _is_left(parameter: Any) -> bool:
    """Return True for a parameter that was divided over a process group which no longer exists."""
    if not hasattr(parameter, "ds_id"):
        return False
    try:
        dist.get_rank(group=parameter.ds_process_group)
    except ValueError:
        return True
    return False


def _strip(what: Any, names: Collection[str], kept: Collection[str] = ()) -> None:
    """Remove the attributes that are the engine's, except those in ``kept``."""
    for name in set(vars(what)).difference(kept):
        if name in names or name.startswith("ds_"):
            del vars(what)[name]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on ``meta`` with this one's shape, dtype and order in memory (such as channels last)."""
    return torch.empty_like(tensor, device="meta")
