"""Data, sharded data, pipeline and tensor parallelism, one axis each of one device mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchhal.composition import Composition
from torchhal.errors import (
    ConfigurationError,
    message_of,
)
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.step_memory import MemoryByPhase, StepMemory, TrainingStep, setup_memory
from torchhal.strategies import StepResult, Strategy, around_call, check_frequencies
from torchhal.strategies.sharded_optimizers import OptimizerTrials, with_parameters
from torchhal_parallel._device_mesh import (
    ParallelDims,
    build_mesh,
    check_size,
    coordinates,
    groups_of,
    make_batch_group,
    release_groups,
)
from torchhal_parallel._divided_regions import DividedRegions
from torchhal_parallel._double_backward import refuse_double_backward
from torchhal_parallel._dtensor_layout import gather_to_cpu
from torchhal_parallel._fsdp_base import FullyShardedStrategy
from torchhal_parallel._fsdp_units import check_torch
from torchhal_parallel._gradient_averaging import average_gradients
from torchhal_parallel._mesh_memory import (
    exchange_parts,
    rank_phases,
    stage_step,
    under_way_at_once,
    with_region_checks,
)
from torchhal_parallel._microbatches import check_loader
from torchhal_parallel._optimizer_checks import one_by_one
from torchhal_parallel._pipeline_compatibility import (
    check_automatic_optimization,
    check_precision,
    connected_model_error,
    parameter_hook_error,
    synchronized_batchnorm_error,
)
from torchhal_parallel._pipeline_errors import explain_in_pipeline, refuse_call
from torchhal_parallel._pipeline_schedule import check_schedule, check_schedule_name, check_schedules_of_torch
from torchhal_parallel._pipeline_split import (
    check_points_form,
    check_trained,
    even_cuts,
    kept_tensors,
    shared_or_unused_parameters,
)
from torchhal_parallel._remote_tensor import replace_with_remote
from torchhal_parallel._shard_sizes import RankMemory, rank_memories, tensor_shapes
from torchhal_parallel._sharded_state import broadcast_buffers, sort_by_name, with_versions
from torchhal_parallel._sharding_errors import explain_tensor_parallel
from torchhal_parallel._shared_randomness import SharedRandomness
from torchhal_parallel._stage_gradients import StageGradients, loss_of
from torchhal_parallel._stage_state import StageState, own_optimizer_state
from torchhal_parallel._tensor_parallel import apply_plan, check_plan_form, plan_of, resolve_plan
from torchhal_parallel._tensor_parallel_check import PartialOutputCheck
from torchhal_parallel._unit_memory import UnitTimeline
from torchhal_parallel.pipeline import Pipeline

_OF_SHARDS = (("cpu_offload", False), ("mixed_precision", None), ("reshard_after_forward", True))


class HybridStrategy(FullyShardedStrategy):
    """``data x shard x pipeline x tensor`` processes, on one ``DeviceMesh``.

    Args:
        data: replicas of the model, each with its own share of the data.
        shard: ranks that shard a replica's parameters by ``fully_shard``, each with its own share of the data.
        pipeline: stages of the model; the ranks of a pipeline share a batch.
        tensor: ranks that share each layer of the plan; they share a batch too.
        plan: ``{name of a layer: style}``; ``*`` is one part of a name, a style is ``"colwise"``, ``"rowwise"``, both
            with ``_rep``, ``"sequence_parallel"`` or a ``ParallelStyle``; None: ``module.tensor_parallel_plan``.
        split_points: names of the modules at which a new stage begins; None: between the elements of the outermost list
            of layers that is long enough, so that the stages have about equally many parameters.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        microbatches: parts into which a pipeline divides each batch; None: as many as it has stages.
        stages_per_rank: for ``"interleaved_1f1b"`` without ``split_points``.
        options: those of ``FSDPStrategy``; all of them but ``activation_checkpointing`` concern the shard axis alone.

    One of the axes may be None: it takes what the others leave of the world.
    """

    def __init__(
        self,
        *,
        data: int | None = 1,
        shard: int | None = 1,
        pipeline: int | None = 1,
        tensor: int | None = 1,
        plan: Mapping[str, Any] | None = None,
        split_points: Sequence[str] | None = None,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        stages_per_rank: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._dims = ParallelDims({"pipeline": pipeline, "data": data, "shard": shard, "tensor": tensor})
        self.axes: dict[str, int | None] = self._dims.chosen
        check_size("microbatches", microbatches)
        check_size("stages_per_rank", stages_per_rank)
        check_points_form(split_points)
        check_schedule_name(schedule)
        if plan is not None:
            check_plan_form(plan)
        self.plan = plan
        self.split_points = None if split_points is None else list(split_points)
        self.schedule = schedule
        self.given_microbatches = microbatches
        self.stages_per_rank = stages_per_rank if schedule == "interleaved_1f1b" else 1
        if shard == 1 and (idle := [name for name, default in _OF_SHARDS if getattr(self, name) != default]):
            raise ConfigurationError(f"{idle[0]!r} concerns the parameters that the axis 'shard' divides, and shard=1")

    _ended_stages: StageState | None = None
    """The stages of the latest run: its module is whole again, and its optimizers have the state of their stage."""

    def _forget(self) -> None:
        super()._forget()
        self.mesh: Any = None
        self.sizes: dict[str, int] = {}
        self.pipe: Pipeline | None = None
        self._partial_output_check: PartialOutputCheck | None = None
        self._stage_gradients: StageGradients | None = None
        self._stage_state: StageState | None = None
        self._names: dict[str, torch.Size | None] = {}
        self._untrainable: dict[str, str] = {}
        self._trials = OptimizerTrials()
        self._batch_group: Any = None
        self._randomness: SharedRandomness | None = None

    # -- what can work ---------------------------------------------------------------------------------------

    def check_fit(self, composition: Composition) -> None:
        sizes = self.sizes_for(composition.world_size)
        if sizes["shard"] > 1:
            check_torch(self.alias or "hybrid")
        if sizes["pipeline"] > 1:
            check_schedules_of_torch(self.schedule, self.alias or "hybrid")
        check_precision(composition.precision, sizes, self.alias or "hybrid")

    def check_sync_batchnorm(self, world_size: int) -> None:
        if self.sizes_for(world_size)["pipeline"] > 1:
            raise synchronized_batchnorm_error(self.alias or "hybrid")

    def batch_group(self) -> Any:
        return self._batch_group

    # -- the mesh --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        # now: they are looked up by their names, which fails when the first of them is destroyed
        mesh, groups = self.mesh, [*groups_of(self.mesh), self._batch_group]
        try:
            super().teardown()
        finally:
            release_groups(mesh, groups)

    def setup_communication(self) -> Any:
        store = super().setup_communication()
        self.sizes = self.sizes_for(self.world_size)
        self.mesh = build_mesh(self.root_device.type, self.sizes, self.timeout)
        self._batch_group = make_batch_group(self.mesh, self.sizes, self.timeout)
        return store

    def sizes_for(self, world_size: int) -> dict[str, int]:
        """Return the size of each axis in a world of ``world_size``.

        Raises:
            ConfigurationError: they don't multiply to it; the message lists them. Or the schedule can't have
                so many stages over so many ranks.
        """
        sizes = self._dims.resolve(world_size)
        if (ranks := sizes["pipeline"]) > 1:
            stages = self._number_of_stages(ranks)
            check_schedule(self.schedule, stages, ranks, self.given_microbatches or stages)
        return sizes

    def _number_of_stages(self, size: int) -> int:
        return size * self.stages_per_rank if self.split_points is None else len(self.split_points) + 1

    def rank_in(self, axis: str) -> int:
        """Return this process's coordinate on an axis."""
        return coordinates(self.global_rank, self.sizes)[axis] if self.mesh is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        try:
            sizes = self.sizes or self._dims.resolve(self.world_size)
        except ConfigurationError:  # this process isn't one of the ranks yet
            return None
        place = coordinates(self.global_rank, sizes)
        return {"num_replicas": sizes["data"] * sizes["shard"], "rank": place["data"] * sizes["shard"] + place["shard"]}

    @property
    def is_data_leader(self) -> bool:
        last = self.pipe.last_rank if self.pipe is not None else 0
        return self.rank_in("tensor") == 0 and self.rank_in("pipeline") == last

    # -- model -----------------------------------------------------------------------------------------------

    def wrap_model(self, *, training: bool) -> None:
        assert self.module is not None
        self._names = {name: getattr(value, "shape", None) for name, value in self.module.state_dict().items()}
        self._ended_stages = None
        plan = {}
        if self.sizes["tensor"] > 1:
            plan = resolve_plan(self.module, plan_of(self.module, self.plan), self.sizes["tensor"])
        self.check_blocks(sharded=self.sizes["shard"] > 1)
        if self.world_size > 1 and (share := self.distributed_sampler_kwargs) is not None:
            first = self.rank_in("pipeline") == self.rank_in("tensor") == 0
            self._randomness = SharedRandomness(self, share["rank"], is_first=first)
            if training:
                self._randomness.seed_generators()
        if self.sizes["pipeline"] > 1:
            if training:
                check_frequencies(self.module, "each microbatch")
            self._split_into_stages()
        if plan:
            assert self._objects is not None
            apply_plan(self.module, plan, self.mesh["tensor"], self._objects.empty_replaced)
            if training:
                refuse_double_backward(self.module, plan, self.alias or "hybrid")
            rank, size = self.rank_in("tensor"), self.sizes["tensor"]
            regions = DividedRegions(self.module, plan, rank, size, strategy=self)
            self._partial_output_check = PartialOutputCheck(self.module, plan, size, regions)
            if self.pipe is not None:
                self.pipe.watch(self._partial_output_check)
        self.wrap_blocks()
        if self.sizes["shard"] > 1:
            mesh = self.mesh["data", "shard"] if self.sizes["data"] > 1 else self.mesh["shard"]
            self.shard_units(mesh, None if self.pipe is None else list(self.pipe.roots.values()))
            if self.pipe is not None:
                self.pipe.relink()

    def _split_into_stages(self) -> None:
        assert self.module is not None
        check_automatic_optimization(self.module)
        size = self.sizes["pipeline"]
        stages = self._number_of_stages(size)
        points = even_cuts(self.module, stages) if self.split_points is None else self.split_points
        self.pipe = pipe = Pipeline(
            self.module,
            points,
            group=self.mesh.get_group("pipeline"),
            strategy=self,
            trainer=self.trainer,
            schedule=self.schedule,
            microbatches=self.given_microbatches or stages,
        )
        self._untrainable = shared_or_unused_parameters(self.module, pipe.stages)
        kept = kept_tensors(self.module, pipe.stages, pipe.mine)
        check_trained(self.module, self._untrainable)
        replace_with_remote(self.module, kept, torch.device("cpu") if self.cpu_offload else self.root_device)
        self._stage_state = StageState(self.root_device, self.guard, sends=self.keeps_gathered, shapes=self._names)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.pipe is not None and self.module is not None:
            check_trained(self.module, self._untrainable)

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        ranks = self._rank_memories(model, self.sizes_for(world_size))
        return max((rank.estimate for rank in ranks), key=lambda estimate: estimate.peak)

    def _rank_memories(self, model: ModelMemory, sizes: Mapping[str, int]) -> list[RankMemory]:
        points = None
        if sizes["pipeline"] > 1:
            points = self.split_points or even_cuts(model.module, self._number_of_stages(sizes["pipeline"]))
        return rank_memories(
            model,
            sizes,
            plan=self._plan_for(model.module, sizes["tensor"]),
            points=points,
            kept_whole=self.names_kept_whole(model.module) if sizes["shard"] > 1 else (),
            gathered=partial(self.gathered_memory, model),
        )

    def _plan_for(self, module: nn.Module, size: int) -> dict[str, Any]:
        return dict(resolve_plan(module, plan_of(module, self.plan), size)) if size > 1 else {}

    def step_memory(self, step: TrainingStep, world_size: int) -> StepMemory:
        """Measure with a rank's part of each layer, which the forward computes with in a run, too."""
        sizes = self.sizes_for(world_size)
        if (size := sizes["tensor"]) == 1:
            return super().step_memory(step, sizes["shard"])
        plan, recompute = self._plan_for(step.module, size), self.prepare_step()
        shapes = tensor_shapes(step.module, plan, size)

        def prepare(module: nn.Module) -> None:
            exchange_parts(module, plan, size)
            if recompute is not None:
                recompute(module)

        return step.measure(shape_of=lambda _, parameter: shapes.get(id(parameter)), prepare=prepare, foreach=False)

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        sizes = self.sizes_for(world_size)
        if not step.moments:
            return super().memory_by_phase(step, model, world_size)
        ranks = self._rank_memories(model, sizes)
        found = []
        for rank in ranks:
            own, waiting, count = step, 1, 1
            if sizes["pipeline"] > 1:
                count = self.given_microbatches or self._number_of_stages(sizes["pipeline"])
                waiting = under_way_at_once(self.schedule, count, rank.stage, len(ranks))
                own = stage_step(step, ranks, rank, self.schedule, count)
            timeline = None
            if sizes["shard"] > 1:
                units = self.units_of(model, rank.held, rank.shapes, sizes["shard"])
                timeline = UnitTimeline(
                    own,
                    units,
                    keep=not self.reshard_after_forward,
                    offloads=self.cpu_offload,
                    accumulates=sizes["pipeline"] > 1,
                    forward_follows=count > waiting,
                )
            found.append(rank_phases(own, model, rank, sizes, timeline, offloads=self.cpu_offload))
        most = max(found, key=lambda phases: phases.peak)
        if plan := self._plan_for(model.module, sizes["tensor"]):
            most = with_region_checks(most, step, model.module, plan, sizes["tensor"])
        return most if world_size == 1 else replace(most, setup=setup_memory(model))

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The collectives of ``fully_shard``, where the axis 'shard' divides parameters or may."""
        return FullyShardedStrategy.needs if self.axes["shard"] != 1 else frozenset()

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        """The feature ``owns_backward`` of a pipeline. Before the set-up: if it has more than one rank, or may have."""
        return frozenset({"owns_backward"}) if self.sizes.get("pipeline", self.axes["pipeline"]) != 1 else frozenset()

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        if self.pipe is not None:
            step = partial(self._run_training_step if name == "training_step" else self.pipe.evaluate, step)
        if name == "training_step":
            step = self.watch_step(step)
            return step if self._batch_group is None else self.with_buffers(step)
        return self.then_sharded(step) if self.sizes["shard"] > 1 else step

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        if self.pipe is not None:
            call = partial(refuse_call, self.module, self.alias or "hybrid") if training else self.pipe.call
            return call if training or self.sizes["shard"] == 1 else around_call(call, self.then_sharded)
        call = super().module_call(forward, training=training)
        if self._partial_output_check is not None:
            call = self._partial_output_check.watched(call, f"what the forward of {type(self.module).__name__} gives")
        if training:
            whole = self._batch_group is None
            return around_call(
                call, lambda step: self.watch_step(step) if whole else self.with_buffers(self.watch_step(step))
            )
        return around_call(call, self.then_sharded) if self.sizes["shard"] > 1 else call

    def carry_hooks(self, hooks: Mapping[int, Any], parameter: nn.Parameter) -> None:
        if self.pipe is not None and self._units:
            raise parameter_hook_error(self.module, parameter, self.alias or "hybrid")
        super().carry_hooks(hooks, parameter)

    def user_step(self, name: str) -> Callable[..., Any]:
        step = super().user_step(name)
        if self._partial_output_check is None or self.pipe is not None:
            return step
        return self._partial_output_check.watched(step, f"what {name} of {type(self.module).__name__} returns")

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        if training and self.pipe is not None:
            check_loader(loader, self.pipe.microbatches, self.trainer)
        if self._randomness is not None:
            loader = self._randomness.seed_workers(loader)
        return super().process_dataloader(loader, training=training)

    def buffer_source(self) -> tuple[int, Any]:
        return dist.get_global_rank(self._batch_group, 0), self._batch_group

    def _run_training_step(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Run forward and backward of a batch, and add its gradients to those of the accumulation."""
        assert self.module is not None and self.pipe is not None
        if self._stage_gradients is None:  # not before: units are sharded after the stages are made
            self._stage_gradients = StageGradients(self.module)
        loss = partial(loss_of, model=type(self.module).__name__)
        with self._stage_gradients.accumulated():
            result = self.pipe.train(step, batch, rest, loss, accumulate_grad_batches=self.accumulate_grad_batches)
        self._averaged = False
        return result

    def explain(self, error: BaseException) -> BaseException:
        """Return what went wrong in a stage, which torch wraps into an error of its own."""
        found: BaseException | None = None
        if self.pipe is not None:
            if "failed to run forward" in message_of(error) and error.__cause__ is not None:
                return super().explain(error.__cause__)
            found = explain_in_pipeline(error, type(self.module).__name__)
        if found is None and self._partial_output_check is not None:
            alias, sharded = self.alias or "hybrid", bool(self._units)
            found = explain_tensor_parallel(error, alias=alias, module=self.module, sharded=sharded)
        return super().explain(error) if found is None else found

    # -- gradients -------------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Average over the ranks with other data, but for what ``fully_shard`` has averaged in backward."""
        self._averaged = self.gradients_synced = True
        if self._batch_group is not None:
            with self.guard("averaging of the gradients"):
                average_gradients(self.replicated_parameters(), self._batch_group)

    def replicated_parameters(self) -> list[nn.Parameter]:
        assert self.module is not None
        if self.sizes["shard"] > 1:
            return super().replicated_parameters()
        return [parameter for parameter in self.module.parameters() if not parameter.is_meta]

    def sum_of_squares(self, square: torch.Tensor) -> torch.Tensor:
        if self.pipe is not None:
            square = square.to(self.root_device)
            dist.all_reduce(square, group=self.mesh.get_group("pipeline"))
        return square

    # -- optimizers ------------------------------------------------------------------------------------------

    def is_divided(self) -> bool:
        return self.pipe is not None or super().is_divided()

    def is_sharded(self) -> bool:
        return self.sizes["shard"] > 1 or self.sizes["tensor"] > 1

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        if self.sizes["tensor"] > 1:
            one_by_one(optimizers, "tensor parallelism")
        if self.pipe is not None:
            for optimizer in optimizers:
                self._trials.add(optimizer, self.alias or "hybrid", self.accelerator, self.root_device)
        super().setup_optimizers(optimizers, lr_scheduler_configs)

    def take_connected(self, model: Any) -> None:
        if self.pipe is not None:
            raise connected_model_error(self.precision, model, self.alias or "hybrid")
        super().take_connected(model)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if self.pipe is None:
            return super().optimizer_step(optimizer, closure)
        watched = self._trials.before_step(optimizer)
        own = [[each for each in group["params"] if not each.is_meta] for group in optimizer.param_groups]
        with with_parameters(optimizer, own), watched:
            return super().optimizer_step(optimizer, closure)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of this stage's parameters, with the indices that they have among all.

        So it is after the run too: the optimizers keep the parts of it, where the module is whole on every rank.
        """
        state = super().optimizer_state(optimizer)
        stages = self._stage_state or self._ended_stages
        if stages is None:
            return state
        if self.pipe is not None:
            state = own_optimizer_state(optimizer, state)
        if not self.saves_shards:
            state["state"] = dict(sorted(stages.gather(state["state"]).items()))
        return state

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, state if self.pipe is None else own_optimizer_state(optimizer, state))

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state if self.pipe is None else own_optimizer_state(optimizer, state))

    # -- state -----------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        self.check_writes()
        whole = Strategy.module_state_dict(self)
        state = {name: value for name, value in whole.items() if not getattr(value, "is_meta", False)}
        if self._batch_group is not None:
            assert self.module is not None
            source, group = self.buffer_source()
            with self.guard("broadcast of the buffers"):
                state |= broadcast_buffers(self.module, state, source, group)
        if self.pipe is not None:
            state = {name: value for name, value in state.items() if self.pipe.owns(name)}
        if not self.saves_shards:
            with self.guard("gathering of the state"):
                state = gather_to_cpu(state, keep=self.keeps_gathered)
                if self._stage_state is not None:
                    state = self._stage_state.gather(state)
            state = sort_by_name(state, self._names)
        return with_versions(state, whole)

    @property
    def keeps_gathered(self) -> bool:
        """True on one rank of each stage, which sends its state to rank 0."""
        if self.pipe is None and self._ended_stages is None:
            return super().keeps_gathered
        return all(self.rank_in(axis) == 0 for axis in ("data", "shard", "tensor"))

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        if self.pipe is None:
            return super().load_module_state_dict(state, strict=strict)
        assert self.module is not None and self._stage_state is not None
        own = self._stage_state.own_module_state(state, self.module, strict=strict)
        return super().load_module_state_dict(own, strict=False)

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        gradients = super().accumulated_gradients()
        if self._stage_state is not None and not self.saves_shards:
            gradients = self._stage_state.gather(gradients)
        return gradients

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().whole_tensors()
        return tensors if self._stage_state is None else self._stage_state.gather_everywhere(tensors)

    def restore_module(self) -> None:
        super().restore_module()
        self._ended_stages = self._stage_state or self._ended_stages
        self.pipe = self._stage_state = None

    def release_model(self) -> None:
        # the other stages' weights are not here: what stays is this rank's part
        if self.pipe is None:
            super().release_model()
            return
        module, self.module = self.module, None
        super().release_model()
        self.module = self.model = module
