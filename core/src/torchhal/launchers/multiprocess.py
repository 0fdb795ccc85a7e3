"""The launcher for functions: workers by spawn, fork or forkserver run it as ranks, the caller supervises."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch

from torchhal.cluster.base import ClusterEnvironment
from torchhal.distributed import process, rendezvous
from torchhal.distributed.failures import Failure
from torchhal.distributed.signals import SignalRecorder, born_blocked, is_pending
from torchhal.errors import ConfigurationError, LaunchError
from torchhal.launchers._openmp import pause_openmp_threads
from torchhal.launchers.base import Launcher
from torchhal.launchers.serialization import AnonymousFile, collect_settings, pack_function
from torchhal.launchers.worker import INTERRUPT, Assignment, run
from torchhal.launchers.worker_outcome import WorkerOutcomes

START_METHODS = ("spawn", "fork", "forkserver")
GRACE = 5.0
KILL_AFTER = 3.0
PENDING = 0.3
"""Seconds after which a worker's pending signal was sent to it only: one to all has been received here by then."""

INSTEAD = "or use strategy='ddp' (runs the script again) or 'ddp_fork' (workers inherit everything)"


class MultiprocessingLauncher(Launcher):
    """A launcher of worker processes that run the function as ranks; the caller waits for them and is not a rank.

    Rank 0's result comes back as a copy; what the workers changed in their copies of the arguments does not. With
    ``"spawn"`` and ``"forkserver"`` the function and its arguments travel by pickle, and so do this process's random
    states, default dtype, determinism, matmul precision and thread count. With ``"fork"`` the workers inherit
    everything; the caller ensures that no device is initialised.

    SIGINT, SIGTERM and the environment's stop signals to this process are passed on to the workers, SIGINT to those
    that did not receive it from the terminal; the workers get ``stop_timeout`` seconds to save. Then
    KeyboardInterrupt or ``SystemExit(128 + signal)`` is raised here.

    Args:
        environment: provides the node's rank and, on several nodes, the rendezvous address.
        num_processes: workers on this node.
        num_nodes: nodes, each with ``num_processes``.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        stop_timeout: seconds between a signal and the workers' forced end.
        prepare: called in a started worker before the function and its arguments are unpickled there, to register
            the device that they refer to.
    """

    interactive: ClassVar[bool] = True
    returns_to_caller: ClassVar[bool] = False

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int = 1,
        *,
        start_method: str = "spawn",
        stop_timeout: float = 60.0,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        if start_method not in START_METHODS:
            raise ConfigurationError(
                f"'start_method' must be one of {', '.join(map(repr, START_METHODS))} (got {start_method!r})"
            )
        if start_method not in multiprocessing.get_all_start_methods():
            raise ConfigurationError(f"'start_method' {start_method!r} does not exist on this system: use 'spawn'")
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self.start_method = start_method
        self.stop_timeout = stop_timeout
        self.prepare = prepare
        self.name = start_method  # type: ignore[misc]  # one class, three names

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            raise LaunchError(
                "a worker imports the main script again before it starts, and got here: put what the script does under "
                "'if __name__ == \"__main__\":'"
            )
        payload = (
            None
            if self.start_method == "fork"
            else pack_function(function, args, kwargs, self.prepare, instead=INSTEAD)
        )
        result = AnonymousFile()
        try:
            with SignalRecorder(self.environment.stop_signals) as signals:
                crew = _WorkerGroup(self, payload, result, (function, args, kwargs), signals)
                try:
                    crew.start()
                    crew.supervise()
                finally:
                    self.has_begun = self._node_rank() != 0 or crew.rank_0_was_ready
                    crew.end()
            crew.verdict.raise_outcome(signals.received)
            if self._node_rank() != 0:
                return None
            return result.read(map_location="cpu")
        finally:
            result.close()
            if payload is not None:
                payload.close()

    def _node_rank(self) -> int:
        return self.environment.node_rank() if self.num_nodes > 1 else 0

    def __repr__(self) -> str:
        return (
            f"MultiprocessingLauncher(num_processes={self.num_processes}, num_nodes={self.num_nodes}, "
            f"start_method={self.start_method!r})"
        )


class _Worker:
    def __init__(self, rank: int, worker: Any, connection: Connection) -> None:
        self.rank = rank
        self.process = worker
        self.connection = connection
        self.ready = False
        self.pending_since: float | None = None
        self.done = False
        self.ended = False
        self.failure: Failure | None = None


class _WorkerGroup:
    """The workers of one launch."""

    def __init__(
        self,
        launcher: MultiprocessingLauncher,
        payload: AnonymousFile | None,
        result: AnonymousFile,
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        signals: SignalRecorder,
    ) -> None:
        self._launcher, self._payload, self._result, self._call = launcher, payload, result, call
        self._signals = signals
        self._workers: list[_Worker] = []
        self._served: tuple[str, int] | None = None
        self.verdict = WorkerOutcomes(launcher.num_processes, instead=INSTEAD)
        self._end_at: float | None = None  # when the remaining workers get SIGTERM
        self._terminated_at: float | None = None

    def start(self) -> None:
        launcher = self._launcher
        local, nodes, method = launcher.num_processes, launcher.num_nodes, launcher.start_method
        node_rank = launcher._node_rank()
        address = launcher.environment.main_address if nodes > 1 else "127.0.0.1"
        context: Any = multiprocessing.get_context(method)
        launch_id = uuid.uuid4().hex
        share = process.threads_per_process(local)
        threads = min(torch.get_num_threads(), share or torch.get_num_threads())
        pipes = [context.Pipe() for _ in range(local)]
        ends = [end for pair in pipes for end in pair]
        settings = None if method == "fork" else collect_settings()
        if method == "fork" and not pause_openmp_threads():
            threads = 1
        for local_rank, (mine, theirs) in enumerate(pipes):
            rank = node_rank * local + local_rank
            variables = process.rank_variables(
                launch_id=launch_id,
                kind=launcher.name,
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                world_size=local * nodes,
                local_world_size=local,
                address=address,
                port=0,
                threads=share,
            )
            assignment = Assignment(
                rank=rank,
                is_result_rank=rank == 0,
                variables=variables,
                start_method=method,
                supervisor_pid=os.getpid(),
                supervisor_is_main=threading.current_thread() is threading.main_thread(),
                settings=settings,
                threads=threads,
                payload=self._payload,
                result=self._result,
                call=self._call if method == "fork" else None,
                others=[end for end in ends if end is not theirs] if method == "fork" else [],
            )
            worker = context.Process(target=run, args=(assignment, theirs), name=f"torchhal-rank-{rank}")
            try:
                with born_blocked(method):
                    worker.start()
            except OSError as error:
                raise LaunchError(f"worker {local_rank + 1} of {local} could not be started: {error}") from error
            self._workers.append(_Worker(rank, worker, mine))
        for _, theirs in pipes:
            theirs.close()
        # Served only now: a fork must not inherit the server's thread in an arbitrary state.
        port = launcher.environment.main_port if nodes > 1 else 0
        if node_rank == 0:
            port = rendezvous.start_store(address, port, launcher.environment.job_id())
            self._served = (address, port)
        for one in self._workers:
            try:
                one.connection.send(port)
            except OSError:  # it has ended already, which supervise() detects
                pass

    def supervise(self) -> None:
        """Return when all workers have ended, well or not."""
        signals = self._signals
        passed_on = 0
        pass_on_at: float | None = None
        while not all(worker.ended for worker in self._workers):
            listening: list[Any] = [worker.connection for worker in self._workers if not worker.ended]
            multiprocessing.connection.wait(listening, timeout=0.1)
            for worker in self._workers:
                self._read(worker)
            self._take_pending()
            now = time.monotonic()
            if len(signals.received) > passed_on:
                # A terminal's Ctrl-C has reached the workers too, and they handle a second one as "at once".
                first = passed_on == 0
                self._kill_unready()
                pass_on_at = now + (1.0 if signals.received[-1] == signal.SIGINT and first else 0.0)
                self._end_soon(self._launcher.stop_timeout if first else 0.0)
                passed_on = len(signals.received)
            if pass_on_at is not None and now >= pass_on_at:
                pass_on_at = None
                self._pass_on(signals.received[-1])
            if self._end_at is not None and now > self._end_at and self._terminated_at is None:
                self._terminated_at = now
                self._signal(signal.SIGTERM)
            if self._terminated_at is not None and now > self._terminated_at + KILL_AFTER:
                self._signal(signal.SIGKILL)

    @property
    def rank_0_was_ready(self) -> bool:
        return any(worker.ready for worker in self._workers if worker.rank == 0)

    def end(self) -> None:
        """End all workers, for any end of the supervision."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.connection.close()
            worker.process.close()
        if self._served is not None:
            # Workers of other nodes may be slower; after a failure they still have to read the report.
            others = self._launcher.num_nodes > 1
            timeout = 0.0 if not others else 2.0 if self.verdict.failures or self.verdict.problem else 30.0
            rendezvous.stop_store(
                *self._served, ranks=self._launcher.num_processes * self._launcher.num_nodes, timeout=timeout
            )

    def _read(self, worker: _Worker) -> None:
        if worker.ended:
            return
        alive = worker.process.is_alive()  # read first: then all that it wrote before it ended is in the pipe
        try:
            while worker.connection.poll():
                self._take(worker, worker.connection.recv())
        except (EOFError, OSError):
            pass
        if alive:
            return
        worker.ended = True
        code = worker.process.exitcode
        if worker.done or worker.failure is not None or self.verdict.problem is not None:
            return
        if (signum := process.stop_signal(code)) is not None and self._terminated_at is None:
            self._follow(signum)  # before it could report it, and the signal was meant for all
        elif self._signals.received and not worker.ready:
            pass  # killed here: it had not begun
        elif not worker.ready and self._terminated_at is None:
            self.verdict.problem = LaunchError(
                f"the worker for rank {worker.rank} {process.describe_exit(code)} before it could begin; its own "
                "message stands above. Does the script start its work only under 'if __name__ == \"__main__\":'?"
            )
            self._end_soon(0.0)
        elif self._terminated_at is None:
            failure = Failure(worker.rank, process.describe_exit(code), signal=-min(code, 0))
            self.verdict.failures.append((failure, None))
            self._failed(worker, failure)

    def _take(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "ready":
            worker.ready = True
        elif kind == "done":
            worker.done = True
        elif kind != "failed" or worker.failure is None:
            failure = self.verdict.take(worker.rank, message)
            if failure is not None:
                self._failed(worker, failure)
            elif self.verdict.problem is not None:
                self._end_soon(0.0)

    def _failed(self, worker: _Worker, failure: Failure) -> None:
        worker.failure = failure
        if failure.stop_signal:
            self._follow(failure.stop_signal)  # it leaves without waiting for the others: so do they
        if not (failure.stopped or failure.secondary):
            # Else the others' monitors would detect the rank's silence only, later and without the cause.
            for other in self._workers:
                if other.ready and not other.ended and other is not worker:
                    try:
                        other.connection.send(failure.to_json())
                    except OSError:
                        pass
        # One that stops on a signal is followed by the others, which may still be saving.
        self._end_soon(self._launcher.stop_timeout if failure.stopped else GRACE)

    def _follow(self, signum: int) -> None:
        """Handle a worker's stop signal as the launch's own, unless it already is: a second one means "at once"."""
        if not self._signals.received:
            self._signals.received.append(signum)

    def _kill_unready(self) -> None:
        """End workers that have not begun: they would import the main script first, and take the signal after it."""
        for worker in self._workers:
            if not (worker.ready or worker.ended):
                worker.process.kill()

    def _take_pending(self) -> None:
        """End workers that have not begun and for which a SIGTERM is pending.

        They would receive it only after importing the main script, which may take long, and the others would wait for
        them.
        """
        for worker in self._workers:
            if worker.ready or worker.ended or self._signals.received:
                continue
            pid = worker.process.pid
            if pid is None or not is_pending(pid, signal.SIGTERM):
                continue
            now = time.monotonic()
            if worker.pending_since is None:
                worker.pending_since = now
            elif now - worker.pending_since > PENDING:
                self._follow(signal.SIGTERM)

    def _end_soon(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._end_at = at if self._end_at is None else min(self._end_at, at)

    def _pass_on(self, signum: int) -> None:
        if signum != signal.SIGINT:
            self._signal(signum)
            return
        for worker in self._workers:
            if not worker.ended:
                try:
                    worker.connection.send(INTERRUPT)  # the worker ignores it if it has received one already
                except OSError:
                    pass

    def _signal(self, signum: int) -> None:
        for worker in self._workers:
            if not worker.ended and worker.process.pid is not None and worker.process.is_alive():
                try:
                    os.kill(worker.process.pid, signum)
                except ProcessLookupError:  # a fork server's child, whose end is reported later
                    pass
