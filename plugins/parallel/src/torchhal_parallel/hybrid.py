"""Data, sharded data, pipeline and tensor parallelism, one axis each of one device mesh."""

from __future__ import annotations

import copy
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchhal import rng
from torchhal.distributed import collectives
from torchhal.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    ModelError,
    UnsupportedCombinationError,
    message_of,
)
from torchhal.memory_estimate import MemoryEstimate, ModelMemory, ParameterMemory
from torchhal.precision import Precision
from torchhal.strategies import Strategy, check_frequencies
from torchhal_parallel._between_steps import explain_mixed
from torchhal_parallel._divided_regions import DividedRegions
from torchhal_parallel._double_backward import refuse_double_backward
from torchhal_parallel._dtensor_layout import gather_to_cpu, to_local
from torchhal_parallel._fsdp_base import FullyShardedStrategy, check_torch, release_groups
from torchhal_parallel._gathering import on_every_rank, on_first_rank
from torchhal_parallel._gradient_hooks import HooksOfBatch
from torchhal_parallel._microbatches import check_loader
from torchhal_parallel._optimizer_checks import OptimizerTrial, check_separable, one_by_one, with_parameters
from torchhal_parallel._pipeline_split import check_trained, even_cuts, shared_or_unused_parameters, stage_parameters
from torchhal_parallel._remote_tensor import RemoteParameter, RemoteTensor, remote, remote_gradient
from torchhal_parallel._shard_sizes import buffers_of, divided, stages_of_ranks, tensor_shapes
from torchhal_parallel._shown import shown
from torchhal_parallel._tensor_parallel import apply_plan, check_plan_form, plan_of, resolve_plan
from torchhal_parallel._tensor_parallel_check import PartialOutputCheck
from torchhal_parallel.pipeline import Pipeline, check_schedule, check_schedule_name, check_schedules_of_torch

AXES = ("pipeline", "data", "shard", "tensor")
"""From the outermost axis of the mesh to the innermost: neighbours share a tensor, which costs most to send."""

_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.14

_OF_SHARDS = (("cpu_offload", False), ("mixed_precision", None), ("reshard_after_forward", True))


class HybridStrategy(FullyShardedStrategy):
    """``data x shard x pipeline x tensor`` processes, on one ``DeviceMesh``.

    Args:
        data: replicas of the model, each with its own share of the data.
        shard: ranks that shard a replica's parameters by ``fully_shard``, each with its own share of the data.
        pipeline: stages of the model; the ranks of a pipeline share a batch.
        tensor: ranks that share each layer of the plan; they share a batch too.
        plan: see :mod:`torchhal_parallel._tensor_parallel`; None: the module's own ``tensor_parallel_plan``.
        split_points: names of the modules at which a new stage begins; None: between the elements of the outermost list
            of layers that is long enough, so that the stages have about equally many parameters.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        microbatches: parts into which a pipeline divides each batch; None: as many as it has stages.
        stages_per_rank: for ``"interleaved_1f1b"`` without ``split_points``.
        options: see :class:`~torchhal_parallel._fsdp_base.FullyShardedStrategy`; all of them but
            ``activation_checkpointing`` concern the shard axis alone.

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
        self.axes: dict[str, int | None] = {"pipeline": pipeline, "data": data, "shard": shard, "tensor": tensor}
        for name, value in (*self.axes.items(), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name!r} must be an int of at least 1, or None (got {value!r})")
        if sum(value is None for value in self.axes.values()) > 1:
            raise ConfigurationError("at most one of 'data', 'shard', 'pipeline' and 'tensor' may be None")
        if isinstance(split_points, str):
            raise ConfigurationError(f"'split_points' must be a list of names (got {split_points!r})")
        if split_points is not None and not all(isinstance(name, str) and name for name in split_points):
            raise ConfigurationError(f"'split_points' must be names of modules (got {split_points!r})")
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

    def _forget(self) -> None:
        super()._forget()
        self.mesh: Any = None
        self.sizes: dict[str, int] = {}
        self.pipe: Pipeline | None = None
        self._open_layers: PartialOutputCheck | None = None
        self._mine: list[nn.Parameter] = []
        self._others: list[tuple[RemoteParameter, RemoteTensor]] = []
        self._names: dict[str, torch.Size | None] = {}
        self._untrainable: dict[str, str] = {}
        self._trials: dict[int, OptimizerTrial | None] = {}
        self._batch_group: Any = None
        self._loader_seed: int | None = None

    # -- what can work ---------------------------------------------------------------------------------------

    def check_fit(self, *, precision: Precision, world_size: int) -> None:
        sizes = self.sizes_for(world_size)
        if sizes["shard"] > 1:
            check_torch(self.alias or "hybrid")
        if sizes["pipeline"] > 1:
            check_schedules_of_torch(self.schedule, self.alias or "hybrid")
        if "scales_loss" in precision.features and (sizes["tensor"] > 1 or sizes["pipeline"] > 1):
            raise UnsupportedCombinationError(
                f"strategy {self.alias or 'hybrid'!r} can't compute in precision {precision.alias!r}, which scales the "
                "loss: ranks of the axes 'tensor' and 'pipeline' have different parameters, and would decide "
                "differently whether a step is skipped. Use 'bf16-mixed'"
            )

    def check_sync_batchnorm(self, world_size: int) -> None:
        if self.sizes_for(world_size)["pipeline"] > 1:
            raise UnsupportedCombinationError(
                f"strategy {self.alias or 'hybrid'!r} can't let batch norms compute over the whole batch "
                "(sync_batchnorm=True): a stage sees one microbatch after the other. Use pipeline=1, or leave "
                "sync_batchnorm out"
            )

    def batch_group(self) -> Any:
        return self._batch_group

    def _number_of_stages(self, size: int) -> int:
        return size * self.stages_per_rank if self.split_points is None else len(self.split_points) + 1

    # -- the mesh --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        mesh = self.mesh
        try:
            super().teardown()
        finally:
            release_groups(mesh)

    def setup_communication(self) -> Any:
        store = super().setup_communication()
        self.sizes = self.sizes_for(self.world_size)
        self.mesh = init_device_mesh(
            self.root_device.type, tuple(self.sizes[axis] for axis in AXES), mesh_dim_names=AXES
        )
        for axis in AXES:  # torch would let them wait for half an hour
            _set_timeout(self.timeout, self.mesh.get_group(axis))
        self._batch_group = self._make_batch_group()
        return store

    def sizes_for(self, world_size: int) -> dict[str, int]:
        """The size of each axis in a world of ``world_size``.

        Raises:
            ConfigurationError: they don't multiply to it; the message says which they are. Or the schedule can't have
                so many stages over so many ranks.
        """
        fixed = math.prod(value for value in self.axes.values() if value is not None)
        if world_size % fixed or (fixed != world_size and None not in self.axes.values()):
            listing = " x ".join(f"{name}={'?' if value is None else value}" for name, value in self.axes.items())
            raise ConfigurationError(
                f"{listing} needs {'a multiple of ' if None in self.axes.values() else ''}{fixed} processes, and there "
                f"are {world_size}: change an axis, or 'devices' and 'num_nodes'"
            )
        sizes = {name: world_size // fixed if value is None else value for name, value in self.axes.items()}
        if (ranks := sizes["pipeline"]) > 1:
            stages = self._number_of_stages(ranks)
            check_schedule(self.schedule, stages, ranks, self.given_microbatches or stages)
        return sizes

    def rank_in(self, axis: str) -> int:
        """This process's coordinate on an axis."""
        return int(self.mesh.get_local_rank(axis)) if self.mesh is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        if self.mesh is None:
            return None
        shard = self.sizes["shard"]
        return {
            "num_replicas": self.sizes["data"] * shard,
            "rank": self.rank_in("data") * shard + self.rank_in("shard"),
        }

    @property
    def is_data_leader(self) -> bool:
        last = self.pipe.last_rank if self.pipe is not None else 0
        return self.rank_in("tensor") == 0 and self.rank_in("pipeline") == last

    def _make_batch_group(self) -> Any:
        """The ranks that have the same parameters, each with its own data; None for this one alone."""
        sizes = self.sizes
        if sizes["data"] == 1 or sizes["shard"] == 1:
            axis = "data" if sizes["shard"] == 1 else "shard"
            return self.mesh.get_group(axis) if sizes[axis] > 1 else None
        ranks = self.mesh.mesh.movedim(AXES.index("pipeline"), -1).flatten(0, 1).flatten(1)  # (data x shard, others)
        own, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=self.timeout)  # type: ignore[no-untyped-call]
        return own

    # -- model -----------------------------------------------------------------------------------------------

    def wrap_model(self, *, training: bool) -> None:
        assert self.module is not None
        self._names = {name: getattr(value, "shape", None) for name, value in self.module.state_dict().items()}
        plan = {}
        if self.sizes["tensor"] > 1:
            plan = resolve_plan(self.module, plan_of(self.module, self.plan), self.sizes["tensor"])
        self.check_blocks(sharded=self.sizes["shard"] > 1)
        self._share_random_numbers(training)
        if self.sizes["pipeline"] > 1:
            if training:
                check_frequencies(self.module, "each microbatch")
            self._cut_stages()
        if plan:
            assert self._objects is not None
            apply_plan(self.module, plan, self.mesh["tensor"], self._objects.empty_replaced)
            if training:
                refuse_double_backward(self.module, plan, self.alias or "hybrid")
            rank, size = self.rank_in("tensor"), self.sizes["tensor"]
            regions = DividedRegions(self.module, plan, rank, size, strategy=self)
            self._open_layers = PartialOutputCheck(self.module, plan, size, regions)
            if self.pipe is not None:
                self.pipe.watch(self._open_layers)
        self.wrap_blocks()
        if self.sizes["shard"] > 1:
            mesh = self.mesh["data", "shard"] if self.sizes["data"] > 1 else self.mesh["shard"]
            self.shard_units(mesh, None if self.pipe is None else list(self.pipe.roots.values()))
            if self.pipe is not None:
                self.pipe.relink()

    def _share_random_numbers(self, training: bool) -> None:
        """Give the ranks of one batch the generators of the first of them, and the seeds of their data workers.

        What they augment must agree, and the ranks of a layer must drop the same of what they all have.
        """
        share = self.distributed_sampler_kwargs
        if self.world_size == 1 or share is None:
            return
        first = self.rank_in("pipeline") == self.rank_in("tensor") == 0
        own = rng.collect(self.accelerator, self.root_device) if first else None
        with self.guard("the exchange of random numbers"):
            everybody = collectives.all_gather_object((share["rank"], own))
        state = next(state for replica, state in everybody if state is not None and replica == share["rank"])
        self._loader_seed = zlib.crc32(bytes(state["torch"].tolist()))
        if training:
            rng.restore(state, self.accelerator, self.root_device)

    def _cut_stages(self) -> None:
        assert self.module is not None
        if not getattr(self.module, "automatic_optimization", True):
            raise ConfigurationError(
                f"a pipeline runs forward and backward itself, and {type(self.module).__name__} has manual "
                "optimization: set automatic_optimization = True, or use an axis other than 'pipeline'"
            )
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
        parts = [set(map(id, stage_parameters(self.module, stage).values())) for stage in pipe.stages]
        everything = set(map(id, (*self.module.parameters(), *self.module.buffers())))
        kept = everything.difference(*parts)  # the step may use what no stage does, wherever that runs
        kept.update(*(parts[index] for index in pipe.mine))
        self._check_frozen()
        self._drop_others(kept)

    def _check_frozen(self) -> None:
        assert self.module is not None
        check_trained(self.module, self._untrainable)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self.pipe is not None:
            self._check_frozen()

    def _drop_others(self, kept: set[int]) -> None:
        """Free the parameters and buffers of other stages: they stay in the model by name and shape."""
        assert self.module is not None
        home = torch.device("cpu") if self.cpu_offload else self.root_device
        standing_for: dict[int, Any] = {}  # tied ones stay tied, or an optimizer would count them twice
        for path, owner in self.module.named_modules():
            for members in (owner._parameters, owner._buffers):
                for name, tensor in members.items():
                    if tensor is not None and id(tensor) not in kept:
                        if id(tensor) not in standing_for:
                            standing_for[id(tensor)] = remote(tensor, f"{path}.{name}" if path else name, home)
                        members[name] = standing_for[id(tensor)]

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        sizes = self.sizes_for(world_size)
        shapes: dict[int, tuple[int, ...]] = {}
        if sizes["tensor"] > 1:
            plan = resolve_plan(model.module, plan_of(model.module, self.plan), sizes["tensor"])
            shapes = tensor_shapes(model.module, plan, sizes["tensor"])
        stages: list[Any] = [None]
        if sizes["pipeline"] > 1:
            stages_there = self._number_of_stages(sizes["pipeline"])
            points = self.split_points or even_cuts(model.module, stages_there)
            stages = stages_of_ranks(model.module, points, sizes["pipeline"])
        return max((self._memory_of(model, shapes, sizes, stage) for stage in stages), key=lambda found: found.peak)

    def _memory_of(
        self, model: ModelMemory, shapes: Mapping[int, tuple[int, ...]], sizes: Mapping[str, int], stage: Any
    ) -> MemoryEstimate:
        """On the ranks of one stage; None for the whole model."""
        held, buffers = model.parameters, model.buffers
        if stage is not None:
            mine = {id(tensor) for tensor in stage.values()}
            held = tuple(entry for entry in held if id(entry.parameter) in mine)
            buffers = buffers_of(stage)

        kept = self.names_kept_whole(model.module) if sizes["shard"] > 1 else ()

        def shape_of(entry: ParameterMemory) -> tuple[int, ...]:
            shape = shapes.get(id(entry.parameter), tuple(entry.parameter.shape))
            return shape if entry.name in kept else divided(shape, sizes["shard"])

        found = model.estimate(shape_of, parameters=held, buffers=buffers)
        if sizes["shard"] > 1:
            return found.plus(self.gathered_memory(model, held, shapes))
        return found if sizes["data"] == 1 else found.plus(found.gradients, "gradients are averaged in one piece")

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        """A pipeline runs the backward itself. Before the set-up: if it has more than one rank, or may have."""
        return frozenset({"owns_backward"}) if self.sizes.get("pipeline", self.axes["pipeline"]) != 1 else frozenset()

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        if self.pipe is not None:
            step = partial(self._train if name == "training_step" else self.pipe.evaluate, step)
        if name == "training_step":
            step = self.watch_writes(step)
            return step if self._batch_group is None else self.with_buffers(step)
        return self.then_sharded(step) if self.sizes["shard"] > 1 else step

    def carry_hooks(self, hooks: Mapping[int, Any], parameter: nn.Parameter) -> None:
        if self.pipe is not None and self._units:
            raise ModelError(
                f"a parameter of {type(self.module).__name__}, of shape {tuple(parameter.shape)}, has a hook of "
                f"register_hook, and strategy {self.alias or 'hybrid'!r} averages the gradients of each microbatch "
                "over the ranks of the axis 'shard': no hook would see that of a batch. Use shard=1 (axis 'data'), or "
                "pipeline=1, or change gradients in on_before_optimizer_step"
            )
        super().carry_hooks(hooks, parameter)

    def user_step(self, name: str) -> Callable[..., Any]:
        step = super().user_step(name)
        if self._open_layers is None or self.pipe is not None:
            return step
        return self._open_layers.watched(step, f"what {name} of {type(self.module).__name__} returns")

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        if training and self.pipe is not None:
            check_loader(loader, self.pipe.microbatches, self.trainer)
        with_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        if self._loader_seed is not None and with_workers and loader.generator is None:  # else the user has chosen one
            loader = copy.copy(loader)
            loader.__dict__.update(generator=torch.Generator().manual_seed(self._loader_seed), _iterator=None)
            self._loader_seed += 1  # for the next loader
        return super().process_dataloader(loader, training=training)

    def buffer_source(self) -> tuple[int, Any]:
        return dist.get_global_rank(self._batch_group, 0), self._batch_group

    def _train(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Forward and backward of a batch, its gradients added to those of the accumulation."""
        assert self.module is not None and self.pipe is not None
        if not self._mine:
            self._mine = [parameter for parameter in self.module.parameters() if not parameter.is_meta]
            remote_ones = (p for p in self.module.parameters() if isinstance(p, RemoteParameter))
            self._others = [(parameter, remote_gradient(parameter)) for parameter in remote_ones]
        mine = self._mine
        hooks = HooksOfBatch(mine)
        earlier = [parameter.grad for parameter in mine]
        for parameter in mine:
            parameter.grad = None
        with hooks.held_back():
            result = self.pipe.train(
                step, batch, rest, self._loss_of, accumulate_grad_batches=self.accumulate_grad_batches
            )
        hooks.on_gradients()
        for parameter, before in zip(mine, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        hooks.after_accumulation()
        for other, gradient in self._others:  # so that a hook which looks at all gradients hears that it doesn't
            if other.requires_grad:
                other.grad = gradient
        self._averaged = False
        return result

    def explain(self, error: BaseException) -> BaseException:
        """What went wrong in a stage, which torch wraps into an error of its own."""
        if self.pipe is not None and "failed to run forward" in message_of(error) and error.__cause__ is not None:
            return super().explain(error.__cause__)
        if self.pipe is not None and (found := self.pipe.explained(error)) is not None:
            return found
        if self._open_layers is not None and "running_mean should contain" in message_of(error):
            norms = {id(each): name for name, each in self.module.named_modules()} if self.module is not None else {}
            for frame, _ in reversed(list(walk_tb(error.__traceback__))):
                norm = frame.f_locals.get("self")
                if isinstance(norm, nn.modules.batchnorm._BatchNorm) and id(norm) in norms:
                    return ModelError(
                        f"{norms[id(norm)]!r} is a {type(norm).__name__} of {norm.num_features} features, and is "
                        "called with a rank's part of the outputs of a 'colwise' layer, while its statistics and "
                        "weights are those of all features: give the layer before it the style 'colwise_rep' and the "
                        "layer behind it 'rowwise_rep', or leave both out of the tensor parallel plan"
                    )
        if self._open_layers is not None and not self._units and "mixed torch.Tensor and DTensor" in message_of(error):
            model = type(self.module).__name__
            frames = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
            if "torch.nn.utils.clip_grad" in frames:
                return ModelError(
                    f"{error}. torch.nn.utils can't clip the gradients of {model}, of which those in the tensor "
                    "parallel plan are divided and the others are not: set Trainer(gradient_clip_val=...), or call "
                    "self.clip_gradients(...) in configure_gradient_clipping. The norm of all gradients is "
                    "trainer.strategy.grad_norm(optimizer)"
                )
            if (found := explain_mixed(error, self.alias or "hybrid")) is not None:
                return found
            return ModelError(
                f"{error}. The parameters of layers in a tensor parallel plan are divided, and {model} computes with "
                "one outside of its layer, as a penalty over self.parameters() does: leave that layer "
                "out of the plan, let the optimizer do it (weight_decay), or use strategy='ddp'"
            )
        return super().explain(error)

    def _loss_of(self, result: Any) -> torch.Tensor:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ModelError(
                f"the training_step of {type(self.module).__name__} must return a tensor with one element, or a dict "
                f"with 'loss', under a pipeline (got {shown(result)})"
            )
        if isinstance(loss, RemoteTensor):
            loss.refuse("part of the loss")
        return loss

    # -- gradients -------------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Average over the ranks with other data, but for what ``fully_shard`` has averaged in backward."""
        self._averaged = self.gradients_synced = True
        if self._batch_group is not None:
            with self.guard("averaging of the gradients"):
                average_local(self.replicated_parameters(), self._batch_group)

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
                trial = check_separable(optimizer, self.alias or "hybrid", self.accelerator, self.root_device)
                self._trials[id(optimizer)] = trial
        super().setup_optimizers(optimizers, lr_scheduler_configs)

    def _take_connected(self, model: Any) -> None:
        if self.pipe is not None:
            raise UnsupportedCombinationError(
                f"{type(self.precision).__name__}.connect gives back a {type(model).__name__} for the model, and "
                f"strategy {self.alias or 'hybrid'!r} runs the stages of the model one by one, so that no step would "
                "run through it: use no axis 'pipeline', or another precision"
            )
        super()._take_connected(model)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> int | None:
        if self.pipe is None:
            return super().optimizer_step(optimizer, closure)
        watched: AbstractContextManager[None] = nullcontext()
        if (trial := self._trials.get(id(optimizer))) is not None:
            trial.before_step()
            watched = trial.watched(optimizer, trial.done)
        own = [[each for each in group["params"] if not each.is_meta] for group in optimizer.param_groups]
        with with_parameters(optimizer, own), watched:
            return super().optimizer_step(optimizer, closure)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """That of this stage's parameters, with the indices that they have among all."""
        state = super().optimizer_state(optimizer)
        if self.pipe is None:
            return state
        other = _indices_of_others(optimizer)
        state["state"] = {index: entry for index, entry in state["state"].items() if index not in other}
        if not self.saves_shards:
            state["state"] = dict(sorted(self._from_all_stages(state["state"]).items()))
        return state

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, self._of_stage(optimizer, state))

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, self._of_stage(optimizer, state))

    def _of_stage(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` without that of other stages' parameters."""
        if self.pipe is None:
            return dict(state)
        other = _indices_of_others(optimizer)
        return {**state, "state": {index: entry for index, entry in state["state"].items() if index not in other}}

    # -- state -----------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        self.check_writes()
        whole = Strategy.module_state_dict(self)
        state = {name: value for name, value in whole.items() if not _is_meta(value)}
        if self._batch_group is not None:
            assert self.module is not None
            buffers = [name for name, _ in self.module.named_buffers(remove_duplicate=False) if name in state]
            source, group = self.buffer_source()
            with self.guard("broadcast of the buffers"):
                state |= collectives.broadcast_copies(
                    {name: state[name] for name in sorted(buffers)}, src=source, group=group
                )
        if self.pipe is not None:
            state = {name: value for name, value in state.items() if self.pipe.owns(name)}
        if not self.saves_shards:
            with self.guard("gathering of the state"):
                state = gather_to_cpu(state, keep=self.keeps_gathered)
                if self.pipe is not None:
                    state = self._from_all_stages(state)
            order = {name: position for position, name in enumerate(self._names)}
            state = dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
        versioned: Any = OrderedDict(state)
        versioned._metadata = getattr(whole, "_metadata", {})  # each module's version, with which it reads the state
        return versioned  # type: ignore[no-any-return]

    @property
    def keeps_gathered(self) -> bool:
        """One rank of each stage, which sends it to rank 0."""
        if self.pipe is None:
            return super().keeps_gathered
        return all(self.rank_in(axis) == 0 for axis in ("data", "shard", "tensor"))

    def _from_all_stages(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """What each stage has, on rank 0; the ranks of one stage have the same, so one of them sends it."""
        with self.guard("gathering of the stages"):
            parts = on_first_rank(mine if self.keeps_gathered else {}, self.root_device)
        return {key: value for part in parts or [mine] for key, value in part.items()}

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        if self.pipe is None:
            return super().load_module_state_dict(state, strict=strict)
        assert self.module is not None
        shapes = {name: tuple(value.shape) for name, value in state.items() if hasattr(value, "shape")}
        missing, unexpected = sorted(set(self._names) - set(state)), sorted(set(state) - set(self._names))
        wrong = [
            f"{name!r} has the shape {shapes[name]} there and {tuple(shape)} here"
            for name, shape in self._names.items()
            if shape is not None and name in shapes and shapes[name] != tuple(shape)
        ]
        if wrong or (strict and (missing or unexpected)):
            problems = [
                *wrong,
                *(f"{name!r} is missing" for name in missing),
                *(f"{name!r} is unknown" for name in unexpected),
            ]
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {'; '.join(problems[:6])}"
            )
        here = {name for name, value in self.module.state_dict().items() if not _is_meta(value)}
        return super().load_module_state_dict(
            {name: value for name, value in state.items() if name in here}, strict=False
        )

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        gradients = super().accumulated_gradients()
        if self.pipe is not None and not self.saves_shards:
            gradients = self._from_all_stages(gradients)
        return gradients

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().whole_tensors()
        if self.pipe is None:
            return tensors
        parts = on_every_rank(tensors if self.keeps_gathered else {}, self.root_device)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def restore_module(self) -> None:
        super().restore_module()
        self.pipe = None

    def _release_model(self) -> None:
        # the other stages' weights are not here: what stays is this rank's part
        if self.pipe is None:
            super()._release_model()
            return
        module, self.module = self.module, None
        super()._release_model()
        self.module = self.model = module


def average_local(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Average the gradients, sharded ones part by part, over ranks that have the same parts.

    A gradient that exists on some of these ranks only counts as zero on the others.
    """
    size = dist.get_world_size(group)
    collectives.average_gradients([p for p in parameters if not isinstance(p, DTensor)], group)
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor) and parameter.requires_grad]
    if not sharded:
        return
    there = torch.tensor([parameter.grad is not None for parameter in sharded], dtype=torch.uint8)
    there = there.to(to_local(sharded[0].detach()).device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, somewhere in zip(sharded, there.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part = to_local(parameter.grad)
            by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=group)
        flat /= size
        for part, averaged in zip(parts, flat.split([part.numel() for part in parts]), strict=True):  # type: ignore[no-untyped-call]
            part.copy_(averaged.view_as(part))


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _indices_of_others(optimizer: Optimizer) -> set[int]:
    """Of the parameters that other stages have."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index for index, parameter in enumerate(parameters) if parameter.is_meta}
