"""Verify that the rendezvous address leads to this host. Imports no torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from torchhal.distributed.stores import join_address
from torchhal.errors import LaunchError

_UNKNOWN_NAME = 30.0
"""Seconds that a name server may need until it resolves a pod or host that has just started."""

_ELSEWHERE = 5.0
"""Seconds to test whether an address not of this host is translated to it, as a cluster's services are."""


def check_leads_here(address: str, port: int, serves_here: Callable[[float], bool]) -> None:
    """Return when other hosts can reach this process at ``address``, where it serves ``port``.

    Args:
        address: the host name or address that the ranks were given.
        port: the port that this process serves.
        serves_here: returns whether, within so many seconds, a connection to the address reaches this process's own
            store.

    Raises:
        LaunchError: the address is another host's, or unused, so that the other ranks would time out.
    """
    start = time.monotonic()
    while True:
        found, problem = _resolve(address)
        if any(map(_is_own, found)):
            return
        waited = time.monotonic() - start
        if found and serves_here(max(0.5, _ELSEWHERE - waited)):
            return
        if waited > (_ELSEWHERE if found else _UNKNOWN_NAME):
            break
        time.sleep(0.2)
    where = f"is {', '.join(found)}, another host's" if found else f"is not known here ({problem})"
    host = socket.gethostname()
    raise LaunchError(
        f"rank 0 runs on {host} and serves {join_address(address, port)}, where the other ranks look for it, but "
        f"{address} {where}: set MASTER_ADDR to an address of {host}, the same for all ranks"
    )


def is_own_address(address: str) -> bool:
    """Return whether ``address``, a name or a literal, is this host's."""
    return any(map(_is_own, _resolve(address)[0]))


def _resolve(address: str) -> tuple[list[str], str]:
    try:
        rows = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], error.strerror or str(error)
    return list(dict.fromkeys(str(row[4][0]) for row in rows)), ""


def _is_own(literal: str) -> bool:
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(literal, 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError:
        return False
    return True
