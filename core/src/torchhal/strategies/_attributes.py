"""Hold the components, devices, model and optimizers of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.distributed._rank_monitor import RankMonitor
from torchhal.errors import ConfigurationError
from torchhal.precision import Precision

_Component = TypeVar("_Component")


class StrategyAttributes:
    """The components, devices, model and optimizers of a strategy."""

    alias: str = ""
    """Alias by which this strategy was requested; empty for an object the user created."""

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        precision: Precision | None = None,
        precision_plugin: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        """Store the components that the user chose.

        Args:
            accelerator: None, as for all: ``resolve`` chooses it.
            precision: how the model computes.
            precision_plugin: another name of ``precision``.
            checkpoint_io: how checkpoints are written.
            cluster_environment: what starts the processes.

        Raises:
            ConfigurationError: ``precision`` and ``precision_plugin`` are both given and differ.
            TypeError: an argument is no instance of its contract.

        Checks: STR-98.
        """
        if precision is not None and precision_plugin is not None and precision is not precision_plugin:
            raise ConfigurationError("'precision' and 'precision_plugin' are one argument: give one of them (got both)")
        for name, value, base in (
            ("accelerator", accelerator, Accelerator),
            ("precision", precision or precision_plugin, Precision),
            ("checkpoint_io", checkpoint_io, CheckpointIO),
            ("cluster_environment", cluster_environment, ClusterEnvironment),
        ):
            if value is not None and not isinstance(value, base):
                raise TypeError(f"'{name}' must be an instance of {base.__name__} (got {value!r})")
        self.given: dict[str, Any] = {
            "accelerator": accelerator,
            "precision": precision or precision_plugin,
            "checkpoint_io": checkpoint_io,
            "cluster_environment": cluster_environment,
        }
        """The components that the user chose, by kind; those that ``resolve`` chose for one run are not among them."""
        self._accelerator = accelerator
        self._precision = precision or precision_plugin
        self._checkpoint_io = checkpoint_io
        self.cluster_environment = cluster_environment
        self.devices: list[torch.device] = []
        self.num_nodes = 1
        self.left_to_launcher: frozenset[str] = frozenset()
        """``devices`` or ``num_nodes``, where they are "auto" and determined when the ranks have met."""
        self.module: nn.Module | None = None
        self.model: Any = None
        self.model_is_connected = False
        """True if :attr:`model` is a wrapper that the precision's ``connect`` returned."""
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self._precision_step: Callable[..., Any] | None = None
        """The precision's ``optimizer_step`` with the dtypes of new state, where it chooses them; else None."""
        self._watch: RankMonitor | None = None
        self.accumulate_grad_batches = 1
        self.gradient_clip_val: float | None = None
        self.gradient_clip_algorithm = "norm"
        self.sync_batchnorm = False
        """True if the batch norms of a training compute over the batches of all ranks; set before :meth:`connect`."""
        self._synchronized: list[nn.Module] = []
        self._environment_ready = False
        self.trainer: Any = None
        """The Trainer that runs this strategy, from :meth:`prepare` to :meth:`teardown`; None in a loop without one."""
        self.mark_step: Callable[[], None] | None = None
        """The function that the accelerator's ``step_marker()`` returned, between the set-up and the teardown."""

    def configure(
        self,
        *,
        accelerator: Accelerator,
        precision: Precision,
        checkpoint_io: CheckpointIO,
        cluster_environment: ClusterEnvironment | None,
        devices: Sequence[torch.device],
        num_nodes: int,
    ) -> None:
        """Store the components that ``resolve`` chose.

        Starts nothing; called once in each process, before :meth:`make_launcher`.

        Args:
            accelerator: the kind of hardware.
            precision: how the model computes.
            checkpoint_io: how checkpoints are written.
            cluster_environment: what starts the processes; None for a strategy of one process.
            devices: the devices of this node, in the order of local ranks.
            num_nodes: number of nodes of the job.
        """
        self._accelerator = accelerator
        self._precision = precision
        self._checkpoint_io = checkpoint_io
        self.cluster_environment = cluster_environment
        self.devices = list(devices)
        self.num_nodes = num_nodes

    @property
    def is_set_up(self) -> bool:
        """True between :meth:`setup_environment` and :meth:`teardown` in this process."""
        return self._environment_ready

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of the run; ConfigurationError before one is chosen."""
        return self._part(self._accelerator, "accelerator")

    @property
    def precision(self) -> Precision:
        """The precision of the run; ConfigurationError before one is chosen.

        Checks: STR-36, STR-98.
        """
        return self._part(self._precision, "precision")

    @property
    def precision_plugin(self) -> Precision:
        """Another name of :attr:`precision`."""
        return self.precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint IO of the run; ConfigurationError before one is chosen. It may be set.

        Checks: STR-24, STR-98.
        """
        return self._part(self._checkpoint_io, "checkpoint_io")

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = self.given["checkpoint_io"] = io

    def _part(self, part: _Component | None, name: str) -> _Component:
        if part is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no {name} yet: give it to the constructor, or the strategy to a Trainer"
            )
        return part

    @property
    def display_name(self) -> str:
        """The alias, or without one the name of the class: what messages call the strategy.

        .. versionadded:: 0.2
        """
        return self.alias or type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alias!r})" if self.alias else f"{type(self).__name__}()"
