"""ZeRO through Colossal-AI's LowLevelZeroPlugin: optimizer state, at stage 2 gradients too, divided by elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchhal.errors import CheckpointError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal_colossalai import _compatibility as compatibility
from torchhal_colossalai._gradients import GradientReducer
from torchhal_colossalai._shard_state import gather_state, part_of_state
from torchhal_colossalai._zero_steps import ZeroSteps


class ColossalAIZeroStrategy(ZeroSteps):
    """:class:`ColossalAIStrategy` with the booster's plugin ``low_level_zero``.

    Every rank has the whole model. Of each parameter it steps a part of the elements, with that part of the optimizer's
    state, and gets the others' from them. At stage 2 it keeps that part of the averaged gradients alone, and
    ``parameter.grad`` is None after backward: :meth:`clip_gradients` and :meth:`grad_norm` see all of them.

    The Trainer's precision decides the dtypes and scales the loss, and the Trainer clips. The user's optimizer stays
    the one that schedulers, callbacks and loops hold, with the whole parameters in its groups; its ``state``
    has this rank's parts while a run lasts.
    """

    default_plugin: ClassVar[str] = "low_level_zero"

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._lost_state = False
        if self.world_size == 1 or not self.optimizers:
            return
        self.booster = self.make_booster(
            **{**self.plugin_options, "stage": self.stage}, precision="fp32", master_weights=False, cast_inputs=False,
            overlap_communication=False,
        )  # fmt: skip
        for optimizer in self.optimizers:
            self._divide(optimizer)
        self._reducer = GradientReducer(self)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        assert self.module is not None
        compatibility.check_trainable(self.module, optimizers, self.display_name, self.stage)
        for each in optimizers:
            trial = compatibility.check_elements(each, self.display_name, self.accelerator, self.root_device)
            if trial is not None:
                self._element_trials[id(each)] = trial

    def restore_module(self) -> None:
        super().restore_module()
        for engine in self.engines.values():
            with self.guard("gathering of the optimizer's state"):
                entries = gather_state(engine, keep=self.is_global_zero)
            engine.release(entries)
        self._forget_engines()

    def release_model(self) -> None:
        super().release_model()
        for engine in self.engines.values():  # of a run that failed: the others' parts are gone
            self._lost_state = self._lost_state or bool(engine.optimizer.state)
            engine.release(None)
        self._forget_engines()

    def _forget_engines(self) -> None:
        if self._reducer is not None:
            self._reducer.release()
        self.engines, self.boosted_module, self._reducer = {}, None, None
        self._unscaled.clear()
        self._element_trials.clear()

    # -- state -----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the whole state, as the undivided optimizer would give it; on the other ranks its groups alone."""
        if (engine := self.engines.get(optimizer)) is None:
            if self._lost_state:
                raise CheckpointError(
                    f"the run has failed, and parts of the state of {type(optimizer).__name__} were with other ranks: "
                    "continue from a checkpoint that was saved while it ran"
                )
            return super().optimizer_state(optimizer)
        state = super().optimizer_state(optimizer)
        with self.guard("gathering of the optimizer's state"):
            return {**state, "state": gather_state(engine, keep=self.is_global_zero)}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if (engine := self.engines.get(optimizer)) is None:
            super().load_optimizer_state(optimizer, state)
            return
        self.check_optimizer_state(optimizer, state)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        mine = {i: part_of_state(engine, parameters[i], entry) for i, entry in state["state"].items()}
        with engine.shards.on_shards(others=True):
            super().load_optimizer_state(optimizer, {**state, "state": mine})

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        if self.stage != 2 or not self.engines:
            return super().accumulated_gradients()
        assert self.module is not None
        self.sync_gradients()
        found = {id(each): each.grad for each in self.module.parameters() if each.grad is not None}
        with self.guard("gathering of the gradients"):
            for engine in self.engines.values():
                found |= {id(parameter): whole for parameter, whole in engine.whole_gradients()}
        named = self.module.named_parameters()
        return {name: found[id(each)].detach().cpu() for name, each in named if id(each) in found}

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = super().memory_per_rank(model, world_size)
        share = replace(whole, optimizer=-(-whole.optimizer // world_size))
        if self.stage == 1 or world_size == 1:
            return share
        note = "whole gradients until backward has ended, then this rank's part"
        return replace(share, note="; ".join(filter(None, (share.note, note))))
