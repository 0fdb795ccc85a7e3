"""Blind defects: eleven strategies with one mistake each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.errors import CheckpointMismatchError
from torchhal.precision import Precision
from torchhal.pytree import map_tensors
from torchhal.strategies import DDPStrategy, StepResult, overrides


@caught_by("STR-02")
class PooledReduceStrategy(DDPStrategy):
    """``reduce`` gives its result in a buffer of a pool, which the next reduce of that shape writes again."""

    # docs/reference/strategy.md, reduce: "Returns: New tensors on `root_device`, in their own dtype but for two ..."
    # The user keeps the reduced loss of each step in a list, or two metrics beside each other: all of them become the
    # last one that was reduced, so curves, early stopping and the choice of the best checkpoint are wrong.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pool: dict[Any, torch.Tensor] = {}

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        reduced = super().reduce(value, op, group=group)
        used: dict[Any, int] = {}

        def pooled(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            kind = (tuple(leaf.shape), leaf.dtype, leaf.device, torch.is_inference_mode_enabled())
            used[kind] = used.get(kind, 0) + 1
            buffer = self._pool.setdefault((*kind, used[kind]), torch.empty_like(leaf))
            return buffer.copy_(leaf)

        return map_tensors(reduced, pooled)

    def teardown(self) -> None:
        self._pool.clear()
        super().teardown()


class _GatherWithGrad(torch.autograd.Function):
    """The tensors of all ranks; backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gather: Callable[..., torch.Tensor], group: Any) -> torch.Tensor:
        ctx.group = group
        return gather(tensor.detach(), group=group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.contiguous()  # which is autograd's own tensor where it is contiguous already
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)].clone(), None, None


@caught_by("STR-71")
class InPlaceGatherBackwardStrategy(DDPStrategy):
    """The backward of ``all_gather(sync_grads=True)`` adds up in the gradient that autograd shares with others."""

    # docs/reference/strategy.md, all_gather: "`sync_grads`: let backward add up the gradients that the losses of all
    # ranks have for this rank's tensor."
    # What is added to the gathered tensor, and was computed before it, gets the gradient of all ranks instead of its
    # own: twice the gradient on two ranks, for that part of the model alone.

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if not sync_grads:
            return super().all_gather(tensor, group=group)
        gather = super().all_gather
        on_device = tensor.to(self.root_device) if isinstance(tensor, torch.Tensor) else tensor
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return gather(tensor, group=group)
        return _GatherWithGrad.apply(on_device, gather, group)


@caught_by("STR-70")
class ShardedNormOfReplicasStrategy(DDPStrategy):
    """``grad_norm`` adds up the squares over the ranks, as for shards, although each rank has the whole gradient."""

    # docs/reference/strategy.md, grad_norm: "Return the 2-norm over all gradients of `optimizer`, on any rank" and
    # "Returns: A 0-d tensor: the norm of the unscaled gradients."
    # The logged norm grows with the square root of the number of ranks; a hook that skips steps, or adapts the
    # clipping, by this norm does so at another place on each number of devices.

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        norm = super().grad_norm(optimizer)
        squares: torch.Tensor = self.reduce(norm.square(), "sum")
        return squares.sqrt()


@caught_by("STR-77")
class AssigningPartialLoadStrategy(DDPStrategy):
    """``load_module_state_dict(strict=False)`` puts new parameters into the module, and the optimizer has the old."""

    # docs/reference/strategy.md, load_module_state_dict: "Load a state into the module, wrapped or not.", and
    # setup_optimizers: "`optimizers`: over the parameters of `module`."
    # Fine-tuning from a part of a checkpoint: the loss is computed, the optimizer steps, and the loaded layers don't
    # change; or, where they do in place, the user's state dict changes with them.

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        if strict:
            return super().load_module_state_dict(state)
        assert self.module is not None
        try:
            result = self.module.load_state_dict(state, strict=False, assign=True)  # spares a copy
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {error}"
            ) from error
        if self.model is not self.module:
            self._wrap_again()  # it averages the parameters that the module has now
        return result


@caught_by("STR-79")
class SkippedStepsCountStrategy(DDPStrategy):
    """``optimizer_step`` says that parameters were updated, also where the precision has skipped the step."""

    # docs/reference/strategy.md, optimizer_step: "Returns: The number of steps to count, and whether parameters
    # changed".
    # Under 16-mixed a scheduler advances on steps that were not made: a warm-up is over before the first update, and
    # the learning rate decays for nothing.

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        super().optimizer_step(optimizer, closure)
        return StepResult.UPDATED


@caught_by("STR-80")
class ContextStaysAfterErrorStrategy(DDPStrategy):
    """The precision's forward context is entered and left by hand: where the step raises it stays entered."""

    # docs/reference/strategy.md, with_precision: "Return `function` under the precision: input converted, forward
    # context entered, output converted."; Strategy: "teardown  always, after errors too; then the same object may start
    # again"; docs/reference/precision.md, forward_context: "Leaving it restores what it changed, after an error too."
    # After a step that ran out of memory and was caught, all that the process computes runs under autocast, or in
    # another default dtype: in a notebook the evaluation of a float32 model is one in bfloat16.

    def with_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        precision = self.precision
        if not overrides(precision, Precision, "forward_context"):
            return super().with_precision(function)
        convert_input = precision.convert_input if overrides(precision, Precision, "convert_input") else None
        convert_output = precision.convert_output if overrides(precision, Precision, "convert_output") else None

        def step(batch: Any, *rest: Any) -> Any:
            if convert_input is not None:
                batch = convert_input(batch)
            context = precision.forward_context()
            context.__enter__()
            output = function(batch, *rest)
            context.__exit__(None, None, None)
            return output if convert_output is None else convert_output(output)

        return step


@caught_by("STR-84")
class EndlessMetricsGroupStrategy(DDPStrategy):
    """``reduce`` has a process group of its own, which waits for torch's half hour and not for ``timeout``."""

    # docs/reference/strategy.md, timeout: "The longest wait for other ranks: to meet them, in a barrier, in a
    # collective."
    # One rank hangs in its data loader: with timeout=timedelta(minutes=1) the job stands still for 30 minutes in each
    # reduce of a metric, on all nodes, and nothing says why.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._metrics_group: Any = None

    def setup_communication(self) -> Any:
        store = super().setup_communication()
        if self.world_size > 1:
            self._metrics_group = dist.new_group(backend="gloo")
        return store

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        return super().reduce(value, op, group=group or self._metrics_group)

    def teardown(self) -> None:
        group, self._metrics_group = self._metrics_group, None
        try:
            super().teardown()
        finally:
            if group is not None and dist.is_initialized():  # the user's own group stays, and this one goes
                dist.destroy_process_group(group)


@caught_by("STR-81")
class SchedulerByClassStrategy(DDPStrategy):
    """``load_scheduler_state`` finds the scheduler by its class: of two StepLR the first gets both states."""

    # docs/reference/strategy.md, load_scheduler_state: "Continue from the saved state of a scheduler. ... `config`: one
    # of `lr_scheduler_configs`."
    # A GAN with a schedule of the same class for each optimizer: after a resume the first has the second's place and
    # base rates, and the second begins at 0 again.

    def load_scheduler_state(self, config: Any, state: dict[str, Any]) -> None:
        self.check_scheduler_state(config, state)
        by_class: dict[type, Any] = {}
        for each in self.lr_scheduler_configs:
            by_class.setdefault(type(each.scheduler), each.scheduler)
        by_class.get(type(config.scheduler), config.scheduler).load_state_dict(state)


@caught_by("STR-74")
class BackwardWithoutInputsStrategy(DDPStrategy):
    """``manual_backward`` passes on all arguments of torch's ``backward`` but ``inputs``."""

    # docs/reference/strategy.md, manual_backward: "`*args`: passed on to `backward`. `**kwargs`: passed on to
    # `backward`."
    # manual_backward(loss_d, inputs=list(discriminator.parameters())) gives the generator the gradient of the
    # discriminator's loss too, and its next step goes in that direction.

    def manual_backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        **kwargs: Any,
    ) -> None:
        super().manual_backward(loss, gradient, retain_graph, create_graph, **kwargs)


@caught_by("STR-82")
class CachedShareStrategy(DDPStrategy):
    """``distributed_sampler_kwargs`` is computed once in the life of the object, at the first request."""

    # docs/reference/strategy.md, distributed_sampler_kwargs: "Read on every rank; needs no set-up.", world_size:
    # "Number of processes of the job", and Strategy: "then the same object may start again".
    # A script that looks at it before fit has (1 replica, rank 0) in the object, which travels to the workers that are
    # spawned: every rank trains on all of the data. The same for a second fit on another number of devices.

    @cached_property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:  # type: ignore[override]
        return {"num_replicas": self.world_size, "rank": self.global_rank}


@caught_by("STR-83")
class RemovalErrorOnOneRankStrategy(DDPStrategy):
    """``remove_checkpoint`` raises on rank 0 alone where the removal fails, and returns on the others."""

    # docs/reference/strategy.md, remove_checkpoint: "Called on every rank; returns, or raises, on all of them." and
    # "`CheckpointError`: on every rank, when it was not removed on one of them."
    # A user who handles the error (a folder without the right to delete) takes another path on rank 0 than on the
    # others: the ranks are in different collectives from there on, and wait.

    def remove_checkpoint(self, path: str) -> None:
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            self.checkpoint_io.remove_checkpoint(path)
