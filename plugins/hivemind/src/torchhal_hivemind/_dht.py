"""Run this process's node in the network of peers, and compare the settings that must be equal before they train."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import hivemind
from hivemind.p2p import P2P
from hivemind.utils import get_dht_time

from torchhal.distributed.process import describe_exit
from torchhal.errors import ConfigurationError, DistributedError, LaunchError
from torchhal_hivemind import _sdk as sdk
from torchhal_hivemind._config import PEERS, Settings
from torchhal_hivemind._process_cleanup import end, guarded

_log = logging.getLogger("torchhal")

_DAYS = 24 * 3600.0


class Network:
    """A node that has started and, where there are ``initial_peers``, has reached at least one.

    Raises:
        DistributedError: none of ``initial_peers`` answered within ``join_timeout``.
        LaunchError: hivemind's daemon could not be started.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        sdk.free_locks()
        # hivemind puts its sockets into /tmp itself, and leaves those of the averagers; a longer path might not do
        self.sockets = tempfile.mkdtemp(prefix="torchhal-hivemind-", dir="/tmp")
        self._usual_sockets = P2P._UNIX_SOCKET_PREFIX
        P2P._UNIX_SOCKET_PREFIX = f"/unix{self.sockets}/"
        with guarded(self.sockets):
            self.dht = hivemind.DHT(
                initial_peers=list(settings.initial_peers) or None,
                host_maddrs=list(settings.host_addresses) or None,
                announce_maddrs=list(settings.announced_addresses) or None,
                client_mode=settings.client_mode,
                startup_timeout=settings.join_timeout,
                start=True,
                await_ready=False,
            )
        self.daemon = socket.socket(socket.AF_UNIX)
        """A connection that ends with hivemind's daemon: a child of the node's process, which tolerates it."""
        try:
            self._await()
            self.daemon.connect(self.dht.run_coroutine(self.dht._get_p2p_daemon_listen_maddr)["unix"])
            self.addresses = tuple(map(str, self.dht.get_visible_maddrs()))
        except BaseException:
            self.close(0.0)
            raise

    def _await(self) -> None:
        started = time.monotonic()
        deadline = started + self.settings.join_timeout + 5.0  # the daemon's own time-out has a better message
        cause: Exception | None = None
        while cause is None:
            try:
                self.dht.wait_until_ready(timeout=1.0)
                return
            except FutureTimeoutError as error:
                if time.monotonic() > deadline or not self.dht.is_alive():
                    cause = error
            except Exception as error:
                cause = error
        peers, said = self.settings.initial_peers, str(cause)
        if peers and ("bootstrap" in said or isinstance(cause, FutureTimeoutError)):
            raise DistributedError(
                f"none of 'initial_peers' answered within {self.settings.join_timeout:g} s ({', '.join(peers)}): is "
                "one of them still running, and can it be reached from here?"
            ) from cause
        if isinstance(cause, FutureTimeoutError):
            said = f"no answer within {time.monotonic() - started:.0f} s"
            if not self.dht.is_alive():
                said = f"hivemind's process {self.dht.name!r} {describe_exit(self.dht.exitcode)}"
        raise LaunchError(f"hivemind's network daemon did not start: {said or type(cause).__name__}") from cause

    def invite(self) -> None:
        """Print how others join, once the first peer of a run is ready."""
        elsewhere = [address for address in self.addresses if not address.startswith(("/ip4/127.", "/ip6/::1/"))]
        here = [address for address in self.addresses if address not in elsewhere]
        print(
            f"torchhal: others join run {self.settings.run_id!r} with the same script and "
            f"{PEERS}={','.join([*elsewhere, *here])}",
            file=sys.stderr,
            flush=True,
        )

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Compare with what the first peer of this run has published.

        Raises:
            ConfigurationError: something differs, which it names.

        Args:
            mine: plain data by name.
        """
        key = f"{self.settings.run_id}_agreement"
        found = self.dht.get(key, latest=True)
        theirs = None if found is None else found.value
        if not isinstance(theirs, Mapping):
            # as long as the longest run: a run_id is for one run
            self.dht.store(key, dict(mine), get_dht_time() + 30 * _DAYS)
            return
        different = [name for name in mine if theirs.get(name) != mine[name]]
        if different:
            raise ConfigurationError(
                f"the peers of run {self.settings.run_id!r} have "
                + " and ".join(f"{name}={theirs.get(name)!r} (here it is {mine[name]!r})" for name in different)
                + ": all must use the same, or this is another run and needs a 'run_id' of its own"
            )

    def donors(self) -> dict[bytes, float]:
        """Return the other peers that share the run's state, each with the epoch that it has reached."""
        found = self.dht.get(f"{self.settings.run_id}_state_averager.all_averagers", latest=True)
        entries: Any = {} if found is None else found.value
        if not isinstance(entries, Mapping):
            return {}
        mine = self.dht.peer_id.to_bytes()
        return {
            peer: float(entry.value)
            for peer, entry in entries.items()
            if peer != mine and isinstance(entry.value, int | float)
        }

    def hush(self) -> None:
        """Mute the node before the averagers end, and wait up to 2 s for what they have requested from it.

        Otherwise it would log an error for each that has ended, and sleep 3 s.
        """
        if self.dht.is_alive():
            try:
                self.dht.run_coroutine(_say_nothing, return_future=True).result(2.0)
            except Exception:
                _log.debug("the node of the network is busy", exc_info=True)

    def close(self, timeout: float) -> None:
        """Leave the network; the node is killed after ``timeout`` seconds, in which it may still sleep."""
        if self.dht.is_alive() and timeout > 0:
            self.dht.shutdown_timeout = timeout
            log = logging.getLogger("hivemind.dht.dht")
            level = log.level
            log.setLevel(logging.ERROR)  # it warns that it will terminate the node "the hard way", as is meant
            self.dht.shutdown()
            log.setLevel(level)
        end([self.dht], 0.0)
        self.daemon.close()
        P2P._UNIX_SOCKET_PREFIX = self._usual_sockets
        shutil.rmtree(self.sockets, ignore_errors=True)


async def _say_nothing(dht: hivemind.DHT, node: Any) -> None:
    """Discard the output of the node's process, that of Python's own exit included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
