"""The base of strategies that shard parameters by torch's ``fully_shard`` (FSDP2), unit by unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchhal.capabilities import collective
from torchhal.distributed import collectives
from torchhal.errors import TorchhalError
from torchhal.memory_estimate import ModelMemory, ParameterMemory
from torchhal.step_memory import StepMemory, TrainingStep
from torchhal.strategies import StepResult
from torchhal.strategies.sharded_optimizers import find_differing_settings
from torchhal_parallel._device_mesh import groups_of, release_groups
from torchhal_parallel._fsdp_units import (
    called_submodules,
    check_scaled,
    check_shardable,
    is_called_in_parts,
    kept_whole,
)
from torchhal_parallel._inner_backward import InnerBackward
from torchhal_parallel._lost_writes import LostWrites
from torchhal_parallel._module_restore import recompute
from torchhal_parallel._optimizer_checks import one_by_one
from torchhal_parallel._shard_sizes import gathered_bytes
from torchhal_parallel._sharded_base import ShardedStrategy
from torchhal_parallel._sharding_errors import explain_unit
from torchhal_parallel._step_runner import StepRunner
from torchhal_parallel._uneven_inputs import uneven_forward
from torchhal_parallel._unit_memory import Unit, find_units
from torchhal_parallel._wrap_policy import check_form, check_policy, find_blocks


def run_after_closure(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """Return ``closure`` with ``then`` after each evaluation: an optimizer may evaluate it several times."""

    def run() -> Any:
        result = closure()
        then()
        return result

    return run


class FullyShardedStrategy(ShardedStrategy):
    """Units of the model whose parameters are gathered before they compute and divided among ranks otherwise.

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

    needs: frozenset[str] = collective("all_gather", "reduce_scatter")

    _watched_hooks: Any = None
    """The Trainer's, while what they write is noted."""

    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        wrap_policy: Any = "blocks",
        activation_checkpointing: Any = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        **parts: Any,
    ) -> None:
        for name, value in (
            ("reshard_after_forward", reshard_after_forward),
            ("cpu_offload", cpu_offload),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name!r} must be a bool (got {value!r})")
        if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
            raise TypeError(f"'mixed_precision' must be a MixedPrecisionPolicy or None (got {mixed_precision!r})")
        check_form(wrap_policy, "wrap_policy")
        if activation_checkpointing is not None:
            check_form(activation_checkpointing, "activation_checkpointing")
        super().__init__(**parts)
        self.reshard_after_forward = reshard_after_forward
        self.wrap_policy = wrap_policy
        self.activation_checkpointing = activation_checkpointing
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self._forget()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._lost_writes is not None and trainer.state.fn == "fit":
            self._watched_hooks = trainer.hooks
            trainer.hooks.wrap(self._lost_writes.around_hook)

    def release_model(self) -> None:
        super().release_model()
        if self._watched_hooks is not None:
            self._watched_hooks.wrap(None)
            self._watched_hooks = None

    def _forget(self) -> None:
        self._mesh: Any = None
        self._units: list[Any] = []
        self._ignored: list[nn.Parameter] = []
        self._inner_backward: InnerBackward | None = None
        self._lost_writes: LostWrites | None = None
        self._carried: dict[int, Any] = {}
        self._trainable: list[nn.Parameter] = []
        self._was_trained: list[bool] = []
        self._averaged = True

    # -- model -----------------------------------------------------------------------------------------------

    def check_blocks(self, *, sharded: bool) -> None:
        """Refuse policies and layers that can't be, while the model is whole; ``sharded``: there is a shard axis."""
        assert self.module is not None
        if self.activation_checkpointing is not None:
            check_policy(self.module, self.activation_checkpointing, "activation_checkpointing")
        if sharded:
            check_shardable(self.module, self.alias or "fsdp")
            warning = check_policy(self.module, self.wrap_policy, "wrap_policy")
            if warning is not None and self.is_global_zero:
                warnings.warn(warning, stacklevel=2)

    def wrap_blocks(self) -> None:
        """Set up the recomputation of activations, with or without a shard axis, before units are sharded."""
        assert self.module is not None
        if self.activation_checkpointing is not None:
            recompute(self.module, self.activation_checkpointing)

    def shard_units(self, mesh: Any, roots: Sequence[nn.Module] | None = None) -> None:
        """Shard over ``mesh`` each unit that is inside ``roots``, then what is left in each of them.

        None: the whole model is one root, and :attr:`model` is what runs the steps inside its hooks. The parts of one
        that optimizes by hand are roots of their own: its backward passes run inside the step, which no hook could be
        around. So are the models of a :class:`torchhal.Run`, each of which its loop calls by itself.
        """
        assert self.module is not None and self._objects is not None
        alias = self.alias or "fsdp"
        if roots is None and not is_called_in_parts(self.module):
            self.model = self._runner = StepRunner(self.module)
            roots = [self._runner]
        elif roots is None:
            roots = called_submodules(self.module)
        self._mesh = mesh
        units = self._units = self._units_in(self.module, roots)
        whole = kept_whole(self.module, units, roots)
        check_scaled(whole, self.precision, alias)
        for unit in units:
            self.materialize(unit)
            # in one order on every rank: their gradients travel as one message
            self._ignored = [p for name, p in self.module.named_parameters() if name in whole and not p.is_meta]
            self.configure_sharding(unit)
            self._objects.empty_replaced()
        self.materialize(self.module)  # what is in no unit
        self._inner_backward = InnerBackward(
            units,
            lambda: self._runner is not None and self._runner.running,
            reshard_after_forward=self.reshard_after_forward,
        )
        self._trainable = list(self.module.parameters())
        self._was_trained = [parameter.requires_grad for parameter in self._trainable]
        self._lost_writes = LostWrites(self.module, units, alias, mesh.get_group("shard").size())

    def _units_in(self, module: nn.Module, roots: Sequence[nn.Module]) -> list[nn.Module]:
        """Inner ones before those that hold them, the roots last."""
        inside = {id(submodule) for root in roots for submodule in root.modules()} - set(map(id, roots))
        return [*(unit for _, unit in find_blocks(module, self.wrap_policy) if id(unit) in inside), *roots]

    def materialize(self, unit: nn.Module) -> None:
        """Give parameters of ``unit`` that lie on the meta device memory and values. Nothing by default."""

    def configure_sharding(self, unit: nn.Module) -> None:
        """Shard one unit; the last one is what is left of the whole model. Override to use other options."""
        options: dict[str, Any] = {"mesh": self._mesh, "reshard_after_forward": self.reshard_after_forward}
        if self.mixed_precision is not None:
            options["mp_policy"] = self.mixed_precision
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu")
        if self._ignored:
            options["ignored_params"] = set(self._ignored)
        sharded = fully_shard(unit, **options)
        if "collective:avg" not in self.accelerator.capabilities:
            sharded.set_force_sum_reduction_for_comms(True)

    def carry_hooks(self, hooks: Mapping[int, Any], parameter: nn.Parameter) -> None:
        """Let ``hooks`` run on the gradients of what a unit gathers in its forward, always into the same tensors."""
        self._carried[id(hooks)] = hooks
        found = (
            (unit, holder, attribute)
            for unit in self._units
            for holder in unit.modules()
            for attribute, held in holder._parameters.items()
            if held is parameter
        )
        unit, holder, attribute = next(found, (None, None, ""))
        if unit is None or holder is None:
            super().carry_hooks(hooks, parameter)
            return

        def at_forward(unit: nn.Module, args: Any) -> None:
            if (leaf := holder._parameters.get(attribute)) is not None and leaf is not parameter:
                self._carried_hooks.carry(hooks, leaf)
                handle.remove()

        handle = unit.register_forward_pre_hook(at_forward)
        self._carried_hooks.add(handle)

    # -- steps -----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        self.check_writes()
        self._reshard()  # what a hook has called may still be gathered, in parameters that are not sharded
        super().on_train_epoch_start()
        assert self.module is not None
        for parameter in self.module.parameters():  # hooks that were registered since
            hooks = parameter._backward_hooks
            if self._units and hooks and isinstance(parameter, DTensor) and id(hooks) not in self._carried:
                self.carry_hooks(hooks, parameter)

    def check_replicas(self) -> None:
        self._reshard()
        self.check_writes(restoring=True)
        super().check_replicas()

    def check_writes(self, *, restoring: bool = False) -> None:
        """Raise where the steps have written what is lost, or where numbers differ between ranks.

        These are what was written to parameters, and the settings of optimizers. Called when an epoch begins, before a
        checkpoint is gathered, and, then ``restoring`` the module, when the fit ends.
        """
        if not self.is_set_up:
            return
        if self._lost_writes is not None:
            self._lost_writes.check_gathered()
        if self.world_size == 1:
            return
        self._reshard()  # a unit that is gathered has others in the places of its parameters
        if (error := self.find_new_parameter() or self._find_parted()) is not None:
            if restoring:
                self.restore_module()
            raise error

    def _find_parted(self) -> TorchhalError | None:
        with self.guard("comparison of what was written to parameters"):
            if self._lost_writes is not None:
                numbers = collectives.all_gather_object(self._lost_writes.checksum(), self._mesh.get_group("shard"))
                if any(each != numbers[0] for each in numbers):
                    return self._lost_writes.parted()
            return find_differing_settings(self.optimizers, self.alias or "fsdp")

    def module_state_dict(self) -> dict[str, Any]:
        self.check_writes()
        return super().module_state_dict()

    def watch_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step that refuses what would be lost, or be each rank's own, where parameters are sharded.

        These are writes to gathered parameters, and parameters that some ranks alone have frozen: the sizes of what the
        ranks send would differ. It ends with a reshard where it gives no loss, so that no backward follows: what a
        hook does to a parameter until the next step, such as freezing it, would be done to a gathered copy.
        """
        if self._lost_writes is None:
            return step
        step = self._lost_writes.watched(step)
        stays_gathered = not self.reshard_after_forward

        def run(*args: Any) -> Any:
            trained = [parameter.requires_grad for parameter in self._trainable]
            if trained != self._was_trained:
                self._compare_trained(trained)
            result = step(*args)
            if stays_gathered and result is None:
                self._reshard()
            return result

        return run

    def _compare_trained(self, trained: list[bool]) -> None:
        before, self._was_trained = self._was_trained, trained
        if self.world_size > 1:
            found = zip(self._trainable, before, trained, strict=True)
            self.check_same_trained([parameter for parameter, was, now in found if was != now])

    def buffer_source(self) -> tuple[int, Any]:
        """Return (the rank whose buffers count, the group of ranks that follow it; None for all)."""
        return 0, None

    def with_buffers(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Give every rank the buffers of one before each training step, as DistributedDataParallel does.

        A batch norm's statistics would else be those of a rank's own data. What the last step before a validation
        has added to them still is.
        """
        assert self.module is not None
        places = [(owner, name) for owner in self.module.modules() for name in owner._buffers]
        if not places or self.world_size == 1:
            return step
        source, group = self.buffer_source()

        def run(*args: Any) -> Any:
            found = [owner._buffers.get(name) for owner, name in places]  # a forward may have assigned another tensor
            buffers = [buffer for buffer in found if buffer is not None and not buffer.is_meta]
            with self.guard("broadcast of the buffers"):
                collectives.broadcast_tensors(buffers, src=source, group=group)
            return step(*args)

        return run

    def then_sharded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` with a reshard behind it: a forward alone leaves parameters of some units whole."""

        def run(*args: Any) -> Any:
            try:
                return step(*args)
            finally:
                self._reshard()

        return run

    def _reshard(self) -> None:
        if self._inner_backward is not None:
            self._inner_backward.release()
        for unit in self._units:
            unit.reshard()

    @property
    def evaluation_communicates(self) -> bool:  # type: ignore[override]
        """True if parameters are sharded: a forward gathers them."""
        return bool(self._units)

    @contextmanager
    def evaluation_step_of(self, ranks: Collection[int]) -> Iterator[None]:
        self._reshard()
        with uneven_forward(
            ranks,
            self._mesh.get_group("shard"),
            self._units,
            self.root_device,
            keep=not self.reshard_after_forward,
            guard=self.guard("the evaluation of other ranks' batches"),
        ):
            yield
        self._reshard()

    def explain(self, error: BaseException) -> BaseException:
        """Return a ModelError for a part of a unit that was used while it was sharded, else ``error``."""
        if self._units:
            found = explain_unit(error, alias=self.alias or "fsdp", model=type(self.module).__name__)
            if found is not None:
                return found
        return super().explain(error)

    # -- optimizers and gradients ----------------------------------------------------------------------------

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        if any(parameter.dim() for parameter in self._ignored):
            one_by_one(optimizers, f"strategy {self.alias or 'fsdp'!r}")
        super().setup_optimizers(optimizers, lr_scheduler_configs)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._inner_backward is not None and not kwargs.get("create_graph"):
            self._inner_backward.release()
        self._averaged = False

    def sync_gradients(self) -> None:
        self._averaged = True
        super().sync_gradients()

    def replicated_parameters(self) -> list[nn.Parameter]:
        return self._ignored

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._average_once()
        super().unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if not self.reshard_after_forward or (self._inner_backward is not None and self._inner_backward.held):
            self._reshard()  # a forward without a backward may have come since
        if closure is not None:
            return super().optimizer_step(optimizer, run_after_closure(closure, self._average_once))
        self._average_once()
        return super().optimizer_step(optimizer)

    def _average_once(self) -> None:
        if not self._averaged:
            self.sync_gradients()

    # -- memory ----------------------------------------------------------------------------------------------

    def names_kept_whole(self, module: nn.Module) -> Collection[str]:
        """Return names of the parameters that no rank has a part of, but all of them whole."""
        roots = called_submodules(module) if is_called_in_parts(module) else [module]
        return kept_whole(module, self._units_in(module, roots), roots)

    def gathered_memory(
        self, model: ModelMemory, held: Iterable[ParameterMemory], shapes: Mapping[int, Sequence[int]]
    ) -> int:
        """Return the bytes that the units need beside their shards: gathered parameters, and gradients of one unit."""
        whole = self.names_kept_whole(model.module)
        return gathered_bytes(
            model,
            [entry for entry in held if entry.name not in whole],
            shapes,
            self.wrap_policy,
            keep=not self.reshard_after_forward,
            dtype=None if self.mixed_precision is None else self.mixed_precision.param_dtype,
        )

    def units_of(
        self, model: ModelMemory, held: Iterable[ParameterMemory], shapes: Mapping[int, Sequence[int]], size: int
    ) -> dict[str, Unit]:
        """Return the units by their names, over ``size`` ranks: what :meth:`gathered_memory` adds up, one by one."""
        whole = self.names_kept_whole(model.module)
        policy = self.mixed_precision
        return find_units(
            model,
            [entry for entry in held if entry.name not in whole],
            shapes,
            self.wrap_policy,
            size,
            param_dtype=None if policy is None else policy.param_dtype,
            reduce_dtype=None if policy is None else policy.reduce_dtype,
        )

    def step_memory(self, step: TrainingStep, world_size: int) -> StepMemory:
        module = step.module
        shapes = {name: parameter.dim() for name, parameter in module.named_parameters()}
        # where some stay whole, the optimizer takes all of them one by one
        foreach = False if world_size > 1 and any(shapes[name] for name in self.names_kept_whole(module)) else None
        return step.measure(prepare=self.prepare_step(), foreach=foreach)

    def prepare_step(self) -> Callable[[nn.Module], None] | None:
        """Return what makes a copy of the model recompute activations as this strategy lets it; None if it doesn't."""
        policy = self.activation_checkpointing
        return None if policy is None else partial(recompute, policy=policy)

    def teardown(self) -> None:
        groups = groups_of(self._mesh)
        try:
            super().teardown()
        finally:
            release_groups(self._mesh, groups)
            self._forget()
