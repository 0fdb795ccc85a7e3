"""MPI: processes that mpirun or mpiexec started, which meet over a store, not over MPI."""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

from torchhal.cluster._env_vars import given, read_int
from torchhal.cluster._external import ExternalEnvironment
from torchhal.cluster._topology import port_from_job_id
from torchhal.cluster.base import RanksNotMetError
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError

_PLACE_SIZE = 512
"""Bytes for a host's name, which has at most 255, and a port."""


_HEAD_START = 5.0
"""Seconds that the others wait longer than rank 0, whose error names the missing ranks and ends the job."""


class _MPIEnvironment(ExternalEnvironment):
    """A process that a launcher of MPI has started.

    These launchers provide each process's rank and how many share its host, but neither the host's number nor rank 0's
    host: the latter is read from MASTER_ADDR and MASTER_PORT, or from mpi4py where it is installed; the ranks
    determine the former by communicating. A job of one process is not detected: torchhal may start more.
    """

    rank_variables: ClassVar[tuple[str, ...]]
    size_variables: ClassVar[tuple[str, ...]]
    local_rank_variables: ClassVar[tuple[str, ...]]
    local_size_variables: ClassVar[tuple[str, ...]]
    """Variables of each number; the first that is set counts."""

    def __init__(self) -> None:
        super().__init__()
        self._meeting: tuple[str, int] | None = None

    @classmethod
    def detect(cls) -> bool:
        size, rank = given(_first(cls.size_variables)), given(_first(cls.rank_variables))
        return launched_by() is None and size != "1" and bool(rank or size)

    def world_size(self) -> int:
        return read_int(_first(self.size_variables), 1)

    def global_rank(self) -> int:
        return read_int(_first(self.rank_variables), 0)

    def local_rank(self) -> int:
        return read_int(_first(self.local_rank_variables), 0)

    def local_world_size(self) -> int:
        return read_int(_first(self.local_size_variables), 1)

    def node_rank(self) -> int:
        return 0 if self._on_one_host() else super().node_rank()

    def num_nodes(self) -> int:
        return 1 if self._on_one_host() else super().num_nodes()

    def _on_one_host(self) -> bool:
        return self.local_world_size() == self.world_size()

    def _job(self) -> str:
        """Return what distinguishes this job from others on the host; empty where the launcher provides nothing."""
        return ""

    def _address(self) -> str:
        return "127.0.0.1" if self._on_one_host() and self._job() else self._from_mpi()[0]

    def _port(self) -> int:
        return port_from_job_id(self._job()) if self._on_one_host() and self._job() else self._from_mpi()[1]

    def _from_mpi(self) -> tuple[str, int]:
        """Return rank 0's host and a free port there, from MPI itself.

        The same on all ranks, each of which has to call it.
        """
        if self._meeting is None:
            self._meeting = self._from_azure()
        if self._meeting is None:
            self._require_mpi4py()
            raise RanksNotMetError(f"where the ranks of {self.launcher} meet, MPI tells them when a run begins")
        return self._meeting

    def join(self, timeout: timedelta) -> None:
        if self._meeting is None and not self._says_meeting():
            self._meeting = self._ask_rank_0(timeout)
        super().join(timeout)

    def _says_meeting(self) -> bool:
        try:
            _ = self.main_address, self.main_port
        except RanksNotMetError:
            return False
        return True

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        with suppress(RanksNotMetError):
            _ = self.main_address, self.main_port  # raises now for a missing variable, not when a run begins
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)

    def _from_azure(self) -> tuple[str, int] | None:
        """Return the address that Azure ML's MPI jobs set as ``address:port``, in one variable."""
        text = given("AZ_BATCH_MASTER_NODE")
        if not text:
            return None
        address, _, port = text.rpartition(":")
        if not address or not port.isdigit():
            raise ConfigurationError(f"AZ_BATCH_MASTER_NODE must be 'address:port' in the environment (got {text!r})")
        return address.strip("[]"), int(port)

    def _require_mpi4py(self) -> None:
        missing = _missing()
        if importlib.util.find_spec("mpi4py") is None:
            raise ConfigurationError(
                f"{' and '.join(missing)} must be set in the environment of all ranks, to the host of rank 0 and a "
                f"free port there: {self.launcher} doesn't say them, and mpi4py, which could, isn't installed"
            )

    def _ask_rank_0(self, timeout: timedelta) -> tuple[str, int]:
        missing = _missing()
        try:
            MPI = _wait_for_all_ranks_in_mpi_init(timeout)
        except ImportError as error:  # importing its wheels searches for a library
            raise ConfigurationError(
                f"mpi4py is installed, but finds no MPI library ({error}): set {' and '.join(missing)} instead, or "
                "LD_LIBRARY_PATH to where the library of the MPI is that started this process"
            ) from error

        world = MPI.COMM_WORLD
        if world.Get_size() != self.world_size():
            raise ConfigurationError(
                f"mpi4py counts {world.Get_size()} process(es), but {self.launcher} started {self.world_size()}: "
                f"mpi4py has found another MPI. Set {' and '.join(missing)} instead, or say in MPI4PY_MPIABI which one "
                "its wheel is to load"
            )
        try:
            return _place_of_rank_0(world, MPI.BYTE, timeout, f"meeting of {self.launcher}'s ranks over MPI")
        except BaseException:
            # This process, having printed its error, would wait in MPI_Finalize for the missing ranks.
            atexit.register(_abort, world)
            raise


def _wait_for_all_ranks_in_mpi_init(timeout: timedelta) -> Any:
    """Return mpi4py's module, which initialises MPI when it is imported.

    The import waits in C for all ranks, holding the GIL, so that no Python thread can report: after ``timeout``
    faulthandler prints this rank's stack and ends the process.
    """
    faulthandler.dump_traceback_later(timeout.total_seconds(), exit=True, file=2)
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def _place_of_rank_0(world: Any, kind: Any, timeout: timedelta, name: str) -> tuple[str, int]:
    """Return rank 0's host and a free port there, on every rank of ``world``.

    Each rank sends a request to rank 0, which replies: so rank 0 can name the missing ranks. Nothing waits in C.

    Raises:
        CollectiveTimeoutError: some have not arrived within ``timeout``.
    """
    from torchhal.distributed._roll_call import wait_until  # imports torch

    deadline = time.monotonic() + timeout.total_seconds()
    place = bytearray(_PLACE_SIZE)
    silent: dict[int, Any] = {}
    sent: list[Any] = []
    if world.Get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            text = f"{socket.gethostname()} {free.getsockname()[1]}".encode()
        place[: len(text)] = text
        for other in range(1, world.Get_size()):
            silent[other] = world.Irecv([bytearray(1), kind], source=other)
    else:
        sent.append(world.Isend([bytearray(1), kind], dest=0))
        silent[0] = world.Irecv([place, kind], source=0)

    def all_here() -> bool:
        for other in [other for other, request in silent.items() if request.Test()]:
            del silent[other]
            if other != 0:
                sent.append(world.Isend([place, kind], dest=other))
        return not silent and all(request.Test() for request in sent)

    wait_until(all_here, timeout, name=name, absent=lambda: sorted(silent))
    # MPICH 4.0 over UCX: without a barrier every other job hung in MPI_Finalize, one rank in UCX and the rest in the
    # barrier; the cause is unknown. With it, 3 of 500 that end at once hang, and 0 of 250 later ones.
    left = timedelta(seconds=max(0.0, deadline - time.monotonic()) + _HEAD_START * (world.Get_rank() != 0))
    wait_until(world.Ibarrier().Test, left, name=name, absent=list)
    address, port = place.rstrip(b"\0").decode().split()
    return address, int(port)


def _abort(world: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    world.Abort(1)


class OpenMPIEnvironment(_MPIEnvironment):
    """A process started by Open MPI's ``mpirun``.

    OMPI_COMM_WORLD_NODE_RANK isn't read: it is a rank on the node, not the node's.
    """

    name: ClassVar[str] = "openmpi"
    priority: ClassVar[int] = 61
    launcher: ClassVar[str] = "mpirun"
    rank_variables: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_RANK",)
    size_variables: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_variables: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size_variables: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def _job(self) -> str:
        return given("PMIX_NAMESPACE")

    def job_id(self) -> str:
        return f"mpirun's job {self._job()}" if self._job() else ""


class MPICHEnvironment(_MPIEnvironment):
    """A process started by Hydra or PALS.

    Hydra is the ``mpiexec`` of MPICH and of the MPIs derived from it, PALS that of HPE Cray machines under PBS.
    """

    name: ClassVar[str] = "mpich"
    priority: ClassVar[int] = 60
    launcher: ClassVar[str] = "mpiexec"
    rank_variables: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PALS_RANKID")
    size_variables: ClassVar[tuple[str, ...]] = ("PMI_SIZE", "PALS_SIZE")
    local_rank_variables: ClassVar[tuple[str, ...]] = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID")
    local_size_variables: ClassVar[tuple[str, ...]] = ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def _missing() -> list[str]:
    return [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given(name)]


def _first(names: tuple[str, ...]) -> str:
    """Return the first of these variables that is set; the first of all if none is, for messages."""
    return next((name for name in names if given(name)), names[0])
