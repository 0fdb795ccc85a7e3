"""Serve the rendezvous at which Horovod's gloo connects the ranks of a session; importing it imports Horovod."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from torchhal_horovod._slots import Slot


class _Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's, which inherits HEAD from a server of files: that says what is in the working directory."""

    def do_HEAD(self) -> None:
        self.send_status_code(HTTPStatus.METHOD_NOT_ALLOWED)


def serve(slots: Sequence[Slot], host: str) -> tuple[RendezvousHTTPServer, Callable[[], None]]:
    """Start the server of the ranks in ``slots``.

    Args:
        slots: of all ranks.
        host: name or address by which they reach this process.

    Returns:
        The server, and the function that ends it.
    """
    server = RendezvousHTTPServer((listening_address(host), 0), _Handler, False)
    server.init([SlotInfo(**asdict(slot)) for slot in slots])
    thread = threading.Thread(
        target=server.serve_forever, args=(0.05,), name="torchhal-horovod-rendezvous", daemon=True
    )
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server, stop


def listening_address(host: str) -> str:
    """Return the one address of this host that is ``host``, or ``""`` for all.

    All, where this host doesn't have the address (behind a translation of addresses), or has the name for itself on the
    loopback interface, as Debian writes it to /etc/hosts.
    """
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    return "" if address.startswith("127.") and address != host else address
