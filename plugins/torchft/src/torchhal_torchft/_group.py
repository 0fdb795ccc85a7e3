"""Run one replica group: TorchFT's Manager, and everything that must end with it."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from torchhal.errors import ConfigurationError, DistributedError
from torchhal_torchft import _timer_thread as timer_thread
from torchhal_torchft._config import START, Settings
from torchhal_torchft._quorum_thread import Worker
from torchhal_torchft._transport import StateTransport

_LOOK = 0.25  # seconds between two calls of ``look`` while waiting for a quorum
_TRIES = 3  # failed downloads of the others' state in a row


class ReplicaGroup(Manager):  # type: ignore[misc]
    """The replica group of this process, one of those that train together.

    The quorum is waited for before the forward pass (TorchFT's ``use_async_quorum=False``): a group that joins takes
    over the others' state there, and its first batch counts.

    Args:
        state: what another group takes over; called in a thread while this one waits.
        load_state: takes that over.
        look: called periodically while waiting; what it raises ends the wait.

    Raises:
        DistributedError: the lighthouse does not answer.
        ConfigurationError: ``hostname`` does not resolve.
    """

    _executor: Any

    def __init__(
        self,
        settings: Settings,
        *,
        state: Callable[[], dict[str, Any]],
        load_state: Callable[[dict[str, Any]], None],
        look: Callable[[], object],
    ) -> None:
        self.settings = settings
        self.taken = 0
        """How often the state of another group has been taken over."""
        self._look = look
        self._failed_downloads = 0
        try:
            socket.getaddrinfo(settings.hostname, None)
        except OSError as error:
            raise ConfigurationError(
                f"the other replica groups could not reach this one: its host's name {settings.hostname!r} can't be "
                f"resolved ({error}); give hostname=..., a name or address of this host"
            ) from error
        self._server_store = TCPStore(settings.hostname, 0, is_master=True, wait_for_workers=False)
        transport = StateTransport(settings.hostname, settings.timeout)
        try:
            super().__init__(
                pg=ProcessGroupGloo(timeout=settings.timeout),
                load_state_dict=load_state,
                state_dict=state,
                min_replica_size=settings.min_replica_size,
                use_async_quorum=False,
                timeout=settings.timeout,
                quorum_timeout=settings.quorum_timeout,
                connect_timeout=settings.connect_timeout,
                rank=0,
                world_size=1,
                store_addr=settings.hostname,
                store_port=self._server_store.port,
                lighthouse_addr=settings.lighthouse_addr,
                replica_id=settings.replica_id,
                port=settings.port,
                hostname=settings.hostname,
                heartbeat_interval=settings.heartbeat_interval,
                checkpoint_transport=transport,
                init_sync=settings.init_sync,
                max_retries=settings.max_retries,
                quorum_retries=settings.quorum_retries,
            )
        except RuntimeError as error:
            transport.shutdown()
            raise DistributedError(
                f"no lighthouse answers at {settings.lighthouse_addr!r} within connect_timeout="
                f"{settings.connect_timeout.total_seconds():g} s ({error}): start one with `{START}`, or check the "
                "address, and that no proxy or firewall is in between"
            ) from error
        self._executor.shutdown()
        self._executor = Worker()
        timer_thread.acquire()

    def begin(self) -> None:
        """Meet the others, and take over their state if they are ahead.

        Raises:
            DistributedError: there was no quorum in time, or the others' state can't be had.
            CheckpointMismatchError: the others train something else.
        """
        deadline = time.monotonic() + self.settings.quorum_timeout.total_seconds()
        while True:
            self._find_quorum()
            if (count := self.num_participants()) >= self.settings.min_replica_size:
                return
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"replica group {self.name!r} has waited quorum_timeout="
                    f"{self.settings.quorum_timeout.total_seconds():g} s for others: there are {count}, and "
                    f"min_replica_size={self.settings.min_replica_size}"
                )
            self._look()
            time.sleep(_LOOK)

    def _find_quorum(self) -> None:
        try:
            self.start_quorum()
        except (TimeoutError, RuntimeError) as error:
            if type(error) not in (TimeoutError, RuntimeError):  # one of ours, whose message is complete
                raise
            raise DistributedError(
                f"replica group {self.name!r} found no quorum within quorum_timeout="
                f"{self.settings.quorum_timeout.total_seconds():g} s, at step {self.current_step()} ({error}): either "
                f"the lighthouse at {self.settings.lighthouse_addr} is gone, or it waits for more groups (its "
                "--min_replicas, or more than half of those that send heartbeats). Run the script again, with "
                "ckpt_path='last'"
            ) from error

    @property
    def name(self) -> str:
        return self.settings.replica_id or "(without replica_id)"

    def wait_quorum(self) -> None:
        """Wait for the quorum in steps: TorchFT's own wait blocks signal handlers until it is over."""
        future = self._quorum_future
        assert future is not None
        while not concurrent.futures.wait([future], timeout=_LOOK).done:
            self._look()
        future.result()

    def _apply_pending_state_dict(self) -> None:
        if self._pending_state_dict is not None:
            super()._apply_pending_state_dict()
            self.taken += 1
            self._failed_downloads = 0
            return
        self._failed_downloads += 1
        if self._failed_downloads == _TRIES:
            cause = self.errored()
            raise DistributedError(
                f"replica group {self.name!r} could not take over the state of the others in {_TRIES} tries: "
                f"{cause.original_exception if cause is not None else 'no reason is known'}. Can this host reach "
                "theirs by name? They may need hostname=..."
            )

    def close(self) -> None:
        """End the threads, servers and connections of this group."""
        try:
            self.shutdown(wait=True)
        finally:
            timer_thread.release()
            self._pg.shutdown()
            # TorchFT's objects refer to each other in cycles: what has threads is not left to the garbage collector.
            self._manager = self._client = self._store = None
            del self._server_store
            self._load_state_dict_fns.clear()
            self._user_state_dicts.clear()
