"""horovodrun: processes that it has started on one host or several, with gloo."""

from __future__ import annotations

import http.client
import os
import socket
import time
from datetime import timedelta
from typing import ClassVar

from torchhal.cluster import (
    ExternalEnvironment,
    RanksNotMetError,
    port_from_job_id,
    read_address,
    read_int,
    read_port,
)
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError, DistributedError

SERVER = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
SERVER_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_PATH = "/torchhal/main_address"
_REQUEST_TIMEOUT = 10.0


class HorovodEnvironment(ExternalEnvironment):
    """A process of a job that ``horovodrun`` has started without MPI, on one host or several.

    The ranks meet at MASTER_ADDR and MASTER_PORT where these are set. Else on one host they meet there, and on several
    at an address that rank 0 leaves with horovodrun's rendezvous server when a run begins; the port is derived from
    that server's. With ``horovodrun --mpi`` the processes are mpirun's, and the environment is ``openmpi`` or
    ``mpich``. A job of one process is not detected: torchhal may start more.

    Source: ``horovod/runner/gloo_run.py`` of Horovod 0.28.1.
    """

    name: ClassVar[str] = "horovod"
    priority: ClassVar[int] = 40
    launcher: ClassVar[str] = "horovodrun"

    def __init__(self) -> None:
        super().__init__()
        self._address_of_rank_0 = ""

    @classmethod
    def detect(cls) -> bool:
        return (
            launched_by() is None
            and bool(_given("HOROVOD_RANK") and _given(SERVER))
            and _given("HOROVOD_SIZE") not in ("", "1")
        )

    def world_size(self) -> int:
        return read_int("HOROVOD_SIZE", 1)

    def global_rank(self) -> int:
        return read_int("HOROVOD_RANK", 0)

    def local_rank(self) -> int:
        return read_int("HOROVOD_LOCAL_RANK", 0)

    def local_world_size(self) -> int:
        return read_int("HOROVOD_LOCAL_SIZE", 1)

    # HOROVOD_CROSS_RANK counts the hosts that have a process of this local rank: on unequal hosts it isn't the node's

    def node_rank(self) -> int:
        return 0 if self._on_one_host else super().node_rank()

    def num_nodes(self) -> int:
        return 1 if self._on_one_host else super().num_nodes()

    @property
    def _on_one_host(self) -> bool:
        return self.local_world_size() == self.world_size()

    @property
    def main_address(self) -> str:
        if _given("MASTER_ADDR"):
            return read_address("MASTER_ADDR")
        if self._on_one_host:
            return "127.0.0.1"
        if not self._address_of_rank_0:
            raise RanksNotMetError("the host of rank 0 is known when a run begins: set MASTER_ADDR to know it before")
        return self._address_of_rank_0

    @property
    def main_port(self) -> int:
        return read_port("MASTER_PORT") if _given("MASTER_PORT") else port_from_job_id(*_server())

    def job_id(self) -> str:
        return f"horovodrun's job at {':'.join(_server())}"

    def join(self, timeout: timedelta) -> None:
        if not (self._on_one_host or self._address_of_rank_0 or _given("MASTER_ADDR")):
            address, port = _server()
            if self.global_rank() == 0:
                self._address_of_rank_0 = _leave_address(address, int(port))
            else:
                self._address_of_rank_0 = _ask_for_address(address, int(port), timeout.total_seconds())
        super().join(timeout)

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        if _given("HOROVOD_ELASTIC") == "1":
            raise ConfigurationError(
                "horovodrun --min-np/--max-np exchanges ranks inside of running processes, which Trainer can't follow: "
                "start a fixed number with 'horovodrun -np', use 'torchrun --max-restarts', which starts the ranks "
                "again from the last checkpoint, or strategy 'torchft', whose groups leave and come back"
            )
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)


def _given(name: str) -> str:
    return os.environ.get(name, "").strip()


def _server() -> tuple[str, str]:
    """Return address and port of horovodrun's rendezvous server."""
    return read_address(SERVER), str(read_port(SERVER_PORT))


def _leave_address(server: str, port: int) -> str:
    """Leave the address by which this host reaches the server with it, and return that."""
    try:
        with socket.create_connection((server, port), timeout=_REQUEST_TIMEOUT) as connection:
            own: str = connection.getsockname()[0]
    except OSError as error:
        raise _no_answer(server, port, error) from error
    _request(server, port, "PUT", own)
    return own


def _ask_for_address(server: str, port: int, timeout: float) -> str:
    """Return the address that rank 0 has left, or will leave within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        status, text = _request(server, port, "GET")
        if status == http.client.OK:
            return text
        if time.monotonic() > deadline:
            raise DistributedError(
                f"rank 0 has not left its address with horovodrun's server at {server}:{port} in {timeout:g} s: does "
                "it call the same method of its Trainer?"
            )
        time.sleep(0.05)


def _request(server: str, port: int, method: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server, port, timeout=_REQUEST_TIMEOUT)
    try:
        connection.request(method, _PATH, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(server, port, error) from error
    finally:
        connection.close()


def _no_answer(server: str, port: int, error: Exception) -> DistributedError:
    return DistributedError(
        f"horovodrun's rendezvous server at {server}:{port} doesn't answer ({type(error).__name__}: {error}), and rank "
        "0's address is known there alone: set MASTER_ADDR and MASTER_PORT if horovodrun has ended"
    )
