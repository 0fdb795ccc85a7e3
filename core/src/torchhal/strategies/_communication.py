"""Define the ranks of a strategy's processes and the collectives between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from torchhal.distributed._rank_monitor import RankMonitor
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.strategies._attributes import StrategyAttributes


class StrategyCommunication(StrategyAttributes, ABC):
    """The ranks of a strategy's processes and the collectives between them."""

    @property
    def watch(self) -> RankMonitor:
        """The monitor of the other ranks' failures and requests to stop; of this rank alone before the set-up.

        Checks: STR-99.
        """
        if self._watch is None:
            self._watch = RankMonitor(None, 0, 1)
        return self._watch

    @property
    def root_device(self) -> torch.device:
        """The device of this process: of local rank i, the i-th that was given; ConfigurationError before configure().

        Checks: STR-27, STR-99.
        """
        if not self.devices:
            raise ConfigurationError(
                f"{type(self).__name__} has no devices yet: give it to a Trainer, or call configure()"
            )
        return self.devices[0]

    @property
    def global_rank(self) -> int:
        """Rank of this process among all, from 0 to :attr:`world_size` - 1; known before the set-up.

        Checks: STR-12, STR-38.
        """
        return 0

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its node, from 0; known before the set-up.

        Checks: STR-12, STR-38.
        """
        return 0

    @property
    def node_rank(self) -> int:
        """Rank of this node among all nodes, from 0; known before the set-up.

        Checks: STR-12, STR-38.
        """
        return 0

    @property
    def world_size(self) -> int:
        """Number of processes of the job; known before the set-up.

        Checks: STR-12, STR-38.
        """
        return 1

    @property
    def is_global_zero(self) -> bool:
        """True on exactly one process, before and after :meth:`setup_environment`.

        Checks: STR-12, STR-96.
        """
        return self.global_rank == 0

    @property
    def is_data_leader(self) -> bool:
        """True on exactly one of the ranks that receive the same samples: its metrics and predictions count.

        Ranks that share one batch, as in tensor or pipeline parallelism, would count it several times otherwise. Where
        a step does not end on rank 0, as in a pipeline, rank 0 shows the values that the first leader logged. Read once
        on every rank, after :meth:`setup_model`.
        """
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """``num_replicas`` and ``rank`` for a sampler, or None where every process trains on all data.

        ``rank`` counts the shares of all nodes, not those of this node. Read on every rank; needs no set-up.

        Checks: STR-28, STR-38, STR-82, STR-91, STR-92.
        """
        return None

    @abstractmethod
    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        """Return ``value`` combined over all ranks; the input is left unchanged.

        Called on every rank of ``group``.

        Args:
            value: a dense tensor of any dtype and strides, a number, or a nest of them with the same structure on every
                rank; the keys of a mapping may come in any order. Anything else is returned as it is.
            op: ``"mean"`` (also ``"avg"``), ``"sum"``, ``"min"``, ``"max"``, ``"product"``.
            group: a process group; None for all ranks.

        Returns:
            New tensors on :attr:`root_device`, in their own dtype but for two: a mean of integers or booleans is of the
            default dtype, a sum or product of them int64. A number stays a number of its type, its mean a float.

        Raises:
            ValueError: ``op`` is none of these.
            DistributedError: on every rank, when their structures, types, dtypes or shapes differ.

        Checks: STR-01 to STR-04, STR-45, STR-46, STR-76, STR-84, STR-96.
        """

    @abstractmethod
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank ``src`` on every rank.

        Called on every rank.

        Args:
            value: a tensor or any picklable object; ignored on all ranks but ``src``.
            src: the global rank that sends.

        Returns:
            On rank ``src`` the value itself or an equal one. A tensor that was on the sender's device is on this rank's
            device, one from its CPU on the CPU.

        Checks: STR-06, STR-07, STR-46.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked in rank order, on every rank.

        Called on every rank of ``group``.

        Args:
            tensor: shape (...), on any device, with the same shape and dtype on every rank.
            group: a process group; None for all ranks.
            sync_grads: let backward add up the gradients that the losses of all ranks have for this rank's tensor.

        Returns:
            A new tensor of shape (world_size, ...) on :attr:`root_device`, for one rank too.

        Raises:
            DistributedError: on every rank, when shapes or dtypes differ.

        Checks: STR-04, STR-09 to STR-11, STR-63, STR-71.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank.

        Called on every rank.

        Args:
            value: any picklable object.
        """

    @abstractmethod
    def barrier(self, name: str = "") -> None:
        """Wait until all ranks have called it.

        Called on every rank.

        Args:
            name: name of the barrier in the error message.

        Raises:
            CollectiveTimeoutError: ranks are missing when the timeout expires; names them.

        Checks: STR-08.
        """

    def reduce_boolean_decision(self, decision: bool, *, all: bool = True) -> bool:
        """Return the same decision on every rank: whether all ranks, or any, decided True.

        Called on every rank.

        Args:
            decision: this rank's.
            all: False for any.

        Checks: STR-05.
        """
        return bool(self.reduce(int(decision), "min" if all else "max"))

    def _raise_alike(self, error: BaseException | None, what: str) -> None:
        """Raise ``error`` on its rank and a CheckpointError that names it on all others; called on every rank."""
        if self.world_size > 1:
            failures = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
            others = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
            if error is None and others:
                raise CheckpointError(f"{what}: {'; '.join(others)}")
        if error is not None:
            raise error
