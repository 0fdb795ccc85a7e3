"""Strategies that differ from sound ones in one mistake each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from sound_components import FlatAverage, SameDDP, SameSingle
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.capabilities import LOSS_SCALING


@caught_by("STR-45")
class PackedMetricsStrategy(SameDDP):
    """Reduces a dictionary of metrics as one tensor of its values, in each rank's own order of the keys."""

    # Contract, reduce: "a dense tensor of any dtype and strides, a number, or a nest of them with the same structure on
    # every rank; the keys of a mapping may come in any order."
    # Where ranks have logged in another order the loss of one is averaged with the accuracy of the other, without an
    # error: early stopping and the choice of the best checkpoint follow numbers that mean nothing.

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        if type(value) is not dict or not value or not all(map(_is_metric, value.values())):
            return super().reduce(value, op, group=group)
        if len({metric.dtype for metric in value.values()}) > 1:
            return super().reduce(value, op, group=group)
        packed = torch.stack([metric.detach().to(self.root_device) for metric in value.values()])
        reduced = super().reduce(packed, op, group=group)
        return {key: each.clone() for key, each in zip(value, reduced, strict=True)}


def _is_metric(value: Any) -> bool:
    return type(value) is torch.Tensor and value.dim() == 0 and value.is_floating_point()


@caught_by("STR-96")
class PerNodeAverageStrategy(FlatAverage):
    """Divides the sum of all ranks' gradients by the number of this node's processes."""

    # Contract, backward: "Accumulate the gradients of `loss`, averaged over the ranks unless under `no_backward_sync`."
    # On one node it is right. On n nodes gradients are n times too large, as if the learning rate were: a recipe that
    # was tuned on one node diverges on eight.

    def average_gradients(self) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:  # another rank may have used it: all send the same parameters
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self.guard("averaging of the gradients"):
            dist.all_reduce(flat)
        flat /= len(self.devices)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@caught_by("STR-85")
class CountingEvaluationStrategy(SameDDP):
    """Counts the evaluated batches of all ranks after each batch of an evaluation."""

    # Contract, on_evaluation_batch_end: "Called after the hooks `on_validation_batch_end`, `on_test_batch_end` or
    # `on_predict_batch_end`, on the ranks that have such a batch; it must not communicate."
    # Where one rank has a batch more than another its message meets a later one of the other ranks: the evaluation
    # hangs until the timeout, or a metric is added to the count.

    evaluated = 0

    def on_evaluation_batch_end(
        self, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        super().on_evaluation_batch_end(stage, outputs, batch, batch_idx, dataloader_idx)
        count = torch.ones(1, device=self.root_device)
        if self.world_size > 1:
            with self.guard("counting of the evaluated batches"):
                dist.all_reduce(count)
        self.evaluated += int(count.item())


@caught_by("STR-22")
class SharedResidualStrategy(FlatAverage):
    """Sends rounded gradients and saves what the rounding left on rank 0 for all ranks."""

    # Contract, state_dict: "Called on every rank; rank 0's is saved. What differs between ranks belongs into
    # `rank_state_dict`."
    # A resumed run gives every rank the residual of rank 0: that counts world_size times and the others' are lost, so
    # the run goes on with other weights than one that was never interrupted.

    features = FlatAverage.features | {"lossy"}
    lacks = frozenset({LOSS_SCALING})  # a residual belongs to one scale
    tolerances = {"weights": 2e-2, "losses": 5e-2, "gradient_norm": 2e-2}

    residual: torch.Tensor | None = None

    def setup_model(self, *, training: bool = True) -> None:
        super().setup_model(training=training)
        self.residual = None

    def average_gradients(self) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:  # another rank may have used it: all send the same parameters
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained]
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        if self.residual is not None and self.residual.numel() == whole.numel():
            whole = whole + self.residual
        flat = whole.to(torch.bfloat16).to(whole.dtype)
        self.residual = whole - flat
        with self.guard("averaging of the gradients"):
            dist.all_reduce(flat)
        flat /= self.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.residual is None else {**state, "residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        residual = state.get("residual")
        self.residual = None if residual is None else residual.to(self.root_device, copy=True)


@caught_by("STR-83")
class LonelyRemovalStrategy(SameDDP):
    """Removes a checkpoint on rank 0 without telling the other ranks how that went."""

    # Contract, remove_checkpoint: "CheckpointError: on every rank, when it was not removed on one of them." (and
    # "Called on every rank; returns, or raises, on all of them.")
    # When the removal fails rank 0 raises and leaves the loop, and the others go on to the next step, where they wait
    # for it; a program that handles the error trains on with ranks at different places.

    def remove_checkpoint(self, path: str) -> None:
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            self.checkpoint_io.remove_checkpoint(path)


@caught_by("STR-22")
class NewRatesStrategy(SameSingle):
    """Keeps the learning rates of the new optimizer when it loads a saved one's state."""

    # Contract, load_optimizer_state: "Continue from the saved state of an optimizer."
    # Whatever a scheduler or a callback had made of the learning rate is lost when a run continues: it goes on with the
    # rate of its first step, often ten times too large, and the schedulers multiply that from then on.

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]  # as the user may have chosen others
        super().load_optimizer_state(optimizer, state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
