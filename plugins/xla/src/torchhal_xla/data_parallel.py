"""Train a replica of the model in a process per device, with gradients averaged by XLA's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.strategies import ParallelStrategy, StepResult
from torchhal_xla._xla_base import LazyStrategy
from torchhal_xla.accelerator import XLAAccelerator
from torchhal_xla.environment import XLAEnvironment

START_METHODS = ("spawn", "forkserver")


class XLAStrategy(LazyStrategy, ParallelStrategy):
    """Data parallel in one process per chip.

    The gradients are averaged once per optimizer step, inside the step's own graph, as ``xm.optimizer_step`` does:
    after the last batch of an accumulation, before clipping. Every rank must run the same graph, or the ranks wait for
    ever: a parameter that gets a gradient on some ranks only has no place here.

    Args:
        start_method: ``"spawn"`` or ``"forkserver"``: the process that calls ``fit`` must not take a chip itself.
        options: as in :class:`LazyStrategy` and :class:`torchhal.strategies.ParallelStrategy`.
    """

    compares_replicas: ClassVar[bool] = True

    def __init__(self, *, start_method: str = "spawn", **options: Any) -> None:
        if start_method not in START_METHODS:
            raise ConfigurationError(
                f"'start_method' must be one of {', '.join(map(repr, START_METHODS))} (got {start_method!r})"
            )
        super().__init__(start_method=start_method, **options)
        self._averaged = False

    # -- processes -------------------------------------------------------------------------------------------

    def num_local_processes(self, num_devices: int) -> int:
        check_collectives(num_devices)
        return num_devices

    def configure(self, *, devices: Sequence[torch.device], num_nodes: int, **parts: Any) -> None:
        check_collectives(len(devices) * num_nodes)
        super().configure(devices=devices, num_nodes=num_nodes, **parts)

    def check_process(self) -> None:
        """Take this process's chip, and no other; check that torch_xla and the launcher count the ranks alike."""
        from torch_xla import runtime
        from torch_xla._internal import pjrt

        super().check_process()
        environment = self.environment
        rank, world_size = environment.global_rank(), environment.world_size()
        check_collectives(world_size)
        if world_size == 1:
            return
        if not environment.creates_processes_externally or not isinstance(environment, XLAEnvironment):
            pjrt.initialize_multiprocess(environment.local_rank(), environment.local_world_size())
        if (driven := runtime.addressable_device_count()) != 1:
            raise ConfigurationError(
                f"each process would drive {driven} devices (a chip of a TPU before v4 has two): use "
                "strategy='xla_spmd', which drives all of them from one process"
            )
        if (runtime.global_ordinal(), runtime.world_size()) != (rank, world_size):
            raise ConfigurationError(
                f"torch_xla counts this process as {runtime.global_ordinal()} of {runtime.world_size()}, its launcher "
                f"as {rank} of {world_size}: what one rank sends would reach another one"
            )

    # -- communication: what hosts tell each other through gloo, tensors of the devices within their graphs --------

    def group_backend(self) -> str:
        return self.process_group_backend or "gloo"

    def check_group(self, group: Any) -> None:
        """Do nothing: a group of the user's own carries what the hosts know, and the devices need none."""

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        _check_no_group(group)
        with self.guard(f"reduce(op={op!r})"):
            return collectives.reduce(value, op, device=self.root_device, all_reduce=_all_reduce)

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        import torch_xla.core.functions as xf

        _check_no_group(group)
        collectives.check_gatherable(tensor)
        with self.guard("all_gather"):
            collectives.agree("all_gather", (str(tensor.dtype), tuple(tensor.shape)))
            flat = tensor.to(self.root_device).reshape(1, -1)
            gathered: torch.Tensor = xf.all_gather(flat if sync_grads else flat.detach())
        return gathered.reshape(self.world_size, *tensor.shape)

    def module_state_dict(self) -> dict[str, Any]:
        assert self.module is not None
        state: dict[str, Any] = self.module.state_dict()
        if self.world_size > 1:
            names = sorted(name for name, _ in self.module.named_buffers(remove_duplicate=False) if name in state)
            state.update({name: state[name].detach().clone() for name in names})
            with self.guard("broadcast of the buffers"):
                broadcast([state[name] for name in names], self.is_global_zero)
        return state

    # -- the same weights, the same gradients ----------------------------------------------------------------

    def sync_module(self, module: nn.Module) -> None:
        if self.world_size > 1:
            self.check_same_module(module)
        with self.guard("broadcast of the initial weights"):
            broadcast([*module.parameters(), *module.buffers()], self.is_global_zero)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._averaged = False

    def sync_gradients(self) -> None:
        if not self._averaged:
            import torch_xla.core.xla_model as xm

            for optimizer in self.optimizers:
                xm.reduce_gradients(optimizer)
        self._averaged = self.gradients_synced = True

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.sync_gradients()
        super().unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if closure is None:
            self.sync_gradients()
            return super().optimizer_step(optimizer)
        evaluate = closure

        def average() -> Any:
            loss = evaluate()
            self.sync_gradients()
            return loss

        return super().optimizer_step(optimizer, average)


def check_collectives(processes: int) -> None:
    """Refuse several processes where torch_xla has no collectives between them."""
    if processes > 1 and XLAAccelerator.pjrt_device() == "CPU":
        raise UnsupportedCombinationError(
            f"strategy 'xla' can't join {processes} processes on accelerator 'xla' with PJRT_DEVICE=CPU: there a "
            "collective of torch_xla gives each process its own value back without an error, so every one of them "
            "would train by itself; use strategy='xla_spmd', or devices=1"
        )


def _check_no_group(group: Any) -> None:
    if group is not None:
        raise ConfigurationError(
            f"'group' must be None under strategy 'xla', whose collectives are those of all devices (got {group!r})"
        )


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any = None) -> None:
    """Run ``dist.all_reduce`` by torch_xla."""
    import torch_xla.core.xla_model as xm

    kinds = {
        dist.ReduceOp.SUM: xm.REDUCE_SUM,
        dist.ReduceOp.PRODUCT: xm.REDUCE_MUL,
        dist.ReduceOp.MIN: xm.REDUCE_MIN,
        dist.ReduceOp.MAX: xm.REDUCE_MAX,
    }
    xm.all_reduce(kinds[op], [tensor])


def broadcast(tensors: Sequence[torch.Tensor], is_source: bool) -> None:
    """Overwrite ``tensors``, on every rank the same list of shapes and dtypes, with those of the source.

    As a sum in which the others take part with zeros. They are chosen, not multiplied by zero as torch_xla's own
    broadcast does: what the others had may be NaN. All ranks build the same graph: who is the source is data in it.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    if not tensors:
        return
    with torch.no_grad():
        mine = torch.tensor(is_source).to(tensors[0].device)
        sums = [torch.where(mine, tensor, torch.zeros_like(tensor)) for tensor in tensors]
        sums = [each.to(torch.uint8) if each.dtype is torch.bool else each for each in sums]
        xm.all_reduce(xm.REDUCE_SUM, sums)
        for tensor, each in zip(tensors, sums, strict=True):
            tensor.copy_(each)
    torch_xla.sync()
