"""Read and write the parts that this rank's engine holds of parameters and optimizer state, as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchhal.errors import CheckpointMismatchError


class TensorSlice(NamedTuple):
    """A stretch of a flattened parameter, or of one of its state tensors, without padding.

    Args:
        tensor: shape (n,).
        offset: where it begins in the whole, in elements.
    """

    tensor: torch.Tensor
    offset: int


class PartitionSlice(NamedTuple):
    """The place of this rank's part in one of the optimizer's flat tensors.

    Args:
        group: index of the flat tensor.
        start: of the part in it, in elements.
        length: elements of the part, without padding.
        offset: as in :class:`TensorSlice`.
    """

    group: int
    start: int
    length: int
    offset: int


class PartitionMap:
    """The state of an engine in terms of the user's parameters.

    Every stage keeps fp32 values and optimizer state in flat tensors, each rank a part of them; below stage 1 whole.
    What is whole on every rank (buffers, frozen parameters below stage 3) is read from the module.

    Args:
        engine: DeepSpeed's.
        module: the user's, whose names count.
        groups: the parameters of each of the optimizer's groups as the user made them, frozen ones included.
    """

    def __init__(self, engine: Any, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.name_of = {parameter: name for name, parameter in module.named_parameters()}
        self.module = module
        self.groups = [list(group) for group in groups]
        self._group_of = {id(p): index for index, group in enumerate(self._engine_groups()) for p in group}

    def _engine_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        if self.stage == 0:
            return ()
        # without an optimizer, for a validation, stage 3 has none
        groups: Any = getattr(self.optimizer, "fp16_groups", ()) if self.stage == 3 else self.optimizer.bit16_groups
        return groups  # type: ignore[no-any-return]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The fp32 values of this rank, one tensor per group."""
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    @property
    def trains(self) -> bool:
        """True if the engine has an optimizer, False if it only gathers parameters to validate at stage 3."""
        return self.stage < 3 or hasattr(self.optimizer, "fp16_groups")

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that steps, the user's or DeepSpeed's; its state belongs to the flat tensors."""
        base: torch.optim.Optimizer = self.optimizer if self.stage == 0 else self.optimizer.optimizer
        return base

    # -- parameters ------------------------------------------------------------------------------------------

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def dtype(self, parameter: nn.Parameter, key: str | None = None) -> torch.dtype:
        """Return the dtype in which the values, or the state ``key``, are saved."""
        if self.stage == 0 or not self.is_divided(parameter):
            return parameter.dtype if key is None else self.base.state[parameter][key].dtype
        flat = self.flats[self._group_of[id(parameter)]]
        return flat.dtype if key is None else self.base.state[flat][key].dtype

    def is_divided(self, parameter: nn.Parameter) -> bool:
        """Return True if the optimizer has the parameter, so that ranks hold parts of it."""
        return id(parameter) in self._group_of

    @staticmethod
    def partition(parameter: Any) -> tuple[int, int]:
        """Return (offset, elements without padding) of this rank's part of a parameter of stage 3."""
        size = parameter.ds_tensor.ds_numel
        offset = size * dist.get_rank(group=parameter.ds_process_group)
        return offset, max(0, min(size, parameter.ds_numel - offset))

    def place(self, parameter: nn.Parameter) -> PartitionSlice | None:
        """Return the place of this rank's part of a divided parameter; None if it has none."""
        group = self._group_of[id(parameter)]
        if self.stage == 3:
            _, start, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            offset, count = self.partition(parameter)
            return PartitionSlice(group, start, count, offset) if count else None
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        address = mapping.get_hp_fragment_address()
        return PartitionSlice(group, address.start, address.numel, mapping.lp_fragment_address.start)

    def part(self, parameter: nn.Parameter, key: str | None = None) -> TensorSlice | None:
        """Return this rank's part of the fp32 values, or of the state ``key``; None if it has none."""
        place = self.place(parameter)
        if place is None:
            return None
        if self.stage == 3:  # by the optimizer's own method, which also fetches what lies on NVMe
            tensor = self.optimizer.get_local_fp32_param(parameter, key)
            return TensorSlice(tensor.narrow(0, 0, place.length), place.offset)
        flat = self.flats[place.group]
        if key is not None:
            flat = self.base.state[flat][key]
        return TensorSlice(flat.narrow(0, place.start, place.length), place.offset)

    def whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Return all of it, on the engine's device; every rank must call."""
        if not self.is_divided(parameter):
            if hasattr(parameter, "ds_tensor"):
                offset, count = self.partition(parameter)
                return self._joined(
                    parameter, TensorSlice(parameter.ds_tensor.detach().flatten().narrow(0, 0, count), offset)
                )
            return parameter.detach() if key is None else self.base.state[parameter][key]
        return self._joined(parameter, self.part(parameter, key), key)

    def _joined(self, parameter: nn.Parameter, part: TensorSlice | None, key: str | None = None) -> torch.Tensor:
        if part is None:
            like = self.flats[self._group_of[id(parameter)]]
            like = like if key is None else self.base.state[like][key]
        else:
            like = part.tensor
        shape = self.shape(parameter)
        joined = torch.zeros(shape.numel(), dtype=like.dtype, device=self.engine.device)
        if part is not None:
            joined.narrow(0, part.offset, part.tensor.numel()).copy_(part.tensor.detach())
        if dist.get_world_size() > 1:
            dist.all_reduce(joined)
        return joined.view(shape)

    def write(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Write this rank's part of ``value``, which is whole; :meth:`refresh` must follow the last weight."""
        flat_value = value.detach().flatten()
        if not self.is_divided(parameter):
            if hasattr(parameter, "ds_tensor"):
                offset, count = self.partition(parameter)
                parameter.ds_tensor.data.flatten()[:count].copy_(flat_value.narrow(0, offset, count))
            else:
                target = parameter.data if key is None else self.base.state[parameter][key]
                target.copy_(value)
            return
        if self.stage < 3 and key is None:
            parameter.data.copy_(value)  # the whole one that computes
        place = self.place(parameter)
        if place is None:
            return
        part = flat_value.narrow(0, place.offset, place.length)
        if self.stage == 3:
            padded = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)  # type: ignore[attr-defined]
            padded[: place.length].copy_(part)
            self.optimizer.set_local_hp_param(padded, parameter, key)
            return
        flat = self.flats[place.group]
        target = flat.data if key is None else self.base.state[flat][key]
        target.narrow(0, place.start, place.length).copy_(part)

    def refresh(self) -> None:
        """Copy the values that were written to the parameters that compute."""
        if self.stage < 3:
            return
        optimizer = self.optimizer
        for index in range(len(self._engine_groups())):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        persistent = optimizer.persistent_parameters
        if persistent:  # small ones that every rank keeps whole
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    # -- the optimizer's state -------------------------------------------------------------------------------

    def state_keys(self, parameter: nn.Parameter) -> tuple[list[str], dict[str, Any]]:
        """Return (names of the state tensors that are divided as the parameter is, the other values by name).

        Raises:
            CheckpointMismatchError: a state tensor of another shape: the optimizer treats the flat tensor as one.
        """
        if self.stage == 0:
            of, shape = parameter, parameter.shape
        elif self.is_divided(parameter):
            of = self.flats[self._group_of[id(parameter)]]  # type: ignore[assignment]
            shape = of.shape
        else:
            return [], {}
        divided, common = [], {}
        for key, value in self.base.state.get(of, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                divided.append(key)
            elif isinstance(value, torch.Tensor) and value.dim():
                raise CheckpointMismatchError(
                    f"{key!r} of {type(self.base).__name__} has the shape {tuple(value.shape)}, which belongs to no "
                    "parameter: ZeRO flattens them, and this optimizer looks at their shapes"
                )
            else:
                common[key] = value
        return divided, common

    def make_state(self, saved: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Make the optimizer's state from before its first step: tensors like those of ``saved``, to be written to.

        The values that aren't divided are those of ``saved``.
        """
        state = self.base.state
        if self.stage == 0:
            for parameter, values in saved.items():
                state[parameter] = {
                    key: _made(value, parameter, self.shape(parameter)) for key, value in values.items()
                }
            return
        for index, flat in enumerate(self.flats):
            first = next((p for p in self._members(index) if saved.get(p)), None)
            if first is None:
                state.pop(flat, None)
                continue
            state[flat] = {key: _made(value, flat, self.shape(first)) for key, value in saved[first].items()}
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            if all(state.get(flat) for flat in self.flats):
                self.optimizer._lazy_init_hp_params_optimizer_state()

    def _members(self, index: int) -> Sequence[nn.Parameter]:
        return self._engine_groups()[index]


def _made(value: Any, like: torch.Tensor, shape: torch.Size) -> Any:
    """Return zeros beside ``like`` for a value with the ``shape`` of a parameter, else the value itself."""
    if hasattr(value, "shape") and len(value.shape) and tuple(value.shape) == tuple(shape):
        return torch.zeros_like(like, dtype=value.dtype)
    if hasattr(value, "read"):
        value = value.read()
    return value.clone() if isinstance(value, torch.Tensor) else value
