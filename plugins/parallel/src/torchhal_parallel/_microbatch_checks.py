"""Check in some batches that microbatches train a model as a whole batch would, and that all ranks compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal import rng
from torchhal.distributed import collectives
from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._batch_loss import is_narrow, leaf_of, unlike_mean, without_traces
from torchhal_parallel._forward_capture import ForwardCapture, returns_once, without_logging
from torchhal_parallel._sample_independence import (
    BATCH_NORM,
    CHANGED_BUFFER,
    batch_norm_in_training,
    buffer_versions,
    changed_more_than_once,
    dependence,
    has_own_statistics,
)
from torchhal_parallel._scatter_gather import merge
from torchhal_parallel._stage import StagedForward
from torchhal_parallel._stage_graphs import StageGraphs
from torchhal_parallel._warn_once import WarnOnce


class MicrobatchChecks:
    """The comparisons of microbatches with whole batches, made in the batches 1, 2, 4, 8, ...

    In one batch all samples may be of one length, so the first one is not enough. Every rank of the pipeline calls the
    methods in the same order, as they communicate.

    Args:
        module: the user's model.
        strategy: whose device and generators are used.
        trainer: to whose results the steps log; None without one.
        group: the process group of the pipeline.
        schedule: its name.
        microbatches: parts of a batch.
        is_last: this rank has the last stage.
        forward_capture: runs the user's step with an output in the place of ``self(...)``.
        graphs: of the stages.
        run_forward: runs a forward through all stages.
        warn: gives the warnings.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: Any,
        trainer: Any,
        group: Any,
        schedule: str,
        microbatches: int,
        is_last: bool,
        forward_capture: ForwardCapture,
        graphs: StageGraphs,
        run_forward: Callable[[Any, Sequence[tuple[Any, Any]]], Any],
        warn: WarnOnce,
    ) -> None:
        self._module = module
        self._strategy = strategy
        self._trainer = trainer
        self._group = group
        self._schedule = schedule
        self._microbatches = microbatches
        self._is_last = is_last
        self._forward_capture = forward_capture
        self._graphs = graphs
        self._run_forward = run_forward
        self._warn = warn
        self._batches = 0
        self._versions: dict[str, Any] = {}

    def begin_batch(self) -> None:
        """Count one batch more, and note the versions of the buffers where it is one to check."""
        self._batches += 1
        self._versions = buffer_versions(self._module) if self.is_due else {}

    @property
    def is_due(self) -> bool:
        """True for a batch in which the ranks, and the losses, are compared."""
        return self._batches & (self._batches - 1) == 0

    def check_samples(self, tensors: dict[str, torch.Tensor], constants: dict[str, Any], rows: int) -> None:
        """Raise ModelError on every rank if the forward mixes samples; warn once of what else microbatches change.

        The forwards of two microbatches, and of both together, are compared in evaluation, where nothing is dropped.

        Args:
            tensors: what the step calls the model with.
            constants: its other arguments.
            rows: samples of a microbatch.
        """
        versions, self._versions = self._versions, {}
        if not self.is_due or self._microbatches == 1:
            return
        model = type(self._module).__name__
        notes: dict[str, str] = {}
        if (name := batch_norm_in_training(self._module)) is not None:
            notes["batch norm"] = BATCH_NORM.format(model=model, name=name, rows=rows)
        if name := changed_more_than_once(versions, buffer_versions(self._module), self._microbatches):
            notes["buffers"] = CHANGED_BUFFER.format(model=model, name=name, microbatches=self._microbatches)
        found: float | None = None
        generators = self._forward_capture.generators()
        try:
            with self._graphs.uncounted():
                found = self._dependence(tensors, constants, rows)
            drew = bool(self._forward_capture.drawn_from(generators))
        finally:
            rng.restore(generators, self._strategy.accelerator, self._strategy.root_device)
        with self._strategy.guard("the comparison of forwards"):
            ranks = collectives.all_gather_object((found, drew, notes))
        for topic, note in [item for _, _, each in ranks for item in each.items()]:
            self._warn(topic, note)
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
        """Return the :func:`dependence` on the rank of the last stage; None elsewhere, and if it can't be computed."""
        if has_own_statistics(self._module):
            return None
        parts = [(0, rows), (rows, 2 * rows), (0, 2 * rows)]
        given = [{name: tensor[start:stop] for name, tensor in tensors.items()} for start, stop in parts]
        kept = (self._trainer, self._strategy, self._strategy.accelerator)
        with without_traces(self._module, kept), torch.no_grad():
            self._module.eval()
            try:
                for each, (start, stop) in zip(given, parts, strict=True):
                    self._graphs.select(each, constants, stop - start)
            except Exception:  # on every rank alike; a model need not be able to do this
                return None
            outputs: list[Any] = []
            with self._strategy.guard("a forward of the pipeline"):
                for each, (start, stop) in zip(given, parts, strict=True):
                    boundaries = self._graphs.select(each, constants, stop - start).boundaries
                    outputs.append(self._run_forward(tuple(each.values()), boundaries))
        if not self._is_last:
            return None
        return dependence(outputs[:2], outputs[2], rows=rows, narrow=is_narrow(self._strategy.root_device, outputs))

    def agree(self, forward: StagedForward, refusal: str | None = None, not_compared: str | None = None) -> None:
        """Raise ModelError on every rank if a last stage has a ``refusal``, or if the ranks' forwards differ.

        The recorded forwards of one pipeline's ranks differ where they have read different numbers from attributes. If
        the losses could not be compared, for the reason ``not_compared``, that is a warning.
        """
        if not self.is_due:
            return
        pipeline = dist.get_process_group_ranks(self._group)[0]
        with self._strategy.guard("the comparison of losses"):
            found = collectives.all_gather_object((refusal, not_compared, pipeline, forward.reads.numbers()))
        if refusals := [each for each, _, _, _ in found if each is not None]:
            raise ModelError(refusals[0])
        if notes := [each for _, each, _, _ in found if each is not None]:
            self._warn("comparison", notes[0])
        seen: dict[int, dict[str, str]] = {}
        for _, _, pipeline, numbers in found:
            first = seen.setdefault(pipeline, numbers)
            for name in first.keys() & numbers.keys():
                if first[name] != numbers[name]:
                    raise ModelError(
                        f"the forward of {type(self._module).__name__} reads {name!r}, which is {first[name]} on one "
                        f"rank of the pipeline and {numbers[name]} on another, where each computes its stages of one "
                        "forward: change it in a hook such as on_train_batch_start, which runs on all ranks, not in a "
                        "step after self(...), which runs on that of the last stage only"
                    )

    def compare_losses(
        self,
        step: Any,
        batch: Any,
        rest: tuple[Any, ...],
        loss_of: Any,
        outputs: Sequence[Any],
        losses: Sequence[torch.Tensor],
        rows: int,
    ) -> tuple[str | None, str | None]:
        """Compare the mean of ``losses`` with the loss of their microbatches together.

        Args:
            step: the module's own.
            batch: the samples of these microbatches, of ``rows`` each.
            rest: the other arguments of ``step``.
            loss_of: the loss in what ``step`` returns.
            outputs: what the model gave for each microbatch.
            losses: of each microbatch.
            rows: samples of a microbatch.

        Returns:
            (what is wrong, None) if the two differ, (None, why they were not compared) if the loss draws random numbers
            or can't be computed for both together, else (None, None).
        """
        device = self._strategy.root_device
        kept = (self._trainer, self._strategy, self._strategy.accelerator)
        generators = self._forward_capture.generators()
        try:
            output = map_tensors(merge(outputs, [rows] * len(outputs), device), leaf_of)
            override = self._forward_capture.overridden(returns_once(self._module, output))
            with without_traces(self._module, kept), without_logging(self._module), override:
                whole = loss_of(step(batch, *rest)).detach()
            drawn = self._forward_capture.drawn_from(generators)
            reason = f"it draws random numbers ({drawn[0]})" if drawn else None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            rng.restore(generators, self._strategy.accelerator, device)
        model = type(self._module).__name__
        if reason is not None:
            return None, (
                f"whether the loss of {model} is a mean over samples could not be tried ({reason}): under schedule="
                f"{self._schedule!r} a pipeline trains on the mean of the losses of its microbatches. If it is none, "
                "set schedule='gpipe', which computes the loss of the whole batch"
            )
        narrow = is_narrow(device, output)
        return unlike_mean(model, losses, whole, microbatches=self._microbatches, narrow=narrow), None
