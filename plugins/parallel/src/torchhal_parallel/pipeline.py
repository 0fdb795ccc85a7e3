"""Run the stages of a cut model as a pipeline over the ranks of one group, by ``torch.distributed.pipelining``.

The user's step stays as it is written for one process. It runs as far as ``self(...)`` to learn what it calls the
model with; then, where the last stage is, for each microbatch, with the pipeline's output as what ``self(...)`` gives.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from torchhal import rng
from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.pytree import map_tensors
from torchhal_parallel._attribute_reads import PLAIN
from torchhal_parallel._batch_loss import (
    Branches,
    WholeBatch,
    detached,
    is_narrow,
    leaf_of,
    unlike_mean,
    without_traces,
)
from torchhal_parallel._capture import Capture, around
from torchhal_parallel._forward_capture import ForwardCapture, returns_once, without_logging
from torchhal_parallel._microbatch_logging import merged_log
from torchhal_parallel._microbatches import indivisible
from torchhal_parallel._pipeline_split import split_into_stages, stage_owns, stages_of
from torchhal_parallel._remote_tensor import INSTEAD, RemoteWriteError
from torchhal_parallel._sample_independence import (
    BATCH_NORM,
    CHANGED_BUFFER,
    batch_norm_in_training,
    buffer_versions,
    changed_more_than_once,
    dependence,
    has_own_statistics,
)
from torchhal_parallel._scatter_gather import merge, merge_training, rows_of
from torchhal_parallel._shown import shown
from torchhal_parallel._stage import Followed, StageRoot, ends_of
from torchhal_parallel._tensor_parallel_check import PartialOutputCheck

SCHEDULES: Final[Mapping[str, Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}

KEPT_SCHEDULES = 8
"""Shapes of batches whose schedules are kept, as each holds the memory of what it receives."""

KEPT_FORWARDS = 256
"""Shapes of batches for which what the stages compute is kept."""

FOLLOWED_IN_A_ROW = 10
"""After so many batches in a row for each of which the forward was followed anew, that is said."""


class _Recent(dict[Any, Any]):
    """At most ``limit`` things, made when they are first asked for, or not right any more.

    The one that was not asked for longest goes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def get_or_make(
        self, key: Any, make: Callable[[], Any], *, is_right: Callable[[Any], bool] = lambda made: True
    ) -> Any:
        made = self.pop(key, None)
        if made is None or not is_right(made):
            made = make()
            while len(self) >= self.limit:
                del self[next(iter(self))]
        self[key] = made
        return made


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
        self.stages = split_into_stages(module, split_points)
        self.mine = list(range(self.rank, len(self.stages), self.size))
        self.is_last = len(self.stages) - 1 in self.mine
        self.last_rank = (len(self.stages) - 1) % self.size
        """Pipeline rank of the stage that makes the loss, and does what the step does after ``self(...)``."""
        last = len(self.stages) - 1
        self.roots = {index: StageRoot(module, self.stages[index], is_last=index == last) for index in self.mine}
        self._cut_at = {name: module.get_submodule(name) for name in (*around(split_points), *split_points)}
        self._rehearsal = ForwardCapture(module, strategy)
        self._capture = Capture(module, around(split_points), strategy.root_device, trainer)
        self._followed = _Recent(KEPT_FORWARDS)
        self._schedules = _Recent(KEPT_SCHEDULES)
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        self._batches = 0
        self._followed_in_a_row = 0
        self._said: set[str] = set()

    def owns(self, name: str) -> bool:
        """Whether this rank's value of an entry of the model's state counts: its stage changes it, or the step does."""
        users = (index for index, stage in enumerate(self.stages) if stage_owns(stage, name))
        return next(users, len(self.stages) - 1) in self.mine

    def watch(self, layers: PartialOutputCheck) -> None:
        """Let ``layers`` look at what this rank's stages give when they first compute."""
        for index, root in self.roots.items():
            what = f"what stage {index} of the pipeline gives"
            root.compute = layers.watched(root.compute, what, root.graphs)

    def relink(self) -> None:
        """Give the model the parameters that a stage reads itself, after something has replaced them in the stage."""
        for index, root in self.roots.items():
            for name in self.stages[index].modules:
                owner, attribute = self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                if attribute in owner._parameters:
                    holder = root.graph_module.get_submodule(name.rpartition(".")[0])
                    owner._parameters[attribute] = holder._parameters[attribute]

    def explained(self, error: BaseException) -> ModelError | None:
        """What an error of torch's means in a pipeline; None if it may be of elsewhere."""
        said, model = str(error), type(self.module).__name__
        if "appears to not have been used in the graph" in said:
            return ModelError(
                f"{error} A step of {model} differentiates by torch.autograd.grad: on the rank of a pipeline that "
                "makes the loss it leads to parameters of its stages at most, as earlier layers are on other ranks. A "
                "penalty on gradients needs a strategy under which each rank has the model, such as 'ddp' or 'zero1'"
            )
        if isinstance(error, RemoteWriteError):
            return ModelError(said)
        if "assign a gradient with device type 'meta'" in said or "set_data(tensor)" in said:
            return ModelError(
                f"{error}. In a pipeline that is what becomes of a number made of all parameters or gradients, which "
                f"are in several stages: {INSTEAD}"
            )
        return None

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if (found := self.explained(error)) is None:
                raise
            raise found from error

    # -- training --------------------------------------------------------------------------------------------

    def train(
        self,
        step: Callable[..., Any],
        batch: Any,
        rest: tuple[Any, ...],
        loss_of: Callable[[Any], Any],
        *,
        accumulate_grad_batches: int = 1,
    ) -> Any:
        """Forward and backward of one batch: the gradients of its mean loss are added to the stage's parameters.

        Args:
            step: the module's own.
            batch: its first argument.
            rest: the others.
            loss_of: the loss in what the step returns.
            accumulate_grad_batches: what the loss is divided by, before the backward as hooks see its gradients.

        Returns:
            What ``step`` has returned for the batch, or for its microbatches as for the batch, and without gradients,
            on the rank of the last stage; None elsewhere.
        """
        tensors, constants, size = self._inputs(self._rehearsal(step, batch, rest), self.microbatches)
        whole = self.schedule == "gpipe"
        if not whole and size not in (found := _first_dimensions(batch)):
            raise ModelError(
                f"the step calls {type(self.module).__name__} with {size} samples, and the tensors of its batch have "
                f"{', '.join(map(str, sorted(found))) or 'no dimensions'}: a pipeline divides both into the same "
                "microbatches. Make the batch in the data set or its collate_fn what the model is to be called with, "
                "or set schedule='gpipe', under which the step runs once for the batch"
            )
        followed, schedule = self._schedule(tensors, constants, size)
        inputs = tuple(tensors.values()) if 0 in self.mine else ()
        guard = self.strategy.guard("a training step of the pipeline")
        self._batches += 1
        versions = buffer_versions(self.module) if self._is_compared() else {}
        if not self.is_last:
            with guard:
                schedule.step(*inputs)
            self._agree(followed)
            self._check_samples(tensors, constants, size // self.microbatches, versions)
            return None
        device = self.strategy.root_device
        target = torch.arange(size, device="cpu")
        train = self._train_on_whole if whole else self._train_on_parts

        refusal: ModelError | None = None

        def run(loss: Callable[[Any, int], torch.Tensor]) -> None:
            def loss_of_part(values: Any, positions: torch.Tensor) -> torch.Tensor:
                nonlocal refusal
                try:
                    if refusal is None:
                        return loss(followed.output(values), int(positions[0]))
                except ModelError as error:
                    if not self._is_compared():
                        raise
                    refusal = error  # which all ranks raise when they have done their parts of this batch
                return sum((value.sum() * 0 for value in values if value.requires_grad), torch.zeros((), device=device))

            self._loss = loss_of_part
            schedule.step(*inputs, target=target, losses=[])
            if refusal is not None:
                raise refusal

        try:
            with guard:
                result, unlike, not_compared = train(step, batch, rest, loss_of, size, run, accumulate_grad_batches)
        except ModelError as error:
            if error is refusal:
                self._agree(followed, str(error))
            raise
        finally:
            self._loss = None  # it holds the batch
        self._agree(followed, unlike, not_compared)
        self._check_samples(tensors, constants, size // self.microbatches, versions)
        return result

    def _train_on_whole(
        self,
        step: Any,
        batch: Any,
        rest: tuple[Any, ...],
        loss_of: Any,
        size: int,
        run: Callable[[Any], None],
        accumulate_grad_batches: int,
    ) -> tuple[Any, str | None, str | None]:
        result: Any = None

        def loss(output: Any) -> torch.Tensor:
            nonlocal result
            with self._rehearsal.answering(returns_once(self.module, output)), self._explaining():
                result = step(batch, *rest)
            found: torch.Tensor = loss_of(result)
            result = detached(result)
            return found / accumulate_grad_batches

        sizes = [size // self.microbatches] * self.microbatches
        whole = WholeBatch(loss, sizes, self.strategy.root_device)
        run(lambda output, start: whole(output))
        return result, None, None

    def _train_on_parts(
        self,
        step: Any,
        batch: Any,
        rest: tuple[Any, ...],
        loss_of: Any,
        size: int,
        run: Callable[[Any], None],
        accumulate_grad_batches: int,
    ) -> tuple[Any, str | None, str | None]:
        rows = size // self.microbatches
        sizes = [rows] * self.microbatches
        results: list[Any] = [None] * self.microbatches
        losses: list[Any] = [None] * self.microbatches
        compared = self._is_compared()
        last_output: dict[int, Any] = {}
        unlike = not_compared = None
        taken: list[list[bool]] = []
        with merged_log(self.trainer, sizes, self.strategy.root_device) as start_part:

            def compare_with_last(part: int, output: Any) -> None:
                """Two neighbours at a time: the outputs of a whole batch are what the schedule has no memory for."""
                nonlocal unlike, not_compared
                output = detached(output)
                if part - 1 in last_output and unlike is None and not_compared is None:
                    given = rows_of(batch, size, (part - 1) * rows, (part + 1) * rows)
                    both = [last_output[part - 1], output]
                    unlike, not_compared = self._compare(
                        step, given, rest, loss_of, both, losses[part - 1 : part + 1], rows
                    )
                last_output.clear()
                last_output[part] = output

            def loss(output: Any, start: int) -> torch.Tensor:
                part = start // rows
                start_part(part)
                branches = Branches()
                with (
                    self._rehearsal.answering(returns_once(self.module, output)),
                    self._explaining(),
                    branches if compared else nullcontext(),
                ):
                    result = step(rows_of(batch, size, start, start + rows), *rest)
                taken.append(branches.taken)
                found: torch.Tensor = loss_of(result)
                results[part], losses[part] = detached(result), found.detach()
                if compared:
                    compare_with_last(part, output)
                return found / (self.microbatches * accumulate_grad_batches)

            run(loss)
        if compared and any(each != taken[0] for each in taken):
            unlike = (
                f"the training_step of {type(self.module).__name__} branches on the value of a loss or output (if "
                "loss > 1, say), and goes one way with some microbatches and another with others, where that of a "
                "whole batch goes one way: set HybridStrategy(pipeline=..., schedule='gpipe'), under which the "
                "step runs once for the batch, or compute both ways and choose by torch.where"
            )
        with torch.no_grad():
            return merge_training(results, sizes, self.strategy.root_device), unlike, not_compared

    def _check_samples(
        self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int, versions: dict[str, Any]
    ) -> None:
        """Raise ModelError on every rank if the forward mixes samples; say once what else microbatches make another.

        The forwards of two microbatches, and of both together, are compared in evaluation, where nothing is dropped.

        Args:
            rows: samples of a microbatch.
            versions: the buffers, with theirs, before this batch.
        """
        if not self._is_compared() or self.microbatches == 1:
            return
        model = type(self.module).__name__
        notes: dict[str, str] = {}
        if (name := batch_norm_in_training(self.module)) is not None:
            notes["batch norm"] = BATCH_NORM.format(model=model, name=name, rows=rows)
        if name := changed_more_than_once(versions, buffer_versions(self.module), self.microbatches):
            notes["buffers"] = CHANGED_BUFFER.format(model=model, name=name, microbatches=self.microbatches)
        found: float | None = None
        generators, in_a_row = self._rehearsal.generators(), self._followed_in_a_row
        try:
            found = self._dependence(tensors, constants, rows)
            drew = bool(self._rehearsal.drawn_from(generators))
        finally:
            rng.restore(generators, self.strategy.accelerator, self.strategy.root_device)
            self._followed_in_a_row = in_a_row
        with self.strategy.guard("the comparison of forwards"):
            ranks = collectives.all_gather_object((found, drew, notes))
        for topic, note in [item for _, _, each in ranks for item in each.items()]:
            self._say(topic, note)
        if any(drew for _, drew, _ in ranks):
            return
        if differences := [each for each, _, _ in ranks if each is not None]:
            raise ModelError(
                f"the forward of {model} mixes samples: for two microbatches together it gives something else than for "
                f"each alone ({100 * max(differences):.2g} % of its norm), and a pipeline runs it for each. Let it "
                "treat each sample by itself, as a layer norm does, or use a strategy under which each rank has the "
                "model, such as 'zero3'"
            )

    def _dependence(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> float | None:
        """What :func:`dependence` finds, on the rank of the last stage; None elsewhere, and if it can't be tried."""
        if has_own_statistics(self.module):
            return None
        parts = [(0, rows), (rows, 2 * rows), (0, 2 * rows)]
        given = [{name: tensor[start:stop] for name, tensor in tensors.items()} for start, stop in parts]
        kept = (self.trainer, self.strategy, self.strategy.accelerator)
        with without_traces(self.module, kept), torch.no_grad():
            self.module.eval()
            try:
                for each, (start, stop) in zip(given, parts, strict=True):
                    self._follow(each, constants, stop - start)
            except Exception:  # on every rank alike; a model need not be able to do this
                return None
            outputs: list[Any] = []
            with self.strategy.guard("a forward of the pipeline"):
                for each, (start, stop) in zip(given, parts, strict=True):
                    ends = self._follow(each, constants, stop - start).ends
                    outputs.append(self._forward(tuple(each.values()), ends))
        if not self.is_last:
            return None
        return dependence(outputs[:2], outputs[2], rows=rows, narrow=is_narrow(self.strategy.root_device, outputs))

    def _is_compared(self) -> bool:
        """Whether this is a batch in which the ranks, and the losses, are compared: the first, second, fourth, ...

        In one batch all samples may be of one length.
        """
        return self._batches & (self._batches - 1) == 0

    def _agree(self, followed: Followed, refusal: str | None = None, not_compared: str | None = None) -> None:
        """Raise ModelError on every rank if a last stage brings a ``refusal``, or if the ranks of a pipeline have
        followed the forward with other numbers.

        Say once on rank 0 if the losses could not be compared.
        """
        if not self._is_compared():
            return
        pipeline = dist.get_process_group_ranks(self.group)[0]
        with self.strategy.guard("the comparison of losses"):
            found = collectives.all_gather_object((refusal, not_compared, pipeline, followed.reads.numbers()))
        if refusals := [each for each, _, _, _ in found if each is not None]:
            raise ModelError(refusals[0])
        if notes := [each for _, each, _, _ in found if each is not None]:
            self._say("comparison", notes[0])
        seen: dict[int, dict[str, str]] = {}
        for _, _, pipeline, numbers in found:
            first = seen.setdefault(pipeline, numbers)
            for name in first.keys() & numbers.keys():
                if first[name] != numbers[name]:
                    raise ModelError(
                        f"the forward of {type(self.module).__name__} reads {name!r}, which is {first[name]} on one "
                        f"rank of the pipeline and {numbers[name]} on another, where each computes its stages of one "
                        "forward: change it in a hook such as on_train_batch_start, which runs on all ranks, not in a "
                        "step after self(...), which runs on that of the last stage only"
                    )

    def _say(self, topic: str, message: str) -> None:
        """A warning on rank 0, once for each ``topic``."""
        if topic not in self._said and self.strategy.is_global_zero:
            warnings.warn(message, stacklevel=2)
        self._said.add(topic)

    def _compare(
        self,
        step: Any,
        batch: Any,
        rest: tuple[Any, ...],
        loss_of: Any,
        outputs: Sequence[Any],
        losses: Sequence[torch.Tensor],
        rows: int,
    ) -> tuple[str | None, str | None]:
        """(what is wrong if ``losses`` have another mean than the loss of their microbatches together is, None).

        Or (None, why they were not compared): the loss draws random numbers, or can't be computed for both together.

        Args:
            batch: the samples of these microbatches, of ``rows`` each.
            outputs: what the model gave for each.
        """
        device = self.strategy.root_device
        kept = (self.trainer, self.strategy, self.strategy.accelerator)
        generators = self._rehearsal.generators()
        try:
            output = map_tensors(merge(outputs, [rows] * len(outputs), device), leaf_of)
            answer = self._rehearsal.answering(returns_once(self.module, output))
            with without_traces(self.module, kept), without_logging(self.module), answer:
                whole = loss_of(step(batch, *rest)).detach()
            drawn = self._rehearsal.drawn_from(generators)
            reason = f"it draws random numbers ({drawn[0]})" if drawn else None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            rng.restore(generators, self.strategy.accelerator, device)
        model = type(self.module).__name__
        if reason is not None:
            return None, (
                f"whether the loss of {model} is a mean over samples could not be tried ({reason}): under schedule="
                f"{self.schedule!r} a pipeline trains on the mean of the losses of its microbatches. If it is none, "
                "set schedule='gpipe', which computes the loss of the whole batch"
            )
        narrow = is_narrow(device, output)
        return unlike_mean(model, losses, whole, microbatches=self.microbatches, narrow=narrow), None

    def _loss_of_now(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(output, target)

    def _schedule(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], size: int) -> tuple[Followed, Any]:
        followed = self._follow(tensors, constants, size // self.microbatches)
        # the forward that a schedule was made for is kept with it, so that its id remains its own
        kept = self._schedules.get_or_make(id(followed), lambda: (followed, self._make_schedule(followed.ends)))
        return followed, kept[1]

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
        return SCHEDULES[self.schedule](given, self.microbatches, loss_fn=self._loss_of_now, scale_grads=False)

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """The forward alone, the batch in one piece: ``step``'s result on the rank of the last stage, else None."""
        tensors, constants, size = self._inputs(self._rehearsal(step, batch, rest), 1)
        followed = self._follow(tensors, constants, size)
        values: Any = tuple(tensors.values())
        with self.strategy.guard("a forward of the pipeline"):
            values = self._forward(values, followed.ends)
        if not self.is_last:
            return None
        with self._rehearsal.answering(returns_once(self.module, followed.output(values))):
            return step(batch, *rest)

    def _forward(self, values: Any, ends: Sequence[tuple[Any, Any]]) -> Any:
        """What this rank's last stage gives for ``values``, which enter the first stage."""
        device = self.strategy.root_device
        for index in range(len(self.stages)):
            owner = index % self.size
            if index and owner != (index - 1) % self.size:
                if self.rank == (index - 1) % self.size:
                    for value in values:
                        dist.send(value, group=self.group, group_dst=owner)
                elif self.rank == owner:
                    values = tuple(torch.empty(end.shape, dtype=end.dtype, device=device) for end in ends[index][0])
                    for value in values:
                        dist.recv(value, group=self.group, group_src=(index - 1) % self.size)
            if self.rank == owner:
                values = self.roots[index](*values)
        return values

    # -- what a step calls the model with --------------------------------------------------------------------

    def _inputs(self, arguments: dict[str, Any], parts: int) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
        """(tensors, other arguments, batch size), checked."""
        model = type(self.module).__name__
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in arguments.items() if name not in tensors}
        if bad := [name for name, value in others.items() if not isinstance(value, PLAIN)]:
            raise ModelError(
                f"a pipeline passes tensors from stage to stage, and the step calls {model} with {bad[0]}="
                f"{shown(others[bad[0]])}: give it tensors, numbers, strings, flags and None"
            )
        if asked := [name for name, tensor in tensors.items() if tensor.requires_grad]:
            raise ModelError(
                f"the step calls {model} with {asked[0]!r}, which requires a gradient, and a pipeline has none for "
                "what the model is called with: the layers are on several ranks. A gradient penalty, or another use of "
                "torch.autograd.grad with respect to inputs, needs a strategy under which each rank has the model, "
                "such as 'ddp' or 'zero3'; otherwise call self(x.detach())"
            )
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors.values()}
        if len(sizes) != 1 or None in sizes:
            raise ModelError(f"all tensors that {model} is called with must be of one batch size (got {sizes})")
        size = int(sizes.pop())  # type: ignore[arg-type]
        if size % parts:
            raise indivisible("a batch", size, parts)
        return tensors, others, size

    def _follow(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> Followed:
        """The forward for ``rows`` samples of such tensors, which this rank's stages compute from now on."""
        shapes = tuple((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items())
        given = tuple((name, type(value), value) for name, value in constants.items())
        key = (shapes, given, rows, self.module.training, torch.is_grad_enabled())
        changed: str | None = None

        def is_right(made: Followed) -> bool:
            nonlocal changed
            changed = made.reads.differing()
            return changed is None

        followed: Followed = self._followed.get_or_make(
            key, lambda: self._cut(tensors, constants, rows), is_right=is_right
        )
        self._followed_in_a_row = 0 if changed is None else self._followed_in_a_row + 1
        if self._followed_in_a_row == FOLLOWED_IN_A_ROW:
            self._say(
                "attributes",
                f"the forward of {type(self.module).__name__} reads {changed!r}, which is another in each batch: a "
                "pipeline follows it anew each time, which may take longer than the step. Make it a buffer, a tensor "
                "that is changed in place, or an argument of self(...) that is a tensor of one value per sample",
            )
        for index, root in self.roots.items():
            dtypes = tuple(end.dtype for end in followed.ends[index][1])
            root.use(followed.stages[index], followed.constants, dtypes)
            root.follow_buffers()
        return followed

    def _cut(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> Followed:
        model = type(self.module).__name__
        self._check_cuts()
        found = self._capture(tensors, rows, constants)
        if found.recomputes:
            self._say(
                "recomputation",
                f"the forward of {model} calls torch.utils.checkpoint, or another that keeps activations elsewhere, "
                "between its modules: a pipeline follows what is computed there, and keeps the activations. Use "
                "HybridStrategy(pipeline=..., activation_checkpointing=...), or do it inside of the layers",
            )
        stages = stages_of(found.graph, self.split_points, model, found.constants.keys())
        for index, (ours, now) in enumerate(zip(self.stages, stages, strict=True)):
            for name in now.modules:
                if not stage_owns(ours, name) and not self._is_without_state(name):
                    raise ModelError(
                        f"called with {', '.join((*tensors, *constants))}, {model} uses {name!r} in stage {index}, and "
                        "it was taken for a part of another stage: let its forward call its modules in the order in "
                        "which they are registered, with or without these arguments"
                    )
        results = [found.values[node] for node in found.results]
        ends = [
            (
                ends_of([found.values[node] for node in stage.inputs], index > 0),
                ends_of([found.values[node] for node in stage.outputs], True),
            )
            for index, stage in enumerate(stages)
        ]
        ends[-1] = ends[-1][0], ends_of([value if value.dim() else value[None] for value in results], True)
        scalars = frozenset(index for index, value in enumerate(results) if not value.dim())
        return Followed(stages, ends, found.returned, found.constants, found.reads, scalars)

    def _check_cuts(self) -> None:
        """Raise ModelError if another module stands where a stage begins, or around that."""
        now = dict(self.module.named_modules(remove_duplicate=False))
        for name, before in self._cut_at.items():
            if (found := now.get(name)) is before:
                continue
            model, what = type(self.module).__name__, f"a {type(before).__name__}"
            become = "is gone" if found is None else f"has become another object, of {type(found).__name__}"
            raise ModelError(
                f"{name!r} of {model} was {what} when the model was cut into the stages of a pipeline there, and "
                f"{become}: change modules before the fit, in configure_model say, let the forward of {model} choose "
                "between modules that it has from the start, cut elsewhere by HybridStrategy(split_points=[...]), or "
                "use a strategy under which each rank has the model, such as 'zero1'"
            )

    def _is_without_state(self, name: str) -> bool:
        try:
            used = self.module.get_submodule(name)
        except AttributeError:  # a parameter
            return False
        return next(used.parameters(), None) is None and next(used.buffers(), None) is None


def _first_dimensions(batch: Any) -> set[int]:
    found: set[int] = set()

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            found.add(leaf.shape[0])
        return leaf

    map_tensors(batch, look)
    return found


def check_schedule_name(schedule: str) -> None:
    """Raise ConfigurationError for a schedule that isn't there."""
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"'schedule' must be one of {', '.join(map(repr, SCHEDULES))} (got {schedule!r})")


def check_schedules_of_torch(schedule: str, alias: str) -> None:
    """Raise UnsupportedCombinationError on a torch whose schedule can't be told to leave gradients as they are."""
    if "scale_grads" not in inspect.signature(SCHEDULES[schedule]).parameters:
        raise UnsupportedCombinationError(
            f"strategy {alias!r} computes the loss of a batch itself, and {SCHEDULES[schedule].__name__} of torch "
            f"{torch.__version__} has no argument 'scale_grads', without which it may divide gradients by the number "
            "of microbatches: use a newer torch, or strategy='zero3'"
        )


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
