"""The cluster-environment contract: who started the processes, which rank is this one, where do they meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class ClusterEnvironment(ABC):
    """Where this process stands among all processes of the job.

    Callers rely on this: every number is an int (ENV-05); reading starts no process, resolves no name and takes
    milliseconds (ENV-17); neither :meth:`detect` nor the constructor writes ``os.environ`` (ENV-10); values are
    read when asked for, so an unpickled copy in another process answers for that process (ENV-16). A missing or
    garbled variable raises ConfigurationError naming it (ENV-06).
    """

    name: ClassVar[str]
    """The alias users write."""

    priority: ClassVar[int] = 50
    """When several environments are detected, the highest is taken: the innermost launcher has the last word
    (ENV-12). A tie is an error that names both."""

    features: ClassVar[frozenset[str]] = frozenset()

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

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host on which rank 0 listens; the same on all ranks (ENV-07)."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which rank 0 listens, 1 to 65535; the same on all ranks, another for another job (ENV-07)."""

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        """Told before a launch what was asked for. An environment in which torchhal starts the processes needs it."""

    def set_rendezvous(self, address: str, port: int) -> None:
        """Told by the launcher, in the process that launches and is a rank itself, where the ranks meet: from now on
        :meth:`world_size` counts them all."""

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        """Raise ConfigurationError showing both numbers when the job isn't what the user asked for (ENV-11)."""

    def teardown(self) -> None:
        """Restore what this object changed, and only that. Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
