"""Serve the store of a job in this process."""

from __future__ import annotations

import errno
import json
import socket
import time
import uuid

from torchhal.distributed._reachability import check_leads_here
from torchhal.distributed._rendezvous_state import process_state
from torchhal.distributed._store_client import JOB, connect_within
from torchhal.distributed.stores import LONG, Store, TCPStore, join_address
from torchhal.errors import LaunchError


def start_store(address: str, port: int = 0, job: str = "") -> int:
    """Serve the job's store in this process, before any other process of the job is started, and return its port.

    Port 0 takes a free one, without the race of choosing first and binding later. On a loopback address the server
    listens there only: the store has no authentication.

    Args:
        address: host name or address at which the other processes reach this one.
        port: the port to bind; 0 for a free one.
        job: what distinguishes this job from others, see :meth:`ClusterEnvironment.job_id`.

    Raises:
        LaunchError: the port is taken, or ``address`` leads to another host.
    """
    bound, store, mark = serve(address, port, job)
    if not is_loopback(address):

        def serves_here(seconds: float) -> bool:
            try:
                return bool(json.loads(connect_within(seconds, address, bound).get(JOB))[1] == mark)
            except (OSError, RuntimeError, ValueError):
                return False

        check_leads_here(address, bound, serves_here)
    process_state().hosted[address, bound] = store
    return bound


def is_loopback(address: str) -> bool:
    return address in ("127.0.0.1", "::1", "localhost")


def serve(address: str, port: int, job: str) -> tuple[int, Store, str]:
    """Bind the port and return it, the store, and an id unique to this store."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    loopback = is_loopback(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((("127.0.0.1" if family == socket.AF_INET else "::1") if loopback else "", port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        what = "is already in use" if error.errno == errno.EADDRINUSE else f"can't be served ({error.strerror})"
        raise LaunchError(
            f"port {port} {what} on this machine, where the processes of the job should meet "
            f"({join_address(address, port)}): set MASTER_PORT to a free port, the same on every node; each job needs "
            "one of its own"
        ) from error
    bound: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1" if family == socket.AF_INET else "::1",
        bound,
        None,
        True,
        timeout=LONG,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    mark = uuid.uuid4().hex
    store.set(JOB, json.dumps([job, mark]))
    return bound, store, mark


def stop_store(address: str, port: int, *, ranks: int = 0, timeout: float = 0.0) -> None:
    """Stop serving when ``ranks`` have signed off or after ``timeout`` seconds: the store's job has ended."""
    store = process_state().hosted.pop((address, port), None)
    deadline = time.monotonic() + timeout
    while store is not None and store.add("left", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)
