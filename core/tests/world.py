"""Worlds of real processes for tests: started once per session, each test sends them functions.

``import torch`` costs a second per process, so the processes stay. Each believes that torchrun has started it, and
this process serves the store that torchrun's agent would: a strategy with a ``TorchElasticEnvironment`` makes and
destroys process groups in them as it would in a job. A rank that doesn't answer in time is reported as HANG, by
name, and the whole world is replaced. One that has kept many threads is replaced, too, between two files of tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO

import hardware
from limits import scaled

TIMEOUT = 30.0

CROWDED = 16
"""Threads of a rank: some six are torch's own."""


@dataclass
class Outcome:
    """What one rank did: returned ``value``, or raised an error of the class named ``error``."""

    value: object = None
    error: str = ""
    message: str = ""
    traceback: str = ""


class World:
    """``size`` processes, started on first use."""

    made: list[World] = []

    def __init__(self, size: int) -> None:
        World.made.append(self)
        self.size = size
        self._processes: list[multiprocessing.Process] = []
        self._connections: list[Connection] = []
        self._store = None
        self._stack_files: list[IO[bytes]] = []

    def run(self, function, *args, timeout: float = TIMEOUT) -> list:
        """``function(*args)`` on every rank, where RANK says which it is; the values in rank order.

        ``function`` stands at the top level of a test module; arguments and values pickle without that module.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if failed := [f"rank {rank}:\n{o.traceback}" for rank, o in enumerate(outcomes) if o.error]:
            raise AssertionError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *args, timeout: float = TIMEOUT) -> list[Outcome]:
        """As :meth:`run`, but errors are outcomes too."""
        self._start()
        home = sys.modules[function.__module__].__file__
        for connection in self._connections:
            connection.send((home, function.__qualname__, args, hardware.name()))
        outcomes: dict[int, Outcome] = {}
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(f"rank {rank} HANG" for rank in waiting.values())
                told = "; ".join(f"rank {rank}: {o.error or 'returned'} {o.message}" for rank, o in outcomes.items())
                stacks = "\n".join(f"rank {rank}:\n{self._stacks(rank)}" for rank in waiting.values())
                self.stop()
                raise AssertionError(f"{function.__qualname__}: {silent} after {timeout:g} s ({told})\n{stacks}")
            for connection in ready:
                rank = waiting[connection]
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    self.stop()
                    raise AssertionError(f"{function.__qualname__}: rank {rank} DIED with exit code {code}") from None
        return [outcomes[rank] for rank in range(self.size)]

    def end_if_crowded(self) -> None:
        """Let the next use start it anew, where its processes have kept threads of process groups that are gone.

        Torch keeps those of device meshes in caches, and each wakes a hundred times a second: that of a few worlds
        costs the other tests a third of the machine.
        """
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        if any(folder.exists() and len(list(folder.iterdir())) > CROWDED for folder in tasks):
            self.stop()

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are now."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        self._stack_files[rank].seek(0)
        return self._stack_files[rank].read().decode()

    def _start(self) -> None:
        if self._processes:
            return
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        import warm_start

        # Two ranks are interpreters with a hash seed each; larger worlds may be forks, which share one.
        with warm_start.only_if(self.size != 2):
            self._start_ranks(self._store.port)

    def _start_ranks(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self._stack_files.append(tempfile.NamedTemporaryFile())  # noqa: SIM115
            arguments = (rank, self.size, port, theirs, self._stack_files[-1].name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        for file in self._stack_files:
            file.close()
        self._processes, self._connections, self._stack_files, self._store = [], [], [], None


def shared_world(size: int):
    """A fixture: a world of ``size`` processes that the tests of a session share."""
    import pytest

    @pytest.fixture(scope="session")
    def shared():
        world = World(size)
        yield world
        world.stop()

    return shared


def crowd_control():
    """A fixture: after each file of tests no crowded world is left."""
    import pytest

    @pytest.fixture(autouse=True, scope="module")
    def crowded_worlds_end():
        yield
        for world in World.made:
            world.end_if_crowded()

    return crowded_worlds_end


def stop_after_failure(report) -> None:
    """As ``pytest_runtest_logreport`` of a ``conftest.py``: after a test that failed, the next one gets new worlds.

    Its ranks may have left each other at different points.
    """
    if report.failed:
        for world in World.made:
            world.stop()


def _serve(rank: int, size: int, port: int, connection: Connection, stack_file: str) -> None:
    faulthandler.register(signal.SIGUSR1, open(stack_file, "wb"), all_threads=True)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=uuid.uuid4().hex,
        TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1", TORCHHAL_SIM_DEVICES=str(max(size, 2)),
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            home, name, args, os.environ[hardware.VARIABLE] = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # gloo's threads may abort an orderly exit
        try:
            if hardware.name() != "cpu":
                hardware.accelerator()  # torch has to know its devices, whatever this rank's first test is
            outcome = Outcome(getattr(_module(home), name)(*args))
        except BaseException as error:
            outcome = Outcome(error=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        connection.send(outcome)


_modules: dict[str, ModuleType] = {}


def _module(home: str) -> ModuleType:
    if home not in _modules:
        name = f"in_world_{os.path.splitext(os.path.basename(home))[0]}"
        spec = importlib.util.spec_from_file_location(name, home)
        assert spec is not None and spec.loader is not None
        _modules[home] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_modules[home])
    return _modules[home]


# -- inside a rank -------------------------------------------------------------------------------------------


def rank() -> int:
    return int(os.environ["RANK"])


def size() -> int:
    return int(os.environ["WORLD_SIZE"])


def compose(strategy, precision=None):
    """The strategy with the parts that ``resolve`` would give it, on the accelerator of the test."""
    from torchhal.checkpoint import TorchCheckpointIO
    from torchhal.cluster import TorchElasticEnvironment
    from torchhal.precision import SinglePrecision

    accelerator = hardware.accelerator()
    strategy.configure(
        accelerator=accelerator,
        precision=precision or SinglePrecision(),
        checkpoint_io=TorchCheckpointIO(),
        cluster_environment=TorchElasticEnvironment() if strategy.multi_device else None,
        devices=accelerator.get_parallel_devices(range(size() if strategy.multi_device else 1)),
        num_nodes=1,
    )
    return strategy


@contextlib.contextmanager
def joined(strategy=None, **options):
    """A strategy (ddp unless given) between its set-up and its teardown."""
    from datetime import timedelta

    from torchhal.strategies import DDPStrategy

    strategy = compose(strategy or DDPStrategy(timeout=timedelta(seconds=20), **options))
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
