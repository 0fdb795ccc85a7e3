"""Find this process in a TPU slice of several hosts, or among processes that torch_xla has started."""

from __future__ import annotations

import os
from typing import ClassVar

from torchhal.cluster import LocalEnvironment, read_int, read_port
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError

_HOSTS = "TPU_WORKER_HOSTNAMES"
_HOST = "TPU_WORKER_ID"
_PROCESSES = "PJRT_LOCAL_PROCESS_COUNT"
_PROCESS = "PJRT_LOCAL_PROCESS_RANK"
_DEFAULT_PORT = 29400


class XLAEnvironment(LocalEnvironment):
    """The place of this process in a TPU slice.

    On several hosts the same script is started on each of them, and torchhal starts a process per chip there: as under
    ``local``, but the host's number and the first host's name are TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, and
    MASTER_PORT is 29400 unless it is set. Inside ``torch_xla.launch`` the processes of this host exist already,
    and meet at the same place.

    The variables are on every TPU host, for whatever runs there: on one host this is ``local``.
    """

    name: ClassVar[str] = "pjrt"
    priority: ClassVar[int] = 10

    @classmethod
    def detect(cls) -> bool:
        return len(_hosts()) > 1 or _started_by_torch_xla()

    @property
    def creates_processes_externally(self) -> bool:
        return _started_by_torch_xla()

    def world_size(self) -> int:
        if not _started_by_torch_xla():
            return super().world_size()
        return self.local_world_size() * len(_hosts_of_this_one())

    def global_rank(self) -> int:
        if _started_by_torch_xla():
            return self.node_rank() * self.local_world_size() + self.local_rank()
        return super().global_rank()

    def local_rank(self) -> int:
        return _local_rank_of_torch_xla() if _started_by_torch_xla() else super().local_rank()

    def local_world_size(self) -> int:
        return read_int(_PROCESSES, 1) if _started_by_torch_xla() else super().local_world_size()

    def node_rank(self) -> int:
        if _started_by_torch_xla():
            hosts = _hosts_of_this_one()
            return read_int(_HOST, 0, len(hosts) - 1) if len(hosts) > 1 else 0
        return super().node_rank()

    def num_nodes(self) -> int:
        return max(1, len(_hosts()))

    @property
    def main_address(self) -> str:
        return (_hosts() or ["127.0.0.1"])[0] if _started_by_torch_xla() else super().main_address

    @property
    def main_port(self) -> int:
        return _main_port() if _started_by_torch_xla() else super().main_port

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        if not _started_by_torch_xla():
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)
            return
        local, hosts = self.local_world_size(), len(_hosts_of_this_one())
        self.local_rank(), self.node_rank()  # refused where they are out of bounds
        if (local, hosts) != (num_devices, num_nodes):
            raise ConfigurationError(
                f"torch_xla.launch started {local} process(es) on each of {hosts} host(s), but {num_devices} device(s) "
                f"on {num_nodes} node(s) are asked for: make both the same, or say devices='auto'"
            )

    def read_rendezvous(self) -> tuple[str, int]:
        hosts = self._checked_hosts()
        return hosts[0], _main_port()

    def read_node_rank(self) -> int:
        return read_int(_HOST, 0, len(self._checked_hosts()) - 1)

    def _checked_hosts(self) -> list[str]:
        hosts = _hosts()
        if len(hosts) != self._num_nodes:
            raise ConfigurationError(
                f"{_HOSTS} names {len(hosts)} host(s), but {self._num_nodes} node(s) are asked for (num_nodes): make "
                "both the same"
            )
        return hosts


def _given(name: str) -> str:
    """Return a variable without blanks around it; empty when it isn't set."""
    return os.environ.get(name, "").strip()


def _hosts() -> list[str]:
    return [name.strip() for name in _given(_HOSTS).split(",") if name.strip()]


def _hosts_of_this_one() -> list[str]:
    """Return the hosts of the slice, ``[""]`` for one alone.

    Raises:
        ConfigurationError: this is another host than the first, and no others are named.
    """
    hosts = _hosts() or [""]
    if len(hosts) == 1 and _given(_HOST) not in ("", "0"):
        raise ConfigurationError(
            f"{_HOST}={_given(_HOST)} says that this is one of several hosts, but {_HOSTS} names no others (got "
            f"{_given(_HOSTS)!r}): the same list must be set on every host"
        )
    return hosts


def _local_rank_of_torch_xla() -> int:
    return read_int(_PROCESS, 0, read_int(_PROCESSES, 1) - 1)


def _main_port() -> int:
    return read_port("MASTER_PORT") if os.environ.get("MASTER_PORT") else _DEFAULT_PORT


def _started_by_torch_xla() -> bool:
    """Return True for one of several processes of ``torch_xla.launch``.

    torchhal's own have these variables, too.
    """
    several = _given(_PROCESSES) != "1" if _given(_PROCESSES) else _given(_PROCESS) not in ("", "0")
    return launched_by() is None and several
