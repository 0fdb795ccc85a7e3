"""Strategies that differ from sound ones in one mistake each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sound_components import FlatAverage, SameDDP, SameSingle
from torch import nn
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.distributed import collectives
from torchhal.precision import dense_gradient
from torchhal.strategies._module_structure import unshare_buffer_memory


@caught_by("STR-71")
class OwnSliceStrategy(SameDDP):
    """``all_gather(sync_grads=True)`` puts this rank's tensor into its place of the result, and detaches the others."""

    # Contract, all_gather: "sync_grads: let backward add up the gradients that the losses of all ranks have for this
    # rank's tensor."
    # A contrastive loss over the batches of all ranks is trained without the gradients that the other ranks' losses
    # have for this rank's embeddings: the loss falls, and the model isn't the one of a single process.

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        gathered = super().all_gather(tensor, group=group)
        if not sync_grads:
            return gathered
        parts = list(gathered.unbind(0))
        parts[dist.get_rank(group)] = tensor.to(self.root_device)
        return torch.stack(parts)


@caught_by("STR-87")
class ReportsAtEndStrategy(SameDDP):
    """``on_train_end`` takes the longest training time of all ranks, whether or not the run has failed."""

    # Contract, on_train_end: "Also after a stop by a signal, and after an error with `failure` set."; failure: "Other
    # ranks may be elsewhere once it is set, so nothing may communicate."
    # After an error on one rank that rank waits in the reduction for the others, which are in the averaging of
    # gradients: it hangs until it is ended by force, and the program never gets its own error.

    training_seconds = 0.0
    _began = 0.0

    def on_train_start(self) -> None:
        super().on_train_start()
        self._began = time.perf_counter()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.training_seconds = self.reduce(time.perf_counter() - self._began, "max")


@caught_by("STR-78", says="persistent=False")
class StateDictOnlyStrategy(FlatAverage):
    """The ranks get those parameters and buffers of rank 0 that are in its state dict."""

    # Contract, setup_model: "afterwards all ranks have the parameters and buffers of rank 0, those that no state dict
    # has, too."
    # Buffers with persistent=False that are drawn at random (projections, Fourier features, masks) differ between the
    # ranks: each trains the common weights for another model.

    def sync_module(self, module: nn.Module) -> None:
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                unshare_buffer_memory(module)
                saved = module.state_dict().keys()
                tensors = (*module.named_parameters(), *module.named_buffers())
                collectives.broadcast_tensors([tensor for name, tensor in tensors if name in saved])


@caught_by("SYS-03", kind="strategy", says="CheckpointMismatchError")
class FreesOptimizersStrategy(SameSingle):
    """``teardown`` lets go of the optimizers and schedulers, to free the memory of their states."""

    # Contract, optimizer_state: "Called after `teardown` too, as `state_dict`, `module_state_dict` and
    # `scheduler_state` are: a checkpoint may be saved when a fit has ended."
    # A checkpoint that the program saves after fit has no optimizer states: it looks complete, and the run can't be
    # continued from it any more.

    def teardown(self) -> None:
        super().teardown()
        self.optimizers, self.lr_scheduler_configs = [], []


@caught_by("STR-36")
class PlainOptimizersStrategy(SameSingle):
    """``setup_optimizers`` keeps the optimizers as they are, and doesn't ask the precision about them."""

    # Contract, setup_optimizers: "`optimizers`, `lr_scheduler_configs` and `model` are what the precision's `connect`
    # has made of them." and "TypeError: an optimizer can't work in the precision."
    # A precision whose library works through `connect` does nothing at all, and an optimizer that it would refuse
    # (LBFGS in float16) trains to NaN.

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        self.optimizers = list(optimizers)
        self.lr_scheduler_configs = list(lr_scheduler_configs)


@caught_by("STR-93")
class BarrierAfterSaveStrategy(SameDDP):
    """``save_checkpoint`` writes on rank 0 and then has all ranks meet, to which a rank 0 that failed never comes."""

    # Contract, save_checkpoint: "Called on every rank; returns, or raises, on all of them." and "CheckpointError: on
    # every rank, when the checkpoint was not written on one of them, or the paths differ."
    # On a full disk rank 0 raises and the others wait. A program that catches CheckpointError and goes on training
    # hangs, with rank 0 in the averaging of gradients and the others in the barrier.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if "sharded" in self.checkpoint_io.features:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.barrier(f"save of {path!r}")


@caught_by("STR-95")
class ScaledNormStrategy(SameSingle):
    """``grad_norm`` measures the gradients as they are, scaled where the precision scales the loss."""

    # Contract, grad_norm: "Returns: A 0-d tensor: the norm of the unscaled gradients."; "For hooks between the last
    # backward and the step".
    # In 16-mixed a hook on_after_backward sees a norm that is up to 65536 times too large and changes with the scale:
    # what it logs is wrong, and a rule that leaves out steps with a large norm leaves out all of them.

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        parameters = [parameter for parameter in self.precision.main_params(optimizer) if parameter.grad is not None]
        return nn.utils.get_total_norm([dense_gradient(parameter) for parameter in parameters])
