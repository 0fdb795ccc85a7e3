"""Run one rank in an actor, without an import of torch before the process has its variables."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torchhal.distributed import failures, process
from torchhal.launchers.worker import failed, perform
from torchhal_ray import _driver_queue as driver_queue
from torchhal_ray._ranks import VISIBLE


@dataclass(frozen=True)
class Started:
    """The facts about an actor that has started."""

    pid: int
    devices: Mapping[str, str]
    """Those of ``VISIBLE`` that Ray has set."""


@dataclass(frozen=True)
class Assignment:
    """The assignment of a worker, before it runs the call."""

    variables: Mapping[str, str]
    settings: dict[str, Any]
    folder: str
    """The driver's working directory."""
    post: Callable[[Any], None] | None
    """How rank 0 sends messages to the driver while the call runs; None: nobody reads them."""


class Worker:
    """One rank, whose name is what Ray puts before each line of its output."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"rank {self.rank}"

    def started(self) -> Started:
        import torch  # noqa: F401 (takes seconds: in all workers at once, and not in rank 0 while the others wait)

        return Started(os.getpid(), {name: os.environ[name] for name in VISIBLE if os.environ.get(name)})

    def serve(self) -> tuple[str, int]:
        """Serve the store where the ranks meet, in this process; return its address and port."""
        import ray

        from torchhal.distributed import rendezvous

        address = ray.util.get_node_ip_address()
        return address, rendezvous.start_store(address)

    def run(self, assignment: Assignment, content: bytes) -> tuple[tuple[Any, ...], bytes | None]:
        """Run the call in ``content``; return the message for ``WorkerOutcomes`` and, of rank 0, the result.

        Runs in the main thread, so that a SIGTERM asks for a stop as it does in any process that trains.
        """
        import ray
        import torch

        from torchhal.distributed import rendezvous
        from torchhal.launchers import serialization

        threads = torch.get_num_threads()  # Ray's share, by OMP_NUM_THREADS
        failures.supervised = True
        failures.sender = lambda failure: process.write_stderr(f"torchhal: {failure.text()}\n")
        process.without_external(os.environ)
        os.environ.update(assignment.variables)
        driver_queue.post = assignment.post
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave_on)
        if not ray.get_runtime_context().runtime_env.get("working_dir") and os.path.isdir(assignment.folder):
            os.chdir(assignment.folder)
        result = io.BytesIO()

        def read() -> Any:
            _, function, args, kwargs = serialization.read(io.BytesIO(content))
            return function, args, kwargs

        def write(value: Any) -> None:
            serialization.write(value, result, ray.cloudpickle)

        try:
            message = perform(read, write if self.rank == 0 else None, settings=assignment.settings, threads=threads)
        except BaseException as error:
            message = failed(self.rank, error, ray.cloudpickle.dumps)
            rendezvous.announce_exit()  # this process lives on, but nobody need wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        return message, result.getvalue() if self.rank == 0 else None


def _leave_on(signum: int, frame: FrameType | None) -> None:
    """End the process, before the call and after it; while it runs, a Trainer has a handler of its own."""
    raise SystemExit(128 + signum)


def send_signal(pids: list[int], signum: int) -> None:
    """Send a signal to these processes, on the node that they run on."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass
