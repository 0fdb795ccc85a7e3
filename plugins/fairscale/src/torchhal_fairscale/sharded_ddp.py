"""Train with fairscale's ShardedDataParallel: each gradient is reduced to the one rank that steps its parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.capabilities import LOSS_SCALING
from torchhal.distributed import collectives
from torchhal.errors import ModelError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.strategies import StepResult, around_call
from torchhal.strategies.gradient_averaging import GradientAveragingStrategy
from torchhal.strategies.model_checks import check_dense_gradients
from torchhal.strategies.sharded_optimizers import largest_share
from torchhal_fairscale._compatibility import check_no_own_clipping, check_no_step_hooks
from torchhal_fairscale._gradient_norm import clip_by_norm, total_norm
from torchhal_fairscale._gradient_reduction import GradientReduction
from torchhal_fairscale._oss_base import OSSBase, owners_in


class FairscaleSDPStrategy(OSSBase, GradientAveragingStrategy):
    """``fairscale.nn.ShardedDataParallel`` with ``fairscale.optim.OSS``: ZeRO stage 2, of which the weights stay whole.

    Between backward and step only the rank that steps a parameter has its gradient; the others have None. Clipping and
    :meth:`grad_norm` are over all of them. Under manual optimization gradients are averaged on every rank, and the
    optimizers alone are divided.

    Args:
        find_unused_parameters: allow parameters that a step does not use, and steps that use them in another order on
            some ranks: gradients then travel after backward, not while it runs. What no rank uses keeps no gradient.
        activation_checkpointing: a class of layers, or several, whose activations fairscale's ``checkpoint_wrapper``
            computes again in backward.
        options: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`.ParallelStrategy`.

    Raises:
        ConfigurationError: fairscale is missing or doesn't fit; an optimizer looks at all parameters together, or its
            step needs a closure, as LBFGS's does; a value that can't be.
    """

    lacks: frozenset[str] = frozenset({LOSS_SCALING})  # each rank would judge by the gradients of its own share

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._reduction: GradientReduction | None = None
        self._known_parts = 0
        self._reduced: set[int] = set()
        """Optimizers whose gradients are on their owners alone."""

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        if self.world_size > 1 and self.automatic_optimization:
            reason = f"strategy {self.display_name!r} reduces dense gradients"
            check_dense_gradients(self.module, reason, "set it to False, or use strategy='fairscale_oss'")
            check_no_own_clipping(self.module, self.display_name)
            for optimizer in optimizers:
                check_no_step_hooks(optimizer, self.display_name)
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._reduced = set()
        self._wrap()

    def _wrap(self) -> None:
        """Put ShardedDataParallel around the model; it knows the parameters that the OSS objects have now."""
        self._unwrap()
        parts = [part for shards in self._shards.values() for part in shards.parts]
        if not parts or not self.automatic_optimization:
            return
        assert self.module is not None
        self._known_parts = len(parts)
        self._reduction = GradientReduction(
            self.model,
            parts,
            finds_unused=self.find_unused_parameters,
            device=self.root_device,
            names={parameter: name for name, parameter in self.module.named_parameters()},
            explain_unused=self.explain_unused,
        )
        self.model = self._reduction.wrapper

    def _unwrap(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.remove()
            if self.model is reduction.wrapper:
                self.model = reduction.wrapper.module

    def restore_module(self) -> None:
        self._unwrap()
        super().restore_module()

    def release_model(self) -> None:
        self._unwrap()
        super().release_model()

    # -- steps -----------------------------------------------------------------------------------------------

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        return self._following(step) if name == "training_step" else step

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        call = super().module_call(forward, training=training)
        return around_call(call, self._following) if training else call

    def _following(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._reduction is None:
            return step

        def of_what_is_trained(*args: Any) -> Any:
            self._follow()
            assert self._reduction is not None
            self._reduction.is_paused = self.averaging_is_paused
            return step(*args)

        return of_what_is_trained

    def _follow(self) -> None:
        """Reduce the gradients of what is trained now, if it was frozen, unfrozen or added since the last step."""
        for shards in self._shards.values():
            shards.update()
        if sum(len(shards.parts) for shards in self._shards.values()) != self._known_parts:
            self._wrap()
            return
        reduction = self._reduction
        assert reduction is not None
        if not (changed := reduction.changed()):
            return
        self.check_same_trained(changed)
        with self.guard("averaging of the gradients"):
            # during an accumulation, from here on only the gradients of the trained parameters are reduced
            frozen = [parameter for parameter in changed if not parameter.requires_grad]
            collectives.average_gradients(frozen, frozen=True)
        reduction.refresh()

    def zero_grad(self, optimizer: Optimizer) -> None:
        self._reduced.discard(id(optimizer))
        super().zero_grad(optimizer)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        reduction = self._reduction
        if reduction is None:
            super().backward(loss, *args, **kwargs)
            return
        reduction.is_paused = self.averaging_is_paused
        if self._reduced:
            self._send_reduced_to_all()
        late = [] if reduction.is_paused else self._unfrozen_in_step(reduction)
        backward = super().backward
        with self.guard("reduction of the gradients"):
            reduced = reduction.backward(lambda: backward(loss, *args, **kwargs))
            if late:
                collectives.average_gradients(late)
        if reduced:
            self._reduced = set(self._shards)

    def _unfrozen_in_step(self, reduction: GradientReduction) -> list[nn.Parameter]:
        """Return parameters that the step unfroze after its forward began, and nothing reduces yet."""
        if not (changed := reduction.changed()):
            return []
        if not self.find_unused_parameters and (frozen := [each for each in changed if not each.requires_grad]):
            names = ", ".join(repr(reduction.name_of(each)) for each in frozen[:3])
            raise ModelError(
                f"{names}{' and others' if len(frozen) > 3 else ''} of {type(self.module).__name__} were frozen while "
                "a step ran, and the ranks reduce what was trained when it began: freeze parameters between the steps, "
                "in on_train_batch_start or on_train_epoch_start, or use "
                f"strategy={type(self).__name__}(find_unused_parameters=True)"
            )
        self.check_same_trained(changed)
        return [each for each in changed if each.requires_grad]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if self._reduction is not None:
            check_no_step_hooks(optimizer, self.display_name)  # a callback may have registered one since
        return super().optimizer_step(optimizer, closure)

    @property
    def has_all_gradients(self) -> bool:
        return self._reduction is None

    def sync_gradients(self) -> None:
        if self._reduced:
            self._send_reduced_to_all()
            self.gradients_synced = True
        else:
            super().sync_gradients()

    @torch.no_grad()
    def _send_reduced_to_all(self) -> None:
        """Give every rank the averaged gradients that only their owners have: something is to be added to them."""
        reduced, self._reduced = self._reduced, set()
        shards = [self._shards[number] for number in self._shards if number in reduced]
        owners = {parameter: rank for each in shards for parameter, rank in each.owner.items()}
        with self.guard("sending of the reduced gradients"):
            there = self._where_gradients_are(owners)
            for (parameter, owner), is_there in zip(owners.items(), there, strict=True):
                if not is_there:
                    parameter.grad = None
                    continue
                if owner != self.global_rank or parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                collectives.broadcast_tensors([parameter.grad], src=owner)

    def _where_gradients_are(self, owners: dict[torch.Tensor, int]) -> list[bool]:
        """Return of which of the parameters the owner has a gradient."""
        mine = [owner == self.global_rank and each.grad is not None for each, owner in owners.items()]
        found = torch.tensor(mine, dtype=torch.int32, device=self.root_device)
        return [bool(each) for each in collectives.reduce_tensor(found, "max", device=self.root_device).tolist()]

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        if self._reduction is None:
            return super().grad_norm(optimizer)
        self.unscale_gradients(optimizer)
        return self._norm(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        if self._reduction is None or algorithm != "norm":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        self.unscale_gradients(optimizer)
        norm = self._norm(optimizer)
        clip_by_norm(list(self.precision.main_params(optimizer)), clip_val, norm)
        return norm

    def _norm(self, optimizer: Optimizer) -> torch.Tensor:
        shards = self._shards[id(optimizer)]
        shards.update()
        parameters = list(self.precision.main_params(optimizer))
        owned = [shards.owner.get(parameter) == self.global_rank for parameter in parameters]
        with self.guard("the norm of the gradients"):
            return total_norm(parameters, owned, self.root_device)

    # -- memory and errors -----------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = super().memory_per_rank(model, world_size)
        if world_size == 1:
            return whole
        return replace(
            whole.plus(whole.gradients, "backward holds a gradient until it has travelled"),
            gradients=largest_share(model, owners_in(model, world_size), world_size, gradients=True),
        )
