"""Drive all devices of a host from one process: XLA divides each operator among them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from torchhal.composition import Composition
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.pytree import map_tensors
from torchhal.strategies import SingleDeviceStrategy
from torchhal_xla._xla_base import LazyStrategy

_AXIS = "fsdp"  # the name that torch_xla's own wrapper looks for, should a user wrap parts in it


class SPMDStrategy(LazyStrategy, SingleDeviceStrategy):
    """Data parallel within one process, by torch_xla's SPMD.

    The program is that of one device. Tensors of a batch are divided among the devices along their first dimension, and
    XLA divides what is computed from them: the result is that of one device on the whole batch, batch norms included.
    The loader's batch is the batch of all devices; one that doesn't divide evenly is right, too, but whole on each.

    SPMD can't be switched off again in a process, nor on after a tensor was on a device without it.

    Args:
        fsdp: divide parameters, gradients and the optimizer's state, too, along each parameter's largest dimension that
            divides evenly, and what layers put out along the batch, as torch_xla's ``SpmdFullyShardedDataParallel``
            (FSDPv2) does for the modules that are wrapped in it. Here no module is wrapped, so names stay the user's.
        options: as in :class:`LazyStrategy`.
    """

    multi_device: ClassVar[bool] = True

    def __init__(self, *, fsdp: bool = False, **options: Any) -> None:
        if not isinstance(fsdp, bool):
            raise ConfigurationError(f"'fsdp' must be a bool (got {fsdp!r})")
        super().__init__(**options)
        self.fsdp = fsdp
        self.mesh: Any = None
        """torch_xla's mesh over all devices, with one axis."""
        self._hooks: list[Any] = []

    def check_fit(self, composition: Composition) -> None:
        environment, num_nodes = composition.cluster_environment, composition.num_nodes
        started = environment.world_size() if environment is not None and num_nodes == 1 else num_nodes
        if started is not None and started > 1:
            raise UnsupportedCombinationError(
                f"strategy {self.display_name!r} drives the devices of one host from one process, but "
                f"{started} processes are asked for: use one, or strategy='xla' with a process per chip"
            )

    def check_process(self) -> None:
        import torch_xla
        from torch_xla import runtime

        if not runtime.is_spmd() and torch_xla._XLAC._xla_get_spmd_config_is_locked():
            # torch_xla offers to switch over, and crashes on what is left of the tensors from before
            raise ConfigurationError(
                f"strategy {self.alias!r} can't run in a process that has used an XLA device without SPMD: start a "
                "process of its own, or call torch_xla.runtime.use_spmd() before the first tensor"
            )

    def setup_environment(self) -> None:
        if self._environment_ready:
            return
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        self.check_process()
        runtime.use_spmd()
        if (processes := runtime.process_count()) > 1:
            raise UnsupportedCombinationError(
                f"strategy {self.display_name!r} drives the devices of one host, but this runtime "
                f"spans {processes} processes: use strategy='xla'"
            )
        count = runtime.global_runtime_device_count()
        if count != len(self.devices):
            raise ConfigurationError(
                f"'devices' must be all {count} of this process's runtime under SPMD (got {len(self.devices)}): limit "
                "them by CPU_NUM_DEVICES or TPU_VISIBLE_CHIPS before the process starts, or say devices='auto'"
            )
        super().setup_environment()
        self.mesh = spmd.Mesh(list(range(count)), (count,), (_AXIS,))

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, on the device, divided along its first dimension; whole on each if that isn't even.

        XLA would divide it unevenly, and then ends the process at some operators, such as an embedding's backward.
        What has been divided otherwise stays as it is: a layer may put out its own parameter.
        """
        import torch_xla
        from torch_xla.distributed import spmd

        divides = tensor.device.type == "xla" and tensor.dim() > 0 and self._divides(tensor.shape[0])
        if divides and not torch_xla._XLAC._get_xla_sharding_spec(tensor):
            spmd.mark_sharding(tensor, self.mesh, (_AXIS, *[None] * (tensor.dim() - 1)))
        return tensor

    def _divides(self, size: int) -> bool:
        return size > 0 and size % len(self.devices) == 0

    def batch_to_device(self, batch: Any) -> Any:
        return self._shard_all(super().batch_to_device(batch))

    def _shard_all(self, nest: Any) -> Any:
        return map_tensors(nest, lambda leaf: self.shard(leaf) if isinstance(leaf, torch.Tensor) else leaf)

    def wrap_model(self, *, training: bool) -> None:
        if not self.fsdp:
            return
        from torch_xla.distributed import spmd

        assert self.module is not None
        for parameter in self.module.parameters():
            spmd.mark_sharding(parameter, self.mesh, self._divided(parameter))
        # or XLA might as well leave a layer's weights where they are and send the activations round
        for layer in self.module.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                self._hooks.append(layer.register_forward_hook(lambda *call: self._shard_all(call[-1])))

    def _divided(self, parameter: torch.Tensor) -> tuple[str | None, ...]:
        """Return ``parameter`` along the first largest dimension that divides evenly; whole without one."""
        even = [index for index, size in enumerate(parameter.shape) if self._divides(size)]
        largest = max(even, key=lambda index: parameter.shape[index], default=None)
        return tuple(_AXIS if index == largest else None for index in range(parameter.dim()))

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        each = "divided among all devices of the process" if self.fsdp else "on each device of the process"
        return super().memory_per_rank(model, world_size).plus(0, each)

    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().teardown()
        self.mesh = None
