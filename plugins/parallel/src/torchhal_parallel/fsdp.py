"""ZeRO stages 2 and 3: gradients, optimizer state and parameters sharded by torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchhal.composition import Composition
from torchhal.distributed import collectives
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.step_memory import MemoryByPhase, StepMemory, setup_memory
from torchhal.strategies import around_call, check_lookups
from torchhal.trainer.adapters import implements
from torchhal_parallel._fsdp_base import FullyShardedStrategy
from torchhal_parallel._fsdp_units import check_torch
from torchhal_parallel._materialize import materialize, tensors_on_meta
from torchhal_parallel._shard_sizes import divided
from torchhal_parallel._unit_memory import UnitTimeline, sharded_phases


class FSDPStrategy(FullyShardedStrategy):
    """``torch.distributed.fsdp.fully_shard`` (FSDP2) over one process per device.

    Between steps each rank holds 1/N of every parameter, gradient and optimizer state. A unit's parameters are
    gathered before it computes and, with ``reshard_after_forward``, freed right after (ZeRO stage 3); without, they
    stay until its backward is done (stage 2, which sends less and needs more memory). States, checkpoints and the
    clipping of gradients are those of all sharded strategies, in ``_sharded_base``.

    Every rank must use the same parameters in every step: a branch that some ranks don't take hangs or aborts. The same
    holds for ``self(...)`` in a hook or a callback: every rank calls it, or none. Each backward of an accumulation adds
    to sharded gradients, so that no rank ever holds whole ones.

    What ``configure_model`` builds is whole on rank 0 alone, and there in host memory. Of what it builds on the meta
    device, each unit gets values by ``reset_parameters()``, ``_init_weights(module)`` or ``init_weights()``.

    Args:
        reshard_after_forward: free a unit's parameters right after its forward, and gather them again for its
            backward; without, they stay until its backward is done.
        wrap_policy: which submodules are units. ``"blocks"``: the elements of every ``nn.ModuleList``, and of every
            ``nn.Sequential`` outside of them that has several with parameters. An int: the smallest submodules with at
            least so many parameters. Classes: their instances. A callable: those for which ``policy(name, submodule)``
            is true. ``"none"``: no unit but the whole.
        activation_checkpointing: recompute the activations of these submodules in backward instead of keeping them;
            the same forms as ``wrap_policy``, or None.
        mixed_precision: a ``MixedPrecisionPolicy`` for the units, beside the Trainer's precision, whose autocast needs
            none. Buffers stay as they are, so batch norms need a precision of the Trainer instead.
        cpu_offload: keep parameters, gradients and optimizer state in host memory between uses.
        parts: see :class:`torchhal.strategies.ParallelStrategy`.
    """

    _unset: Collection[str] = ()
    """Names of the tensors that lie on the meta device on rank 0, too."""

    def check_fit(self, composition: Composition) -> None:
        check_torch(self.alias or "fsdp")

    # -- model -----------------------------------------------------------------------------------------------

    def mesh(self) -> Any:
        """Return the device mesh that parameters are sharded over: all ranks, on the devices of this run.

        By itself ``fully_shard`` takes torch's current accelerator, also where the run is on the CPU beside it.
        """
        return init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shard",))

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """Let ``configure_model`` build the model on rank 0, and on the others what it looks like."""
        with super().init_context():
            if self.world_size == 1 or not self.is_set_up:
                yield
            elif self.is_global_zero:
                before = torch.get_rng_state()
                yield
                torch.set_rng_state(before)  # the others have drawn nothing
            else:
                with torch.device("meta"):
                    yield

    def is_on_meta(self) -> bool:
        assert self.module is not None
        names = tensors_on_meta(self.module)
        everybody = self.all_gather_object(names) if self.world_size > 1 else [names]
        self._unset = everybody[0]
        return any(everybody)

    def model_to_device(self) -> None:
        if not self.built_on_meta:
            super().model_to_device()  # else unit by unit, while they are sharded

    def sync_module(self, module: nn.Module) -> None:
        if not self.built_on_meta:
            super().sync_module(module)  # fully_shard takes each rank's own values, equal or not
        elif self.world_size > 1:
            with self.guard("comparison of the models"):
                self.check_same_module(module)

    def wrap_model(self, *, training: bool) -> None:
        assert self.module is not None
        if training:
            check_lookups(self.module, "what a forward writes to gathered weights is lost when they are freed")
        self.check_blocks(sharded=True)
        self.wrap_blocks()
        self.shard_units(self.mesh())

    def materialize(self, unit: nn.Module) -> None:
        if not self.built_on_meta:
            return
        assert self.module is not None
        tensors = materialize(self.module, unit, self._unset, self.root_device)
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                collectives.broadcast_tensors(tensors)

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        if name == "training_step":
            step = self.watch_step(step)
            return step if self._runner is None else self.with_buffers(step)
        return step if self._runner is None else self.then_sharded(step)

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        call = super().module_call(forward, training=training)
        if training:
            return around_call(call, lambda step: self.with_buffers(self.watch_step(step)))
        return around_call(call, self.then_sharded)

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = self.names_kept_whole(model.module)
        estimate = model.estimate(
            lambda entry: None if entry.name in whole else divided(entry.parameter.shape, world_size)
        )
        note = "all but the peak in host memory" if self.cpu_offload else ""
        return estimate.plus(self.gathered_memory(model, model.parameters, {}), note)

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        estimate = self.memory_per_rank(model, world_size)
        timeline = UnitTimeline(
            step,
            self.units_of(model, model.parameters, {}, world_size),
            keep=not self.reshard_after_forward,
            offloads=self.cpu_offload,
        )
        if not timeline.knows_units or world_size == 1:
            return super().memory_by_phase(step, model, world_size)
        # what configure_model builds comes unit by unit: never whole on a device
        setup = None if implements(model.module, "configure_model") else setup_memory(model)
        return sharded_phases(step, model, estimate, timeline, offloads=self.cpu_offload, setup=setup)
