"""Run the stages of a cut model as a pipeline over the ranks of one group, by ``torch.distributed.pipelining``.

The user's step stays as it is written for one process. It runs as far as ``self(...)`` to learn what it calls the
model with; then, where the last stage is, for each microbatch, with the pipeline's output as what ``self(...)`` gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from torchhal.accelerators.transfer import map_tensors
from torchhal.errors import ConfigurationError, ModelError
from torchhal_parallel.cut import Stage, cut, uses
from torchhal_parallel.microbatches import indivisible
from torchhal_parallel.open_layers import OpenLayers
from torchhal_parallel.part_log import one_log
from torchhal_parallel.rehearsal import Rehearsal, once
from torchhal_parallel.split import merge_training, rows_of

SCHEDULES: Final[Mapping[str, Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}

KEPT_SCHEDULES = 8
"""Shapes of batches whose schedules are kept, as each holds the memory of what it receives."""

KEPT_ENDS = 256
"""Shapes of batches for which the shapes between the stages are kept."""


class _Recent(dict[Any, Any]):
    """At most ``limit`` things, made when they are first asked for; the one that was not asked for longest goes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        made = self.pop(key, None)
        if made is None:
            made = make()
            while len(self) >= self.limit:
                del self[next(iter(self))]
        self[key] = made
        return made


class StageRoot(nn.Module):
    """One stage as a module: its parameters are those of the user's submodules, under their names.

    Which graph runs may change with the training mode and the arguments; what it holds does not.
    """

    def __init__(self, module: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.graph_module = fx.GraphModule(module, stage.graph)
        self.compute: Callable[..., Any] = self.graph_module.__call__
        self.dtypes: tuple[torch.dtype, ...] | None = None

    def use(self, graph: fx.Graph, dtypes: tuple[torch.dtype, ...] | None) -> None:
        """Run ``graph`` from now on; what goes out has ``dtypes``, which the next stage expects."""
        if self.graph_module.graph is not graph:
            # not another module: a wrapper may have replaced the parameters in this one, and does so in each step
            self.graph_module.graph = graph
        self.dtypes = dtypes

    def forward(self, *values: Any) -> Any:
        result = self.compute(*values)
        if self.dtypes is None:
            return result
        return tuple(value.to(dtype) for value, dtype in zip(result, self.dtypes, strict=True))


class Pipeline:
    """The ranks of ``group`` as stages of one model; rank r has the stages r, r + size, ...

    Args:
        module: the user's model, complete, on every rank.
        split_points: modules at which a new stage begins.
        group: the process group.
        strategy: whose device and generators are used.
        trainer: to whose results the steps log; None without one.
        schedule: one of :data:`SCHEDULES`.
        microbatches: parts of a batch that are under way at once; it must divide every batch.
    """

    def __init__(
        self,
        module: nn.Module,
        split_points: Sequence[str],
        *,
        group: Any,
        strategy: Any,
        trainer: Any,
        schedule: str,
        microbatches: int,
    ) -> None:
        self.module = module
        self.split_points = list(split_points)
        self.group = group
        self.strategy = strategy
        self.trainer = trainer
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.schedule = schedule
        self.microbatches = microbatches
        if "forward" in vars(module):
            raise ModelError(
                f"the forward of this {type(module).__name__} was set on the object, and a pipeline follows that of "
                "the class: define it there"
            )
        self.stages = cut(module, split_points)
        self.mine = list(range(self.rank, len(self.stages), self.size))
        self.is_last = len(self.stages) - 1 in self.mine
        self.last_rank = (len(self.stages) - 1) % self.size
        """Pipeline rank of the stage that makes the loss, and does what the step does after ``self(...)``."""
        self.roots = {index: StageRoot(module, self.stages[index]) for index in self.mine}
        self._rehearsal = Rehearsal(module, strategy)
        self._outlines = _outlines(module, self.stages)
        self._cuts: dict[Any, list[Stage]] = {}
        self._ends = _Recent(KEPT_ENDS)
        self._schedules = _Recent(KEPT_SCHEDULES)
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def owns(self, name: str) -> bool:
        """Whether this rank's value of an entry of the model's state counts: its stage changes it, or the step does."""
        users = (index for index, stage in enumerate(self.stages) if uses(stage, name))
        return next(users, len(self.stages) - 1) in self.mine

    def watch(self, layers: OpenLayers) -> None:
        """Let ``layers`` look at what this rank's stages give when they first compute."""
        for index, root in self.roots.items():
            root.compute = layers.watched_once(root.compute, f"what stage {index} of the pipeline gives")

    def relink(self) -> None:
        """Give the model the parameters that a stage reads itself, after something has replaced them in the stage."""
        for index, root in self.roots.items():
            for name in self.stages[index].modules:
                owner, attribute = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                if attribute in owner._parameters:
                    holder = root.graph_module.get_submodule(name.rpartition(".")[0])
                    owner._parameters[attribute] = holder._parameters[attribute]

    # -- training --------------------------------------------------------------------------------------------

    def train(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...], loss_of: Callable[[Any], Any]) -> Any:
        """Forward and backward of one batch: the gradients of its mean loss are added to the stage's parameters.

        Returns:
            What ``step`` has returned for the microbatches, as for the whole batch and without gradients, on the rank
            of the last stage; None elsewhere.
        """
        names, tensors, size = self._inputs(self._rehearsal(step, batch, rest), self.microbatches)
        if size not in (found := _first_dimensions(batch)):
            raise ModelError(
                f"the step calls {type(self.module).__name__} with {size} samples, and the tensors of its batch have "
                f"{', '.join(map(str, sorted(found))) or 'no dimensions'}: a pipeline divides both into the same "
                "microbatches. Make the batch in the data set or its collate_fn what the model is to be called with"
            )
        schedule = self._schedule(names, tensors, size)
        rows = size // self.microbatches
        sizes = [rows] * self.microbatches
        outputs: list[Any] = [None] * self.microbatches
        inputs = tuple(tensors.values()) if 0 in self.mine else ()
        guard = self.strategy.guard("a training step of the pipeline")
        if not self.is_last:
            with guard:
                schedule.step(*inputs)
            return None
        with one_log(self.trainer, sizes, self.strategy.root_device) as start_part, guard:

            def loss(output: Any, positions: torch.Tensor) -> torch.Tensor:
                start = int(positions[0])
                start_part(start // rows)
                with self._rehearsal.answering(once(self.module, output)):
                    result = step(rows_of(batch, size, start, start + rows), *rest)
                found: torch.Tensor = loss_of(result)
                outputs[start // rows] = map_tensors(result, _without_graph)
                return found

            self._loss = loss
            try:
                schedule.step(*inputs, target=torch.arange(size, device="cpu"), losses=[])
            finally:
                self._loss = None  # it holds the batch
        with torch.no_grad():
            return merge_training(outputs, sizes, self.strategy.root_device)

    def _loss_of_now(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(output, target)

    def _schedule(self, names: tuple[str, ...], tensors: dict[str, torch.Tensor], size: int) -> Any:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
        key = (names, shapes, self.module.training)
        ends = self._use(names, tensors, size // self.microbatches)
        return self._schedules.get_or_make(key, lambda: self._make_schedule(ends))

    def _make_schedule(self, ends: Sequence[tuple[Any, Any]]) -> Any:
        stages = [
            PipelineStage(
                self.roots[index],
                index,
                len(self.stages),
                self.strategy.root_device,
                input_args=ends[index][0],
                output_args=ends[index][1],
                group=self.group,
            )
            for index in self.mine
        ]
        given: Any = stages if self.schedule == "interleaved_1f1b" else stages[0]
        return SCHEDULES[self.schedule](given, self.microbatches, loss_fn=self._loss_of_now)

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> Any:
        """The forward alone, the batch in one piece: ``step``'s result on the rank of the last stage, else None."""
        names, tensors, size = self._inputs(self._rehearsal(step, batch, rest), 1)
        ends = self._use(names, tensors, size)
        values: Any = tuple(tensors.values())
        with self.strategy.guard("a forward of the pipeline"):
            values = self._forward(values, ends)
        if not self.is_last:
            return None
        with self._rehearsal.answering(once(self.module, values)):
            return step(batch, *rest)

    def _forward(self, values: Any, ends: Sequence[tuple[Any, Any]]) -> Any:
        """What this rank's last stage gives for ``values``, which enter the first stage."""
        device = self.strategy.root_device
        for index in range(len(self.stages)):
            owner = index % self.size
            if index and owner != (index - 1) % self.size:
                if self.rank == (index - 1) % self.size:
                    for value in values:
                        dist.send(value.contiguous(), group=self.group, group_dst=owner)
                elif self.rank == owner:
                    values = tuple(torch.empty(end.shape, dtype=end.dtype, device=device) for end in ends[index][0])
                    for value in values:
                        dist.recv(value, group=self.group, group_src=(index - 1) % self.size)
            if self.rank == owner:
                values = self.roots[index](*values)
        return values

    # -- what a step calls the model with --------------------------------------------------------------------

    def _inputs(self, arguments: dict[str, Any], parts: int) -> tuple[tuple[str, ...], dict[str, torch.Tensor], int]:
        """(names, tensors in the order in which stage 0 takes them, batch size), checked."""
        model = type(self.module).__name__
        if bad := [name for name, value in arguments.items() if not isinstance(value, torch.Tensor)]:
            raise ModelError(
                f"a pipeline passes tensors from stage to stage, and the step calls {model} with {bad[0]}="
                f"{arguments[bad[0]]!r}: give the forward a default for it and leave it out"
            )
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in arguments.values()}
        if len(sizes) != 1 or None in sizes:
            raise ModelError(f"all that {model} is called with must be of one batch size (got {sizes})")
        size = int(sizes.pop())  # type: ignore[arg-type]
        if size % parts:
            raise indivisible("a batch", size, parts)
        names = tuple(arguments)
        stage = self._cut(names)[0]
        return names, {name: arguments[name] for name in stage.inputs}, size

    def _cut(self, names: tuple[str, ...]) -> list[Stage]:
        key = (names, self.module.training)
        if key not in self._cuts:
            stages = cut(self.module, self.split_points, names)
            for ours, now in zip(self.stages, stages, strict=True):
                if not set(now.modules) <= set(ours.modules):
                    raise ModelError(
                        f"called with {', '.join(names)}, {type(self.module).__name__} uses "
                        f"{', '.join(sorted(set(now.modules) - set(ours.modules)))} in another stage than without: "
                        "give its forward no such defaults"
                    )
            self._cuts[key] = stages
        return self._cuts[key]

    def _use(self, names: tuple[str, ...], tensors: dict[str, torch.Tensor], rows: int) -> list[tuple[Any, Any]]:
        """Set the graphs that run now; what goes in and out of each stage, as tensors on the meta device."""
        shapes = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors.values())
        key = (names, shapes, rows, self.module.training)
        ends: list[tuple[Any, Any]] = self._ends.get_or_make(key, lambda: self._find_ends(names, tensors, rows))
        for index, root in self.roots.items():
            last = index == len(self.stages) - 1
            root.use(self._cut(names)[index].graph, None if last else tuple(end.dtype for end in ends[index][1]))
        return ends

    def _find_ends(self, names: tuple[str, ...], tensors: dict[str, torch.Tensor], rows: int) -> list[tuple[Any, Any]]:
        stages = self._cut(names)
        values: Any = tuple(
            torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta") for tensor in tensors.values()
        )
        ends = []
        for index, stage in enumerate(stages):
            outline = fx.GraphModule(self._outlines[index], stage.graph)
            try:
                with torch.no_grad():
                    given = outline(*values)
            except Exception as error:
                raise ModelError(
                    f"the shapes of stage {index} of {type(self.module).__name__} can't be found without computing it "
                    f"({type(error).__name__}: {error}): a pipeline needs to know them beforehand"
                ) from error
            outgoing = given if isinstance(given, tuple) else (given,)
            if bad := [value for value in outgoing if not isinstance(value, torch.Tensor)]:
                raise ModelError(f"stage {index} of {type(self.module).__name__} gives {bad[0]!r}, which is no tensor")
            ends.append((_ends(values, index > 0), _ends(outgoing, True)))
            values = outgoing
        return ends


def _ends(values: Sequence[torch.Tensor], trained: bool) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach().clone().requires_grad_(trained and value.is_floating_point()) for value in values)


def _first_dimensions(batch: Any) -> set[int]:
    found: set[int] = set()

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            found.add(leaf.shape[0])
        return leaf

    map_tensors(batch, look)
    return found


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _outlines(module: nn.Module, stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """What each stage's graph refers to, copied to the meta device: for shapes, without memory."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    outlines: list[dict[str, Any]] = []
    for stage in stages:
        found: dict[str, Any] = {}
        for name in stage.modules:
            owner = module.get_submodule(name.rpartition(".")[0])
            used = getattr(owner, name.rpartition(".")[2])
            try:
                found[name] = memo[id(used)] if isinstance(used, torch.Tensor) else copy.deepcopy(used, memo)
            except Exception as error:
                raise ModelError(
                    f"{name!r} can't be copied to find its shapes ({type(error).__name__}: {error})"
                ) from error
        outlines.append(found)
    return outlines


def check_schedule_name(schedule: str) -> None:
    """Raise ConfigurationError for a schedule that isn't there."""
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"'schedule' must be one of {', '.join(map(repr, SCHEDULES))} (got {schedule!r})")


def check_schedule(schedule: str, stages: int, size: int, microbatches: int) -> None:
    """Raise ConfigurationError for numbers that don't fit each other, before anything starts."""
    if schedule == "interleaved_1f1b":
        if stages % size or stages == size:
            raise ConfigurationError(
                f"schedule 'interleaved_1f1b' needs several stages per process, the same number for each: {stages} "
                f"stages over {size} processes"
            )
    elif stages != size:
        raise ConfigurationError(
            f"schedule {schedule!r} needs one stage per process: {stages} stages (one more than 'split_points') and "
            f"{size} processes"
        )
    if schedule != "gpipe" and microbatches < stages:
        raise ConfigurationError(
            f"schedule {schedule!r} needs at least as many microbatches as stages: {microbatches} and {stages}"
        )
