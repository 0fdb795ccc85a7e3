"""Defective strategies: each differs from one of core's, or from FlatAverage, in one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from sound_components import FlatAverage
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zoo import caught_by

from torchhal.distributed import collectives
from torchhal.errors import CheckpointMismatchError
from torchhal.pytree import map_tensors
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal.strategies._module_structure import unshare_buffer_memory


@caught_by("STR-78", says="persistent=False")
class StateDictSyncStrategy(FlatAverage):
    """Sends rank 0's state dict to the others, in which buffers that aren't persistent are missing."""

    # "afterwards all ranks have the parameters and buffers of rank 0, those that no state dict has, too."
    # A random projection or a table of noise in a buffer with persistent=False is another one on each rank: the ranks
    # train, and average the gradients of, different models.

    def sync_module(self, module: nn.Module) -> None:
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                unshare_buffer_memory(module)
                state = module.state_dict().values()
                collectives.broadcast_tensors([value for value in state if isinstance(value, torch.Tensor)])


@caught_by("STR-14")
class HalfWidthAverageStrategy(FlatAverage):
    """Averages the gradients in float16 to send half the bytes, and doesn't say that it is lossy."""

    # "Accumulate the gradients of `loss`, averaged over the ranks" / "`"lossy"` is no task: the steps differ from those
    # of one process by up to `tolerances`, as gradients are compressed, or averaged in part."
    # Gradients below 3e-8 become 0 and those above 65504 infinite, in a 32-true run whose user has asked for float32:
    # small layers stop learning, and nobody knows that the strategy is the reason.

    def average_gradients(self) -> None:
        assert self.module is not None
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / self.world_size
        half = flat.to(torch.float16)
        with self.guard("averaging of the gradients"):
            dist.all_reduce(half)
        parts = half.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@caught_by("STR-93")
class RankZeroSavesStrategy(DDPStrategy):
    """Saves on rank 0 and meets the others in a barrier, to which rank 0 doesn't come when its save fails."""

    # "Called on every rank; returns, or raises, on all of them." / "CheckpointError: on every rank, when the checkpoint
    # was not written on one of them, or the paths differ."
    # When the disk is full, rank 0 raises, and may be handling that, while the others wait for it in the barrier: the
    # job hangs until the timeout, and dies there instead of going on without that checkpoint.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if "sharded" in self.checkpoint_io.features:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.barrier("save of a checkpoint")


@caught_by("STR-94", says="HANG")
class WrappedEvaluationStrategy(DDPStrategy):
    """Runs the steps without training through the DDP wrapper, too, which sends the buffers before each forward."""

    # "`evaluation_communicates`: True if the forward of a step without training communicates [...] Ranks may have
    # different numbers of batches" (it is False here)
    # With a batch norm in the model and validation data that doesn't divide by the number of ranks, one rank waits for
    # the others' buffers in a batch that they don't have: validation hangs, or mixes them up with the next collective.

    def module_step(self, name: str) -> Callable[..., Any]:
        if name == "training_step" or not isinstance(self.model, DistributedDataParallel):
            return super().module_step(name)
        return self.through_wrapper(getattr(self.module, name))


@caught_by("STR-71")
class OwnPartGradientsStrategy(DDPStrategy):
    """Gives a gathered tensor a graph in this rank's own part only."""

    # "`sync_grads`: let backward add up the gradients that the losses of all ranks have for this rank's tensor."
    # A contrastive loss over the embeddings of all ranks trains without the gradients by which the other ranks' losses
    # push this rank's embeddings: no error, a worse model, the more so the more ranks there are.

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        gathered = super().all_gather(tensor, group=group)
        if not sync_grads:
            return gathered
        parts = list(gathered.unbind())
        parts[dist.get_rank(group)] = tensor.to(self.root_device)
        return torch.stack(parts)


@caught_by("STR-22")
class AssignedWeightsStrategy(SingleDeviceStrategy):
    """Puts the loaded tensors in the place of the module's parameters, to save a copy."""

    # "The parameters stay the objects that the optimizers have, and share no memory with `state`."
    # A resumed run computes with the new parameters and steps the old ones: the loss stays where the checkpoint left
    # it, without an error, and every later checkpoint holds the weights that were loaded.

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        assert self.module is not None

        def placed(leaf: Any) -> Any:
            return leaf.to(self.root_device) if isinstance(leaf, torch.Tensor) else leaf

        try:
            return self.module.load_state_dict(map_tensors(state, placed), strict=strict, assign=True)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {error}"
            ) from error


@caught_by("STR-91")
class LocalShareStrategy(DDPStrategy):
    """Gives the sampler the rank on this node in place of the rank in the job."""

    # "`rank` counts the shares of all nodes, not those of this node."
    # On two nodes of four devices each, both nodes train on the shares 0 to 3: every epoch goes twice through one half
    # of the data and leaves the other half out. On one node all is well.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {"num_replicas": self.world_size, "rank": self.local_rank}
