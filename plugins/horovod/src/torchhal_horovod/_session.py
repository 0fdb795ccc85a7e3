"""Initialise Horovod among the ranks of a strategy, with a rendezvous server of rank 0's, and end it again."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from torchhal.cluster import ClusterEnvironment
from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError, DistributedError
from torchhal.vendor_package import restored_environ
from torchhal_horovod import _sdk as sdk
from torchhal_horovod._slots import Slot, assign

_START = 120.0
"""Seconds that Horovod has for connecting ranks that have met just before."""
_END = 10.0
"""Seconds for ending it: ranks that are gone answer no more."""

_LOOPBACK = "127.0.0.1"
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_VARIABLES = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_ELASTIC", *_SERVER,
)  # fmt: skip


class Session:
    """Horovod between :meth:`begin` and :meth:`end`.

    The rendezvous server of ``horovodrun`` serves one initialisation of a job. So each session has a server of its own,
    in rank 0's process, whatever has started the processes.
    """

    def __init__(self) -> None:
        self._owned = ExitStack()

    def begin(self, environment: ClusterEnvironment, timeout: float) -> Any:
        """Initialise Horovod among the ranks of torch's process group, and return ``horovod.torch``.

        What the user's program has initialised already is used, and left alone in the end.

        Args:
            environment: the numbers of this process.
            timeout: of Horovod's messages, in seconds.

        Raises:
            ConfigurationError: Horovod can't be imported, or was initialised with other numbers.
            DistributedError: its ranks didn't connect.
        """
        hvd = sdk.load()
        rank, size = environment.global_rank(), environment.world_size()
        if hvd.is_initialized():
            if (hvd.rank(), hvd.size()) != (rank, size):
                raise ConfigurationError(
                    f"this process has called hvd.init() as rank {hvd.rank()} of {hvd.size()}, but the strategy was "
                    f"set up as rank {rank} of {size}: leave hvd.init() to the strategy"
                )
            return hvd
        try:
            variables = self._variables(environment, timeout)
            # Horovod reads them in init() alone; to the environment ``horovod``, horovodrun's own mean this job
            with restored_environ(*_VARIABLES):
                for name in _VARIABLES:
                    os.environ.pop(name, None)
                os.environ.update(variables)
                self._initialise(hvd)
        except BaseException:
            self._owned.close()
            raise
        return hvd

    def _variables(self, environment: ClusterEnvironment, timeout: float) -> dict[str, str]:
        """Return the variables that Horovod is initialised with; rank 0 starts the server that they name."""
        rank, size = environment.global_rank(), environment.world_size()
        node = environment.node_rank()
        slots = assign([node] if size == 1 else collectives.all_gather_object(node, name="set-up of Horovod"))
        variables = {f"HOROVOD_{name.upper()}": str(value) for name, value in asdict(slots[rank]).items()}
        variables |= {
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(timeout))),
        }  # fmt: skip
        if size > 1:  # without a server, Horovod is for one process
            host = _LOOPBACK if _on_one_host(slots) else environment.main_address
            port = self._serve(slots, host) if rank == 0 else 0
            port = collectives.all_gather_object(port, name="set-up of Horovod")[0]
            variables |= dict(zip(_SERVER, (host, str(port)), strict=True))
            if interface := os.environ.get("HOROVOD_GLOO_IFACE") or _interface(environment, slots):
                variables["HOROVOD_GLOO_IFACE"] = interface
        return variables

    def _serve(self, slots: list[Slot], host: str) -> int:
        """Start the rendezvous server, which runs to the end of the session, and return its port."""
        from torchhal_horovod import _rendezvous as rendezvous

        server, stop = rendezvous.serve(slots, host)
        self._owned.callback(stop)
        port: int = server.server_port
        return port

    def _initialise(self, hvd: Any) -> None:
        try:
            sdk.call(hvd.init, "initialisation", _START)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, DistributedError):
                raise
            raise DistributedError(f"Horovod can't be initialised ({error}): its own messages say more") from error
        self._owned.callback(_shut_down, hvd)

    def end(self) -> None:
        """Shut Horovod down if this session has initialised it, and its server."""
        self._owned.close()


def _on_one_host(slots: Sequence[Slot]) -> bool:
    return len({slot.hostname for slot in slots}) == 1


def _shut_down(hvd: Any) -> None:
    with suppress(DistributedError):  # a rank that is stuck: this process is about to end
        sdk.call(hvd.shutdown, "shutdown", _END)


def _interface(environment: ClusterEnvironment, slots: list[Slot]) -> str:
    """Return the network interface that Horovod's gloo shall use; empty for that of the host's own name.

    torch's gloo takes GLOO_SOCKET_IFNAME, and the loopback interface where the host's name has no address.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip():
        return chosen
    names = [name for _, name in socket.if_nameindex()]
    if _on_one_host(slots):
        return next((name for name in ("lo", "lo0") if name in names), "")
    return _interface_towards(environment.main_address)


def _interface_towards(host: str) -> str:
    """Return the interface whose address this host sends from to ``host``; empty where that isn't known."""
    import psutil  # which Horovod needs too

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == own for one in addresses):
            return "" if own.startswith("127.") or own == "::1" else name
    return ""
