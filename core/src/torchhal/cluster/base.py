"""The cluster-environment contract: who started the processes, which rank is this one, where do they meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from torchhal.cluster._job import current_job
from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal.launchers.base import Launcher


class RanksNotMetError(ConfigurationError):
    """No variable says what was asked for; the ranks find it out when they meet (:meth:`ClusterEnvironment.join`)."""


class ClusterEnvironment(ABC):
    """Where this process stands among all processes of the job.

    Callers rely on this: every number is an int (ENV-05); reading starts no process, resolves no name and takes
    milliseconds (ENV-17); neither :meth:`detect` nor the constructor writes ``os.environ`` (ENV-10); values are
    read when asked for, so an unpickled copy in another process answers for that process (ENV-16). A missing or
    garbled variable raises ConfigurationError naming it (ENV-06). None communicates but :meth:`join`.
    """

    name: ClassVar[str]
    """The alias users write."""

    priority: ClassVar[int] = 50
    """When several environments are detected, the highest is taken: the innermost launcher has the last word
    (ENV-12). A tie is an error that names both."""

    features: ClassVar[frozenset[str]] = frozenset()
    """What is left to the environment.

    ``owns_launch``: the processes are started by the launcher of :meth:`make_launcher`, the only one too, and not as
    the strategy's ``start_method`` says; the caller is no rank. In them :attr:`creates_processes_externally` is True.
    """

    num_workers: int | None = None
    """Under ``owns_launch``, the processes in all, with one device each, where the environment was told so; None: one
    for each of the devices of each node."""

    @classmethod
    def recommendations(cls) -> list[str]:
        """What had better be set outside of the processes, a sentence each: for ``torchhal doctor``, and for the log of
        a job that needs it."""
        return []

    @classmethod
    @abstractmethod
    def detect(cls) -> bool:
        """Whether this process was started by this environment (ENV-01, ENV-02, ENV-13)."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True when every process of the job already exists; False when torchhal has to start them (ENV-09)."""

    @abstractmethod
    def world_size(self) -> int:
        """Number of processes of the job; 1 before a launch."""

    @abstractmethod
    def global_rank(self) -> int:
        """This process among all, 0 to world_size - 1 (ENV-03)."""

    @abstractmethod
    def local_rank(self) -> int:
        """This process among those of its node, 0 to local_world_size - 1."""

    @abstractmethod
    def node_rank(self) -> int:
        """This node among all nodes."""

    @abstractmethod
    def local_world_size(self) -> int:
        """Number of processes on this node (ENV-20: nodes may differ)."""

    def node_of(self, rank: int) -> int | str | None:
        """The node of any rank, or its name, to say which host never came; None where this process can't tell by
        itself."""
        return None

    def num_nodes(self) -> int:
        """Number of nodes of the job, for ``num_nodes="auto"``; the default is right where they are of one size."""
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
        """Host on which rank 0 listens; the same on all ranks (ENV-07)."""

    def job_id(self) -> str:
        """What tells this job from another one whose ranks meet at the same address and port, the same on all ranks;
        "" where nothing does."""
        return ""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which rank 0 listens, 1 to 65535; the same on all ranks, another for another job (ENV-07)."""

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        """Told before a launch what was asked for. An environment in which torchhal starts the processes needs it."""

    def make_launcher(self, *, device_type: str, prepare: Callable[[], None]) -> Launcher:
        """Under ``owns_launch``, what starts the processes on devices of torch's ``device_type``.

        Called after :meth:`configure`. A worker calls ``prepare`` before what it is sent is unpickled.
        """
        raise ConfigurationError(f"{type(self).__name__} starts no processes: it has no 'owns_launch' in its features")

    def set_rendezvous(self, address: str, port: int) -> None:
        """Told by the launcher, in the process that launches and is a rank itself, where the ranks meet: from now on
        :meth:`world_size` counts them all."""

    def join(self, timeout: timedelta) -> None:
        """Find out what no variable says of where this process stands, by asking the other ranks if need be.

        Called on every rank when a run begins, not when a Trainer is made. Until then what isn't known raises
        RanksNotMetError. Waits for the other ranks no longer than ``timeout``.
        """

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        """Raise ConfigurationError showing both numbers when the job isn't what the user asked for (ENV-11)."""

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Signals, beside SIGTERM and SIGINT, by which the scheduler announces the end: a fit that gets one saves and
        ends with 128 and its number. Those of the job, whoever has started the processes in it; an environment may set
        its own. One for which the program has installed a handler stays the program's."""
        own: tuple[int, ...] | None = self.__dict__.get("_stop_signals")
        return current_job().stop_signals if own is None else own

    @stop_signals.setter
    def stop_signals(self, signals: Iterable[int]) -> None:
        self._stop_signals = tuple(signals)

    def run_again(self, signum: int, *, continues: bool) -> str:
        """Ask the scheduler for another life of this job. Called on rank 0 when a signal has stopped a fit that has
        saved its state, while the other ranks wait for its return. Never raises.

        Args:
            signum: the signal.
            continues: whether the next life would go on from here: ``ckpt_path="last"`` and a checkpoint on disk.

        Returns:
            What to tell whoever reads the log, "" for nothing: it is not asked for, or not for this signal.
        """
        return current_job().run_again(signum, continues=continues)

    def teardown(self) -> None:
        """Restore what this object changed, and only that. Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
