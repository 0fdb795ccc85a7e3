"""The launcher for scripts: the caller is a rank, the others are started by running the same command again."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchhal.cluster.base import ClusterEnvironment
from torchhal.distributed import failures, process, rendezvous
from torchhal.distributed._rendezvous_state import no_linger
from torchhal.distributed.failures import exit_for_signal
from torchhal.distributed.signals import born_blocked, is_agreed
from torchhal.errors import ConfigurationError, DistributedError, LaunchError, RankFailedError
from torchhal.launchers._command import script_command
from torchhal.launchers._exit_monitor import ExitMonitor
from torchhal.launchers._subprocess_supervisor import GRACE, ChildProcesses
from torchhal.launchers.base import Launcher

NAME = "subprocess_script"


@dataclass
class _Launched:
    """The processes that this process has started, which it does at most once."""

    children: ChildProcesses
    num_processes: int
    num_nodes: int
    address: str
    port: int


_launched: _Launched | None = None


class SubprocessScriptLauncher(Launcher):
    """A launcher that runs the user's command again for each further process of the node.

    The calling process is local rank 0. The others are started by the first :meth:`launch` of the process, run the
    script from its beginning, and join at their own ``launch``; later launches reuse them. Everything the script
    does before and after runs in every process.

    Args:
        environment: provides the node's rank and, on several nodes, the rendezvous address.
        num_processes: processes on this node, the caller included.
        num_nodes: nodes, each with ``num_processes``.
    """

    name: ClassVar[str] = NAME

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.entered():
            return function(*args, **kwargs)

    @contextmanager
    def entered(self) -> Iterator[None]:
        if process.launched_by() is not None:
            self.environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            failures.mark_call(entered=True)
            try:
                yield
            except Exception:
                failures.mark_call(entered=False)  # its report has the details; an exit inside a call stays marked
                raise
            failures.mark_call(entered=False)
            return
        launched = self._start_or_find()
        children = launched.children
        children.check()
        self.environment.set_rendezvous(launched.address, launched.port)
        if self.environment.world_size() != self.num_processes * self.num_nodes:
            raise LaunchError(
                f"{self.num_processes * self.num_nodes} processes were started, but {self.environment!r} counts "
                f"{self.environment.world_size()}: an environment in which torchhal starts the processes must follow "
                "configure() and set_rendezvous()"
            )
        try:
            with children.inside():
                yield
        except BaseException as error:
            cause, stop_signal = children.failure, None
            if isinstance(error, DistributedError) or failures.is_transport_error(error):
                cause = children.wait_for_failure(1.0)
                stop_signal = children.stop_signal
            children.raised = True
            children.end(self._grace(error))
            if self.num_nodes == 1:
                no_linger()  # no rank is left to sign off
            if cause is None and stop_signal is not None:
                raise exit_for_signal(stop_signal, agreed=False) from None  # the signal on which the awaited rank left
            rank = self.environment.global_rank()
            if cause is None or isinstance(error, RankFailedError) or cause.rank == rank:
                if self._leaves_alone(error):
                    raise failures.Failure.from_exception(rank, error).error() from error
                raise
            raise cause.error() from error
        children.check()

    def _grace(self, error: BaseException) -> float:
        """Return how long the others may take to end by themselves after ``error``."""
        if is_agreed(error) is False or (isinstance(error, KeyboardInterrupt) and not is_agreed(error)):
            return 0.0  # a signal before training, or the second Ctrl-C
        # After an agreed exit the others may still be writing; after a failure they hang or are leaving.
        return GRACE if isinstance(error, Exception) or self._leaves_alone(error) else 2 * GRACE

    def _leaves_alone(self, error: BaseException) -> bool:
        """Return whether this is an exit inside a call that others are in: a failure, with any exit code.

        With a signal's status all ranks stop, as they have agreed.
        """
        if not isinstance(error, SystemExit) or self.num_processes * self.num_nodes == 1:
            return False
        return not process.is_signal_status(process.exit_status(error.code))

    def _start_or_find(self) -> _Launched:
        global _launched
        if _launched is not None and _launched.children.is_mine:
            if _launched.children.raised:
                _refuse_after_failure(_launched.children)
            if (_launched.num_processes, _launched.num_nodes) != (self.num_processes, self.num_nodes):
                raise ConfigurationError(
                    f"this script runs as {_launched.num_processes} process(es) on {_launched.num_nodes} node(s) since "
                    f"its first launch, and can't go on as {self.num_processes} on {self.num_nodes}: ask for the same "
                    "number everywhere in a script, or use a second script"
                )
            return _launched
        _launched = self._start()
        return _launched

    def _start(self) -> _Launched:
        environment, local = self.environment, self.num_processes
        command = script_command() if local > 1 else []
        node_rank = environment.node_rank() if self.num_nodes > 1 else 0
        address = environment.main_address if self.num_nodes > 1 else "127.0.0.1"
        if self.num_nodes == 1:
            port = rendezvous.start_store(address, job=environment.job_id())
        else:
            port = environment.main_port
            if node_rank == 0:
                rendezvous.start_store(address, port, environment.job_id())
        launch_id = uuid.uuid4().hex
        started: dict[int, subprocess.Popen[bytes]] = {}
        reports: dict[int, int] = {}
        try:
            for local_rank in range(1, local):
                rank = node_rank * local + local_rank
                variables = process.rank_variables(
                    launch_id=launch_id,
                    kind=self.name,
                    rank=rank,
                    local_rank=local_rank,
                    node_rank=node_rank,
                    world_size=local * self.num_nodes,
                    local_world_size=local,
                    address=address,
                    port=port,
                    threads=process.threads_per_process(local),
                )
                reports[rank], started[rank] = _start_child(command, variables)
            monitor = ExitMonitor(node_rank * local) if started else None
        except BaseException as error:
            # a Ctrl-C too: with this process goes the store, and the children would report its loss
            for child in started.values():
                child.kill()
                child.wait()
            if isinstance(error, OSError):
                raise LaunchError(f"process {len(started) + 1} of {local} could not be started: {error}") from error
            raise
        children = ChildProcesses(started, reports, monitor)
        rendezvous.health_checks.append(children.check)
        failures.install_excepthook()
        atexit.register(_at_exit, children)
        return _Launched(children, local, self.num_nodes, address, port)

    def __repr__(self) -> str:
        return f"SubprocessScriptLauncher(num_processes={self.num_processes}, num_nodes={self.num_nodes})"


def _start_child(command: list[str], variables: dict[str, str]) -> tuple[int, subprocess.Popen[bytes]]:
    """Return a started child, and the descriptor from which to read why it failed."""
    reader, writer = os.pipe()
    environ = dict(os.environ)
    process.without_external(environ)
    environ.pop("PYTHONINSPECT", None)
    environ.update(variables)
    environ[process.PARENT_PID] = str(os.getpid())
    environ[process.PARENT_IS_MAIN] = str(int(threading.current_thread() is threading.main_thread()))
    environ[process.REPORT_FD] = str(writer)
    try:
        # No stdin: several processes can't share a terminal's input. The same process group: a terminal's or a
        # scheduler's signal reaches every rank.
        with born_blocked():
            child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, pass_fds=(writer,))
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return reader, child


def _refuse_after_failure(children: ChildProcesses) -> None:
    failure = children.failure
    why = f"rank {failure.rank} {failure.message}" if failure is not None else "the function failed on rank 0"
    raise LaunchError(f"the other processes of this script have ended after an earlier failure ({why}): start it again")


def _at_exit(children: ChildProcesses) -> None:
    if children.is_mine:
        rendezvous.announce_exit()  # else a rank that is on its way to a second launch waits for this one
        children.at_exit()


@contextmanager
def shared_threads(num_processes: int) -> Iterator[None]:
    """Limit torch's CPU threads in this process to its share of the cores, as the started ones are; then restore.

    Nothing happens when the user set OMP_NUM_THREADS.
    """
    share = process.threads_per_process(num_processes)
    before = torch.get_num_threads()
    if share is not None and share < before:
        torch.set_num_threads(share)
    try:
        yield
    finally:
        torch.set_num_threads(before)
