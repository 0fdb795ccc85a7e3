"""Save and restore the state of a run: weights, optimizers, schedulers, gradients, and the checkpoints with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal._overrides import overrides
from torchhal._rank_state import refuse_resharding
from torchhal.errors import CheckpointError, CheckpointMismatchError
from torchhal.strategies._communication import StrategyCommunication
from torchhal.strategies._optimizer_state import check_groups, check_optimizer_state, check_scheduler_state
from torchhal.strategies._optimizer_state_dtypes import restore_state_dtypes


class StrategyState(StrategyCommunication):
    """The state of a run: weights, optimizers, schedulers, gradients, and the checkpoints with them."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of the strategy itself, beside all that has a method of its own.

        Called on every rank; rank 0's is saved. What differs between ranks belongs into :meth:`rank_state_dict`.

        Returns:
            Plain data that a ``weights_only`` load reads.

        Checks: STR-22.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved state of a strategy.

        Called on every rank, after the set-up.

        Args:
            state: what :meth:`state_dict` returned, of another strategy too: unknown keys are ignored.

        Checks: STR-22.
        """

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of this rank alone, such as the error that a compression has left behind.

        Called on every rank while the run's communication is up; every rank's is saved. Where all are empty, nothing
        is sent and nothing is saved.

        .. versionadded:: 0.2

        Returns:
            Tensors and plain data that a ``weights_only`` load reads; empty for a strategy without such state.

        Checks: STR-49, STR-50.
        """
        return {}

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's saved state.

        Called on every rank if any has saved one, as the last of the strategy's state: weights, optimizers and
        schedulers are restored, which a strategy whose ranks train different weights may replace here. It isn't
        called with the state of another class of strategy, which is dropped with a warning.

        .. versionadded:: 0.2

        Args:
            state: what :meth:`rank_state_dict` returned on this rank, or :meth:`reshard_rank_state` for it; its tensors
                are on the CPU.

        Checks: STR-49.
        """

    def reshard_rank_state(
        self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int
    ) -> Mapping[str, Any]:
        """Return the state with which a rank continues where another number of ranks has saved.

        Called on every rank before anything of the checkpoint is restored. It neither communicates nor changes the
        strategy.

        .. versionadded:: 0.2

        Args:
            states: what :meth:`rank_state_dict` returned on each of the ranks that saved, in their order.
            rank: the global rank that continues.
            world_size: number of ranks that continue.

        Returns:
            What :meth:`load_rank_state_dict` is called with. By default nothing, if all ``states`` are empty.

        Raises:
            CheckpointMismatchError: the states can't be shared out, the default for any that isn't empty; it names the
                strategy, both numbers of ranks, and what to do.

        Checks: STR-50.
        """
        return refuse_resharding(self, "strategy", states, world_size=world_size)

    def module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the user's own key names, without a wrapper's prefix.

        Called on every rank.

        Returns:
            Whole on rank 0. On a rank that writes no checkpoint the tensors may be on the meta device, without values.

        Checks: STR-16, STR-21 to STR-23.
        """
        assert self.module is not None
        return self.module.state_dict()

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a state into the module, wrapped or not.

        Called on every rank. The parameters stay the objects that the optimizers have, and share no memory with
        ``state``.

        Args:
            state: by the user's own key names.
            strict: False to load only what fits.

        Returns:
            torch's ``missing_keys`` and ``unexpected_keys``.

        Raises:
            CheckpointMismatchError: keys or shapes differ; names them.

        Checks: STR-22, STR-25, STR-77.
        """
        assert self.module is not None
        try:
            return self.module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {error}"
            ) from error

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state.

        Called on every rank; rank 0's result is saved. Called after :meth:`teardown` too, as :meth:`state_dict`,
        :meth:`module_state_dict` and :meth:`scheduler_state` are: a checkpoint may be saved when a fit has ended.

        Args:
            optimizer: one of :attr:`optimizers`.

        Checks: STR-22.
        """
        return optimizer.state_dict()

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Raise an error where ``state`` can't be this optimizer's; change nothing.

        Called on every rank before anything of a checkpoint is restored. Tensors that ``open_checkpoint`` of a sharded
        checkpoint IO replaces are compared by their shapes and are not read. An engine whose :meth:`optimizer_state`
        isn't of torch's form, with ``param_groups``, overrides this method and doesn't call the inherited one.

        Args:
            optimizer: one of :attr:`optimizers`.
            state: what :meth:`optimizer_state` returned.

        Raises:
            CheckpointMismatchError: it can't be.

        Checks: STR-65, STR-68.
        """
        own_form = overrides(self, StrategyState, "optimizer_state")
        unchecked = own_form and not overrides(self, StrategyState, "check_optimizer_state")
        if "param_groups" in state or not unchecked:
            check_optimizer_state(optimizer, state)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Continue from the saved state of an optimizer.

        Called on every rank; the state's tensors are on the parameters' device afterwards, in the parameters' dtype or
        in that of :meth:`.Precision.optimizer_state_dtype`.

        Args:
            optimizer: one of :attr:`optimizers`.
            state: what :meth:`optimizer_state` returned.

        Raises:
            CheckpointMismatchError: it doesn't belong to this optimizer.

        Checks: STR-22, STR-26, STR-51, STR-90.
        """
        names = [frozenset(group) for group in optimizer.param_groups]
        try:
            self.check_optimizer_state(optimizer, state)
            optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointMismatchError(
                f"the optimizer state doesn't belong to this {type(optimizer).__name__}: {error}"
            ) from error
        check_groups(optimizer, names)
        restore_state_dtypes(self.precision, optimizer, state)

    def scheduler_state(self, config: Any) -> dict[str, Any]:
        """Return the state of one scheduler; an engine that owns them returns its own.

        Called on every rank; rank 0's result is saved.

        Args:
            config: one of :attr:`lr_scheduler_configs`.

        Checks: STR-22.
        """
        state: dict[str, Any] = config.scheduler.state_dict()
        return state

    def check_scheduler_state(self, config: Any, state: Mapping[str, Any]) -> None:
        """Raise an error where a value of ``state`` can't be this scheduler's; change nothing.

        Called on every rank before anything of a checkpoint is restored. An engine with a :meth:`scheduler_state` of
        its own checks that.

        Args:
            config: one of :attr:`lr_scheduler_configs`.
            state: what :meth:`scheduler_state` returned.

        Raises:
            CheckpointMismatchError: it can't be.

        Checks: STR-68.
        """
        check_scheduler_state(config.scheduler, state)

    def load_scheduler_state(self, config: Any, state: dict[str, Any]) -> None:
        """Continue from the saved state of a scheduler.

        Called on every rank.

        Args:
            config: one of :attr:`lr_scheduler_configs`.
            state: what :meth:`scheduler_state` returned.

        Raises:
            CheckpointMismatchError: it doesn't belong to this scheduler.

        Checks: STR-22, STR-81.
        """
        self.check_scheduler_state(config, state)
        config.scheduler.load_state_dict(state)

    def sync_gradients(self) -> None:
        """Average over the ranks the gradients that were accumulated under :meth:`no_backward_sync`.

        Called on every rank. A parameter that a rank hasn't used counts as zero there, or it is an error on every rank.

        Checks: STR-73.
        """

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of an accumulation that has not stepped yet, for a checkpoint during it.

        Called on every rank; afterwards the gradients of all ranks are those that rank 0 saves.

        Returns:
            Tensors on the CPU, by parameter name; parameters without a gradient are left out. None at all where an
            engine keeps the gradients: such a strategy warns on rank 0 that a resumed run steps without them.

        Checks: STR-60.
        """
        assert self.module is not None
        self.sync_gradients()  # averaged now, the rest of the accumulation adds up to the same on every rank
        return {
            name: parameter.grad.detach().cpu()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }

    def load_accumulated_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Continue an accumulation from saved gradients.

        Called on every rank.

        Args:
            gradients: what :meth:`accumulated_gradients` returned; the accumulation shares no memory with it.

        Checks: STR-60.
        """
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write a checkpoint through the checkpoint IO.

        Called on every rank; returns, or raises, on all of them. An IO without the feature ``sharded`` runs on
        rank 0 only.

        Args:
            checkpoint: tensors and plain data.
            path: where to; the same on every rank.
            storage_options: passed on to the checkpoint IO.

        Raises:
            CheckpointError: on every rank, when the checkpoint was not written on one of them, or the paths differ.

        Checks: STR-22, STR-24, STR-93, CIO-21, CIO-23.
        """
        error: BaseException | None = None
        if self.world_size > 1 and "sharded" in self.checkpoint_io.features:
            # shards in several folders would look like a checkpoint in each of them
            paths = self.all_gather_object(path)
            if len(set(paths)) > 1:
                raise CheckpointError(f"every rank must save to the same path (got {', '.join(map(repr, paths))})")
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            except Exception as raised:
                error = raised
        self._raise_alike(error, f"checkpoint {path!r} was not written")

    def wait_for_checkpoints(self) -> None:
        """Return when every save is durable.

        Called on every rank.

        Raises:
            CheckpointError: on every rank, when a save has failed on one of them; on that rank the save's own error.

        Checks: STR-89.
        """
        error: BaseException | None = None
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.wait()
            except Exception as raised:
                error = raised
        if "async" in self.checkpoint_io.features:
            self._raise_alike(error, "a checkpoint was not written")
        elif error is not None:
            raise error

    def load_checkpoint(self, path: str, *, weights_only: bool = True) -> dict[str, Any]:
        """Return a checkpoint that the checkpoint IO has read, with its tensors on the CPU.

        Called on every rank.

        Args:
            path: where from.
            weights_only: execute nothing that the file holds.

        Raises:
            CheckpointError: as :meth:`CheckpointIO.load_checkpoint`; FileNotFoundError too.

        Checks: STR-22, STR-24.
        """
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)

    def remove_checkpoint(self, path: str) -> None:
        """Remove what :meth:`save_checkpoint` wrote.

        Called on every rank; returns, or raises, on all of them. Rank 0 acts unless the IO is sharded.

        Args:
            path: that of the save.

        Raises:
            CheckpointError: on every rank, when it was not removed on one of them.

        Checks: STR-83.
        """
        error: BaseException | None = None
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.remove_checkpoint(path)
            except Exception as raised:
                error = raised
        self._raise_alike(error, f"checkpoint {path!r} was not removed")
