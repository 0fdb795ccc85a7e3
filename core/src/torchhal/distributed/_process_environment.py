"""Define the part of a cluster environment that a rendezvous reads."""

from __future__ import annotations

from typing import Protocol


class ProcessEnvironment(Protocol):
    """The ranks of this process and the address of the rendezvous.

    ``torchhal.cluster.ClusterEnvironment`` is the contract with these members.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True when every process of the job already exists."""

    @property
    def main_address(self) -> str:
        """Host on which rank 0 listens."""

    @property
    def main_port(self) -> int:
        """Port on which rank 0 listens."""

    def world_size(self) -> int:
        """Return the number of processes of the job."""

    def global_rank(self) -> int:
        """Return this process's rank among all."""

    def node_of(self, rank: int) -> int | str | None:
        """Return the node of any rank, or None where this process can't determine it alone."""

    def job_id(self) -> str:
        """Return an id that distinguishes this job from another one at the same address."""
