"""Define the cluster-environment contract: what started the processes, their ranks, and the rendezvous address."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, Protocol, runtime_checkable

from torchhal.cluster._job import current_job
from torchhal.composition import Composable
from torchhal.errors import ConfigurationError


@runtime_checkable
class SupportsLaunch(Protocol):
    """A launcher as an environment returns it; ``torchhal.launchers.Launcher`` is the contract."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` in every process and return the result of rank 0."""


class RanksNotMetError(ConfigurationError):
    """A number that no variable holds was requested before the ranks have met.

    :meth:`ClusterEnvironment.join` determines it. It is never raised in a job of one process, which meets nobody.
    """


class ClusterEnvironment(Composable, ABC):
    """The place of this process among all processes of the job.

    Callers rely on this: every number is an int; reading starts no process, resolves no name and takes milliseconds;
    neither :meth:`detect` nor the constructor writes ``os.environ``; values are read when requested, so an unpickled
    copy in another process answers for that process. A missing or garbled variable raises ConfigurationError naming it.
    No method communicates but :meth:`join`.

    Checks: ENV-04 to ENV-06, ENV-10, ENV-14, ENV-16 to ENV-19, ENV-41.
    """

    name: ClassVar[str]
    """Alias by which users name the environment, e.g. ``"slurm"``."""

    priority: ClassVar[int] = 50
    """Priority among several detected environments, of which the highest is taken: the innermost launcher.

    Below 80, torchrun's, since a process of the launcher may start torchrun; above it only where the launcher sets
    torchrun's variables too, or is started by torchrun's workers. A tie is an error that names both.

    Checks: ENV-12.
    """

    features: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that the strategy leaves to the environment.

    ``"owns_launch"``: the processes are started only by the launcher of :meth:`make_launcher`, and not by the
    strategy's ``start_method``; the calling process has no rank. In the workers
    :attr:`creates_processes_externally` is True.

    ``"live_runtime"``: the numbers are those of a runtime that the launcher has connected this process to, and no
    variable holds them. The conformance kit then checks them in processes that the launcher starts.

    Checks: ENV-53.
    """

    num_workers: int | None = None
    """Number of processes under ``"owns_launch"``, with one device each, where the user has set it.

    None: one for each of the devices of each node.
    """

    @classmethod
    def recommendations(cls) -> list[str]:
        """Return settings to make outside of the processes, one sentence each.

        For ``torchhal doctor``, and for the log of a job that needs them. What is of no use to a running job belongs
        into :meth:`diagnostics`.

        Checks: ENV-64.
        """
        return []

    @classmethod
    @abstractmethod
    def detect(cls) -> bool:
        """Return whether this process was started by this environment.

        Writes nothing to ``os.environ``. False in a shell or notebook inside of an allocation, and in processes of all
        other launchers.

        Checks: ENV-01, ENV-02, ENV-13, ENV-71.
        """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True when every process of the job already exists; False when torchhal has to start them.

        Checks: ENV-09, ENV-40.
        """

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes of the job; 1 before a launch, but on nodes that were started by hand.

        Checks: ENV-03, ENV-04, ENV-40, ENV-60, ENV-62.
        """

    @abstractmethod
    def global_rank(self) -> int:
        """Return this process's rank among all, from 0 to :meth:`world_size` - 1.

        Checks: ENV-03, ENV-04.
        """

    @abstractmethod
    def local_rank(self) -> int:
        """Return this process's rank among those of its node, from 0 to :meth:`local_world_size` - 1.

        Checks: ENV-03, ENV-20.
        """

    @abstractmethod
    def node_rank(self) -> int:
        """Return this node's rank among all nodes, from 0.

        Checks: ENV-03, ENV-20.
        """

    @abstractmethod
    def local_world_size(self) -> int:
        """Return the number of processes on this node; nodes may differ.

        Checks: ENV-20, ENV-70.
        """

    def node_of(self, rank: int) -> int | str | None:
        """Return the node of any rank, to report which host is missing.

        Args:
            rank: a global rank.

        Returns:
            The node's rank or its name; None where this process can't determine it alone.

        Checks: ENV-42, ENV-76.
        """
        return None

    def num_nodes(self) -> int:
        """Return the number of nodes of the job, for ``num_nodes="auto"``.

        The default is right where all nodes have as many processes. On unequal ones it is wrong or raises: override it.

        Raises:
            ConfigurationError: the number of processes is no multiple of those on this node.

        Checks: ENV-42, ENV-50, ENV-60, ENV-62.
        """
        world, local = self.world_size(), self.local_world_size()
        if world % local:
            raise ConfigurationError(
                f"'num_nodes' must be an int under {type(self).__name__}, which doesn't say how many nodes there are "
                f"(got 'auto'; {world} process(es), {local} on this node)"
            )
        return world // local

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host on which rank 0 listens; the same on all ranks.

        MASTER_ADDR, where the launcher sets it. An IPv6 address has no brackets.

        Checks: ENV-07, ENV-08, ENV-61, ENV-72, ENV-79.
        """

    def job_id(self) -> str:
        """Return what distinguishes this job from another one whose ranks meet at the same address and port.

        Returns:
            The same string on all ranks; ``""`` where nothing identifies the job.

        Checks: ENV-43, ENV-74, ENV-75.
        """
        return ""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which rank 0 listens, from 1 to 65535; the same on all ranks, another one for another job.

        MASTER_PORT, where the launcher sets it. A ConfigurationError names a variable that is missing or out of range.

        Checks: ENV-07, ENV-61, ENV-74, ENV-75.
        """

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        """Receive the number of nodes and processes that were requested, before a launch.

        An environment in which torchhal starts the processes needs it. On several nodes, which a user starts by hand
        with NODE_RANK, MASTER_ADDR and MASTER_PORT set, this process counts as the first rank of its node from now on.

        Args:
            num_nodes: number of nodes.
            local_world_size: number of processes per node.

        Raises:
            ConfigurationError: a number below one, or, for several nodes that are started by hand, a variable that is
                missing, garbled or out of range, which the message names.

        Checks: ENV-15, ENV-40, ENV-62.
        """

    def make_launcher(self, *, device_type: str, prepare: Callable[[], None]) -> SupportsLaunch:
        """Return the launcher of the processes, under ``"owns_launch"``.

        Called in the process that calls fit, after :meth:`configure`.

        Args:
            device_type: torch's device type of the workers' devices.
            prepare: a worker calls it before it unpickles what it is sent.

        Raises:
            ConfigurationError: the environment does not start processes.

        Checks: ENV-43.
        """
        raise ConfigurationError(f"{type(self).__name__} starts no processes: it has no 'owns_launch' in its features")

    def set_rendezvous(self, address: str, port: int) -> None:
        """Receive the address where the ranks meet, from the launcher; :meth:`world_size` counts all ranks from now on.

        Called in the process that launches the others and is a rank itself.

        Args:
            address: host on which this process serves.
            port: port on which it serves.

        Checks: ENV-15, ENV-40.
        """

    def join(self, timeout: timedelta) -> None:
        """Determine what no variable holds of this process's place, by communicating with the other ranks if need be.

        Called on every rank when a run begins, not when a Trainer is created. Until then, requests for what isn't known
        raise RanksNotMetError. A second call, and one in a job of one process, does nothing; nor does any by default.

        Args:
            timeout: the longest wait for the other ranks.

        Raises:
            TorchhalError: a rank has not come within ``timeout``.

        Checks: ENV-51, ENV-52, ENV-60, ENV-63.
        """

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        """Raise an error when the job has another size than the user requested.

        Called on every rank before the set-up.

        Args:
            num_devices: number of processes per node that the user's settings mean.
            num_nodes: number of nodes that the user's settings mean.

        Raises:
            ConfigurationError: they differ; the message shows both numbers. Or this is one of several nodes that were
                started by hand, and one node is requested.

        Checks: ENV-11, ENV-60, ENV-62.
        """

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Signals, beside SIGTERM and SIGINT, by which the scheduler announces the end of the job.

        A fit that receives one saves and ends with the exit status 128 plus its number. The default is those of
        the job, for any launcher of its processes; an environment may set its own. A signal for which the program has
        installed a handler keeps that handler.
        """
        own: tuple[int, ...] | None = self.__dict__.get("_stop_signals")
        return current_job().stop_signals if own is None else own

    @stop_signals.setter
    def stop_signals(self, signals: Iterable[int]) -> None:
        self._stop_signals = tuple(int(signum) for signum in signals)  # signal.SIGUSR1 is an enum's member

    def run_again(self, signum: int, *, continues: bool) -> str:
        """Request another start of this job from the scheduler.

        Called on rank 0 when a signal has stopped a fit that has saved its state, while the other ranks wait for its
        return. Never raises.

        Args:
            signum: the signal.
            continues: True if the next start would continue from here: ``ckpt_path="last"`` and a checkpoint on disk.

        Returns:
            A message for the log; ``""`` where no new start was requested, or not for this signal.

        Checks: ENV-43, ENV-77, ENV-78.
        """
        return current_job().run_again(signum, continues=continues)

    def teardown(self) -> None:
        """Restore what this object changed, and only that.

        Idempotent; called on every rank.

        Checks: ENV-10, ENV-51, ENV-73, ENV-80.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
