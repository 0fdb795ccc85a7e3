"""Run the stages of a cut model as a pipeline over the ranks of one group, by ``torch.distributed.pipelining``.

The user's step stays as it is written for one process. It runs as far as ``self(...)`` to learn what it calls the
model with; then, where the last stage is, for each microbatch, with the pipeline's output as what ``self(...)`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.errors import ModelError
from torchhal_parallel._batch_loss import Branches, WholeBatch, detached
from torchhal_parallel._forward_capture import ForwardCapture, returns_once
from torchhal_parallel._microbatch_checks import MicrobatchChecks
from torchhal_parallel._microbatch_logging import merged_log
from torchhal_parallel._pipeline_errors import explained_in_pipeline
from torchhal_parallel._pipeline_schedule import ScheduleCache
from torchhal_parallel._pipeline_split import split_into_stages, stage_owns
from torchhal_parallel._scatter_gather import merge_training, rows_of
from torchhal_parallel._stage import StageRoot
from torchhal_parallel._stage_communication import forward_through_stages, send_from_last
from torchhal_parallel._stage_graphs import StageGraphs
from torchhal_parallel._step_inputs import check_same_size, split_arguments
from torchhal_parallel._tensor_parallel_check import PartialOutputCheck
from torchhal_parallel._warn_once import WarnOnce


class Pipeline:
    """The ranks of ``group`` as stages of one model; rank r has the stages r, r + size, ...

    Args:
        module: the user's model, complete, on every rank.
        split_points: modules at which a new stage begins.
        group: the process group.
        strategy: whose device and generators are used.
        trainer: to whose results the steps log; None without one.
        schedule: one of ``"gpipe"``, ``"1f1b"`` and ``"interleaved_1f1b"``.
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
        warn = WarnOnce(strategy)
        self._forward_capture = ForwardCapture(module, strategy)
        self._graphs = StageGraphs(
            module,
            self.split_points,
            self.stages,
            self.roots,
            device=strategy.root_device,
            trainer=trainer,
            warn=warn,
        )
        self._schedules = ScheduleCache(
            schedule,
            self.roots,
            group=group,
            device=strategy.root_device,
            microbatches=microbatches,
        )
        self._run_forward = partial(forward_through_stages, roots=self.roots, group=group, device=strategy.root_device)
        self._checks = MicrobatchChecks(
            module,
            strategy=strategy,
            trainer=trainer,
            group=group,
            schedule=schedule,
            microbatches=microbatches,
            is_last=self.is_last,
            forward_capture=self._forward_capture,
            graphs=self._graphs,
            run_forward=self._run_forward,
            warn=warn,
        )

    def owns(self, name: str) -> bool:
        """Return whether this rank's value of a state entry counts: its stage changes it, or the step does."""
        users = (index for index, stage in enumerate(self.stages) if stage_owns(stage, name))
        return next(users, len(self.stages) - 1) in self.mine

    def watch(self, layers: PartialOutputCheck) -> None:
        """Let ``layers`` check what this rank's stages give when they first compute."""
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
        """Run forward and backward of one batch: gradients of its mean loss are added to the stage's parameters.

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
        model = type(self.module).__name__
        arguments = self._forward_capture(step, batch, rest)
        tensors, constants, size = split_arguments(arguments, self.microbatches, model)
        whole = self.schedule == "gpipe"
        if not whole:
            check_same_size(batch, size, model)
        rows = size // self.microbatches
        forward = self._graphs.select(tensors, constants, rows)
        schedule = self._schedules.schedule_for(forward)
        inputs = tuple(tensors.values()) if 0 in self.mine else ()
        guard = self.strategy.guard("a training step of the pipeline")
        checks = self._checks
        checks.begin_batch()
        if not self.is_last:
            with guard:
                schedule.step(*inputs)
            checks.agree(forward)
            checks.check_samples(tensors, constants, rows)
            return None
        device = self.strategy.root_device
        target = torch.arange(size, device="cpu")
        train = self._train_on_batch if whole else self._train_on_microbatches

        refusal: ModelError | None = None

        def run(loss: Callable[[Any, int], torch.Tensor]) -> None:
            def loss_of_microbatch(values: Any, positions: torch.Tensor) -> torch.Tensor:
                nonlocal refusal
                try:
                    if refusal is None:
                        return loss(forward.output(values), int(positions[0]))
                except ModelError as error:
                    if not checks.is_due:
                        raise
                    refusal = error  # which all ranks raise when they have done their microbatches of this batch
                return sum((value.sum() * 0 for value in values if value.requires_grad), torch.zeros((), device=device))

            self._schedules.train(schedule, inputs, target, loss_of_microbatch)
            if refusal is not None:
                raise refusal

        try:
            with guard:
                result, unlike, not_compared = train(step, batch, rest, loss_of, size, run, accumulate_grad_batches)
        except ModelError as error:
            if error is refusal:
                checks.agree(forward, str(error))
            raise
        checks.agree(forward, unlike, not_compared)
        checks.check_samples(tensors, constants, rows)
        return result

    def _train_on_batch(
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
            with (
                self._forward_capture.overridden(returns_once(self.module, output)),
                explained_in_pipeline(type(self.module).__name__),
            ):
                result = step(batch, *rest)
            found: torch.Tensor = loss_of(result)
            result = detached(result)
            return found / accumulate_grad_batches

        sizes = [size // self.microbatches] * self.microbatches
        whole = WholeBatch(loss, sizes, self.strategy.root_device)
        run(lambda output, start: whole(output))
        return result, None, None

    def _train_on_microbatches(
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
        compared = self._checks.is_due
        last_output: dict[int, Any] = {}
        unlike = not_compared = None
        taken: list[list[bool]] = []
        with merged_log(self.trainer, sizes, self.strategy.root_device) as start_microbatch:

            def compare_with_last(index: int, output: Any) -> None:
                """Two neighbours at a time: the outputs of a whole batch are what the schedule has no memory for."""
                nonlocal unlike, not_compared
                output = detached(output)
                if index - 1 in last_output and unlike is None and not_compared is None:
                    given = rows_of(batch, size, (index - 1) * rows, (index + 1) * rows)
                    both = [last_output[index - 1], output]
                    unlike, not_compared = self._checks.compare_losses(
                        step, given, rest, loss_of, both, losses[index - 1 : index + 1], rows
                    )
                last_output.clear()
                last_output[index] = output

            def loss(output: Any, start: int) -> torch.Tensor:
                index = start // rows
                start_microbatch(index)
                branches = Branches()
                with (
                    self._forward_capture.overridden(returns_once(self.module, output)),
                    explained_in_pipeline(type(self.module).__name__),
                    branches if compared else nullcontext(),
                ):
                    result = step(rows_of(batch, size, start, start + rows), *rest)
                taken.append(branches.taken)
                found: torch.Tensor = loss_of(result)
                results[index], losses[index] = detached(result), found.detach()
                if compared:
                    compare_with_last(index, output)
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

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Run the forward of a whole batch, and return ``step``'s result on the last stage's rank, else None."""
        arguments = self._forward_capture(step, batch, rest)
        tensors, constants, size = split_arguments(arguments, 1, type(self.module).__name__)
        forward = self._graphs.select(tensors, constants, size)
        values: Any = tuple(tensors.values())
        with self.strategy.guard("a forward of the pipeline"):
            values = self._run_forward(values, forward.boundaries)
        if not self.is_last:
            return None
        with self._forward_capture.overridden(returns_once(self.module, forward.output(values))):
            return step(batch, *rest)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's forward gives for a whole batch, without gradients, on every rank of the pipeline.

        All of them call it alike, as often as they like: for the next token, say, of what it gave before.
        """
        tensors, constants, size = split_arguments(
            self._forward_capture.named(args, kwargs), 1, type(self.module).__name__
        )
        with torch.no_grad():
            forward = self._graphs.select(tensors, constants, size)
            with self.strategy.guard("a forward of the pipeline"):
                values = self._run_forward(tuple(tensors.values()), forward.boundaries)
                values = send_from_last(
                    values, forward.boundaries, self.last_rank, group=self.group, device=self.strategy.root_device
                )
            return forward.output(values)
