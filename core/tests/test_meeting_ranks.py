"""How the ranks of a job that somebody else has started come together, and what those hear who wait for one that fails.

The jobs are processes with torch's own variables, or a task's of Slurm's, on this host.
"""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from limits import scaled
from running import Job

from torchhal import Trainer
from torchhal.cluster import mpi
from torchhal.cluster.base import RanksNotMetError
from torchhal.cluster.env_init import EnvVarEnvironment
from torchhal.cluster.mpi import OpenMPIEnvironment, _place_of_rank_0
from torchhal.distributed import (
    _reachability as reachability,
)
from torchhal.distributed import (
    _roll_call as roll_call,
)
from torchhal.distributed import (
    _store_client as store_client,
)
from torchhal.distributed import rendezvous, stores
from torchhal.distributed.failures import Failure
from torchhal.errors import CollectiveTimeoutError, ConfigurationError, DistributedError, LaunchError

LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC", "TORCHHAL_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES")
IN_VAIN = 300
"""Seconds that a rank waits which nobody tells anything."""
ELSEWHERE = "192.0.2.1"
"""An address of no host: RFC 5737 keeps it for documentation."""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHERS) or name in RANKS:
            monkeypatch.delenv(name)


@pytest.fixture
def port():
    """A free one, below those that the system gives out."""
    for number in range(20_000 + os.getpid() % 5000, 32_000):
        with socket.socket() as probe:
            try:
                probe.bind(("", number))
            except OSError:
                continue
        return number
    raise AssertionError("no free port")


@pytest.fixture
def environ(monkeypatch):
    """Set variables of this process."""

    def change(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return change


@pytest.fixture
def tasks(tmp_path, port):
    """Processes of one job that run ``code``, each with variables of its own, which None takes away."""
    started = []

    def start(code, *own, **common):
        (tmp_path / "task.py").write_text(code)
        for rank, changes in enumerate(own):
            variables = {
                "RANK": rank, "WORLD_SIZE": len(own), "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "OMP_NUM_THREADS": 1, **common, **changes,
            }  # fmt: skip
            given = {name: value for name, value in variables.items() if value is not None}
            started.append(Job(sys.executable, "task.py", cwd=tmp_path, **given))
        return started

    yield start
    for one in started:
        one.kill()


# -- the place, by MPI ---------------------------------------------------------------------------------------


class Communicator:
    """What is asked of mpi4py's, between threads: a message can be received once it is sent, and each once."""

    sent: dict
    barrier: set

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Isend(self, buffer, dest):
        self.sent[self.rank, dest] = bytes(buffer[0])
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, buffer, source):
        def test():
            if message := self.sent.pop((source, self.rank), None):
                buffer[0][:] = message
            done.append(message is not None)
            return any(done)

        done = []
        return SimpleNamespace(Test=test)

    def Ibarrier(self):
        self.barrier.add(self.rank)
        return SimpleNamespace(Test=lambda: len(self.barrier) == self.size)


@pytest.fixture
def ask_rank_0(monkeypatch):
    monkeypatch.setattr(Communicator, "sent", {}, raising=False)
    monkeypatch.setattr(Communicator, "barrier", set(), raising=False)
    monkeypatch.setattr(mpi, "_HEAD_START", 0.5)

    def ask(rank, size, seconds):
        try:
            return _place_of_rank_0(Communicator(rank, size), "bytes", timedelta(seconds=seconds), "meeting")
        except CollectiveTimeoutError as error:
            return error

    def on(ranks, size, seconds):
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: ask(rank, size, seconds), ranks))

    return on


def test_mpi_tells_every_rank_where_they_meet(ask_rank_0):
    (host, port), *others = ask_rank_0(range(4), 4, scaled(20))
    assert host == socket.gethostname() and 0 < port < 65536
    assert others == [(host, port)] * 3


def test_rank_0_names_absent_ranks(ask_rank_0):
    """Rank 0 names the ranks that have not come over MPI."""
    zero, two = ask_rank_0([0, 2], 4, 1.0)
    assert zero.missing == (1, 3) and "ranks 1, 3 did not come within 1 s" in str(zero)
    assert two.missing == () and "a rank did not come" in str(two)


def test_absent_rank_0_is_named(ask_rank_0):
    """The error of ranks that wait for rank 0 over MPI names it."""
    assert [error.missing for error in ask_rank_0([1, 2], 3, 1.0)] == [(0,), (0,)]


# -- no network in a constructor -----------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a constructor has asked the network")

    for name in ("connect", "create_connection", "getaddrinfo"):
        owner = socket.socket if name == "connect" else socket
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(rendezvous, "connect", refuse)
    monkeypatch.setattr(rendezvous, "start_store", refuse)


ENV = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(("variables", "alias"), [(ENV, "env"), (OMPI, "openmpi")])
@pytest.mark.parametrize("num_nodes", ["auto", 2])
def test_trainer_construction_is_local(environ, no_network, variables, alias, num_nodes):
    """A Trainer is made without communication with the other ranks."""
    environ(**variables)
    trainer = Trainer(accelerator="cpu", strategy="ddp", devices="auto", num_nodes=num_nodes, logger=False)
    assert trainer.plan.cluster_environment.alias == alias
    assert trainer.world_size == int(variables.get("WORLD_SIZE", 3))
    assert trainer.plan.num_nodes == (2 if num_nodes == 2 else None)
    assert trainer.global_rank in (1, 2)


def test_local_world_size_before_meeting(environ):
    """The error for a number that is known after the ranks have met tells that."""
    environ(**ENV)
    with pytest.raises(RanksNotMetError, match=r"which ranks share a host.*set NODE_RANK and NNODES"):
        EnvVarEnvironment().local_world_size()


def test_contradictions_are_said_before_the_ranks_meet(environ, no_network):
    environ(**{**ENV, "RANK": "4"})
    with pytest.raises(ConfigurationError, match="contradict each other: rank 4 of 4"):
        Trainer(accelerator="cpu", strategy="ddp", devices="auto", num_nodes=2, logger=False)
    environ(**{**ENV, "MASTER_ADDR": "localhost"})
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR must be an address.*'localhost'"):
        Trainer(accelerator="cpu", strategy="ddp", devices="auto", num_nodes=2, logger=False)


def test_missing_address_without_mpi4py(environ, no_network, monkeypatch):
    """An address that MPI would have to tell is an error at once where mpi4py is missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    environ(**OMPI)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR must be set.*mpi4py"):
        Trainer(accelerator="cpu", strategy="ddp", devices="auto", num_nodes=3, logger=False)


MEET = """
from datetime import timedelta
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal
from torchhal.strategies import DDPStrategy


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = torchhal.Trainer(
    accelerator="cpu", strategy=DDPStrategy(timeout=timedelta(seconds=TIMEOUT)), devices="auto", num_nodes="auto",
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 8)), 4))
print("trained on", trainer.num_nodes, "node(s), device", len(trainer.strategy.devices))
"""


def test_auto_resolves_when_run_begins(tasks):
    """The meaning of "auto" is found out when the run begins."""
    for one in tasks(MEET.replace("TIMEOUT", "100"), {}, {}):
        one.finish()
        assert (one.code, one.out) == (0, "trained on 1 node(s), device 2\n"), one.err


def test_strategy_timeout_limits_meeting(tasks):
    """The strategy's timeout limits the exchange of which ranks share a host."""
    (one,) = tasks(MEET.replace("TIMEOUT", "2"), {"WORLD_SIZE": "2"})
    one.finish()
    assert one.code == 1
    assert "which ranks share a host: rank 1 did not come within 2 s" in one.err, one.err


# -- where they meet -----------------------------------------------------------------------------------------


def test_foreign_main_address_refused(monkeypatch, port):
    """Rank 0 refuses an address that is another host's."""
    monkeypatch.setattr(reachability, "_ELSEWHERE", 0.5)
    with pytest.raises(LaunchError, match=rf"rank 0 runs on .* {ELSEWHERE} is {ELSEWHERE}, another.*set MASTER_ADDR"):
        rendezvous.start_store(ELSEWHERE, port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are over may linger
        probe.bind(("", port))  # and serves no longer


def test_unknown_main_address_refused(monkeypatch, port):
    """Rank 0 refuses an address that is nobody's."""
    monkeypatch.setattr(reachability, "_UNKNOWN_NAME", 0.5)
    with pytest.raises(LaunchError, match=r"nowhere\.invalid is not known here .*set MASTER_ADDR to an address of"):
        rendezvous.start_store("nowhere.invalid", port)


def test_translated_address_is_own(monkeypatch, port):
    """As a service of Kubernetes' is: no interface has it, and a connection to it comes back."""
    monkeypatch.setattr(reachability, "_is_own", lambda literal: False)
    name = socket.gethostname()
    assert rendezvous.start_store(name, port) == port
    rendezvous.stop_store(name, port)


def test_rank_of_other_job_refused(port):
    """Two jobs at one address and port: the second's ranks find the first's store."""
    rendezvous.start_store("127.0.0.1", port, "step 0 of Slurm's job 4711")
    try:
        store = store_client.find_store("127.0.0.1", port, 1, time.monotonic() + scaled(20))
        with pytest.raises(DistributedError, match=r"another job's ranks meet there: step 0 of Slurm's job 4711, and"):
            store_client.check_job(store, "step 0 of Slurm's job 4712", 1, "here", time.monotonic() + scaled(20))
        store_client.check_job(store, "step 0 of Slurm's job 4711", 1, "here", time.monotonic() + scaled(20))
        with pytest.raises(LaunchError, match=f"port {port} is already in use.*each job needs"):
            rendezvous.start_store("127.0.0.1", port, "step 0 of Slurm's job 4712")
    finally:
        rendezvous.stop_store("127.0.0.1", port)


def test_foreign_store_refused(monkeypatch):
    """A store of another program is refused as none of torchhal's."""
    monkeypatch.setattr(store_client, "_ANSWER", 0.3)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = store_client.find_store("127.0.0.1", server.port, 1, time.monotonic() + scaled(20))
    with pytest.raises(DistributedError, match=r"none of torchhal's.*Set MASTER_PORT"):
        store_client.check_job(store, "", 1, "here", time.monotonic() + scaled(20))


def test_jobs_that_say_who_they_are_differ(environ):
    environ(PMIX_NAMESPACE="395575297")
    one = OpenMPIEnvironment().job_id()
    environ(PMIX_NAMESPACE="395575298")
    assert one != OpenMPIEnvironment().job_id() != ""


# -- who doesn't come ----------------------------------------------------------------------------------------


class Threads:
    """Ranks as threads, over a real store."""

    def __init__(self, port):
        self.port = port

    def store(self):
        return dist.TCPStore("127.0.0.1", self.port, None, False, wait_for_workers=False)

    def meet(self, rank, number, timeout):
        """What ``generation_store`` does once it is connected, for a world of two; None, or what went wrong."""
        job = self.store()
        fresh = stores.PrefixedStore(f"torchhal/{number}", job)
        try:
            roll_call.wait_for_all_ranks(fresh, rank, 2, timedelta(seconds=timeout), name="set-up", job=job)
        except DistributedError as error:
            roll_call.give_up(fresh, Failure.from_exception(rank, error))
            return str(error)
        return None


@pytest.fixture
def ranks():
    port = rendezvous.start_store("127.0.0.1")
    yield Threads(port)
    rendezvous.stop_store("127.0.0.1", port)


def test_meeting_after_timeout(ranks):
    """Who comes later to a meeting that was given up hears so at once, and is at the same number as the others then."""
    assert "rank 1 did not come within 0.2 s" in ranks.meet(0, 1, 0.2)
    assert "rank 0 failed: CollectiveTimeoutError: set-up: rank 1 did not come" in ranks.meet(1, 1, IN_VAIN)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ranks.meet, (0, 1), (2, 2), (60, 60))) == [None, None]


def test_given_up_rank_ends_meeting(ranks):
    """Rank 0 has come, and its time is over while others still wait for a third."""
    store = ranks.store()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ranks.meet, 1, 1, IN_VAIN)
        deadline = time.monotonic() + scaled(30)
        while not store.check(["torchhal/1/here/1"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        failure = Failure.from_exception(0, CollectiveTimeoutError("rank 2 did not come", name="x"))
        roll_call.give_up(stores.PrefixedStore("torchhal/1", store), failure)
        assert "rank 0 failed: CollectiveTimeoutError: rank 2 did not come" in waiting.result(timeout=scaled(60))


SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1",
    "RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None,
}  # fmt: skip
TWO_TASKS = [{"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}]


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [0, 1])
def test_task_without_rank_reaches_waiting_rank(tasks, lacks):
    """The failure of a task without its rank is named by the rank that waits for it."""
    own = [dict(one) for one in TWO_TASKS]
    own[lacks]["SLURM_PROCID"] = None
    started = tasks(MEET.replace("TIMEOUT", str(IN_VAIN)), *own, **SLURM)
    for one in started:
        one.finish(timeout=IN_VAIN / 2)
    assert [one.code for one in started] == [1, 1]
    assert "SLURM_PROCID must be set in the environment" in started[lacks].err
    other = started[1 - lacks].err
    assert "which knows no rank, failed: ConfigurationError: SLURM_PROCID must be set" in other, other


@pytest.mark.parametrize("lacks", [0, 1])
def test_early_failure_reaches_waiting_rank(tasks, lacks):
    """The failure of a rank before its fit is named by the rank that waits for it."""
    made, fit = MEET.replace("TIMEOUT", str(IN_VAIN)).split("trainer.fit(")
    fails = f"import os\nif os.environ['RANK'] == '{lacks}':\n    raise FileNotFoundError('no data on this host')\n"
    started = tasks(f"{made}{fails}trainer.fit({fit}", {}, {})
    for one in started:
        one.finish(timeout=IN_VAIN / 2)
    assert [one.code for one in started] == [1, 1]
    other = started[1 - lacks].err
    assert f"rank {lacks} failed: FileNotFoundError: no data on this host" in other, other


# -- a set-up that fails on one rank -------------------------------------------------------------------------

AGAIN = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torchhal.accelerators.cpu import CPUAccelerator
from torchhal.cluster.env_init import EnvVarEnvironment
from torchhal.strategies import DDPStrategy
from torchhal import Trainer

where, rank, fails = sys.argv[1], int(os.environ["RANK"]), True


class Fails(DDPStrategy):
    def fail(self, here):
        global fails
        if here == where and rank == 1 and fails:
            fails = False
            raise OSError(f"no device in {here}")

    def _share_cores(self):
        self.fail("before")
        super()._share_cores()

    def _name_default_backend(self, group):
        self.fail("after")
        super()._name_default_backend(group)


real = dist.init_process_group


def init_process_group(backend, **kwargs):
    return real("cpu:broken" if where == "amid" and rank == 1 and fails else backend, **kwargs)


def broken(*args):
    strategy.fail("amid")


dist.Backend.register_backend("broken", broken, devices=["cpu"])
dist.init_process_group = init_process_group
strategy = Trainer(
    accelerator="cpu", strategy=Fails(timeout=timedelta(seconds=TIMEOUT)), devices=2, logger=False
).strategy
heard = []
for life in range(3):
    strategy.make_launcher()
    try:
        strategy.setup_environment()
        heard.append(strategy.reduce(1.0, "sum"))
        strategy.barrier("end of the life")
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
    finally:
        strategy.teardown()
print(json.dumps(heard))
"""


@pytest.mark.parametrize("where", ["before", "after"])
def test_setup_after_failed_setup(tasks, where):
    """The processes live on, and try again: before the ranks meet, and after torch's own set-up."""
    code = AGAIN.replace("sys.argv[1]", repr(where)).replace("TIMEOUT", str(IN_VAIN))
    started = tasks(code, {}, {}, LOCAL_WORLD_SIZE=2)
    for one in started:
        one.finish(timeout=IN_VAIN / 2)
    assert [one.code for one in started] == [0, 0], [one.err for one in started]
    first, second = (json.loads(one.out) for one in started)
    assert first[1:] == second[1:] == [2.0, 2.0]
    assert second[0] == f"OSError: no device in {where}"
    assert f"rank 1 failed: OSError: no device in {where}" in first[0]


@pytest.mark.slow
def test_failure_inside_torchs_setup(tasks):
    """Nothing ends that wait but its own timeout, and the process."""
    code = AGAIN.replace("sys.argv[1]", "'amid'").replace("TIMEOUT", str(IN_VAIN))
    first, second = tasks(code, {}, {}, LOCAL_WORLD_SIZE=2)
    first.finish(timeout=IN_VAIN / 2)
    second.finish(timeout=IN_VAIN / 2)
    assert first.code == 1
    assert "rank 1 failed: OSError: no device in amid" in second.err + first.err, (first.err, second.err)
    assert "torchhal: rank 0 is still here" in first.err and "init_process_group" in first.err, first.err


GIVES_UP = """
import sys
from torchhal.distributed._store_client import connect_within
try:
    connect_within(0.5, sys.argv[1], 23702)
except RuntimeError:
    sys.exit(1)
"""


@pytest.mark.slow
def test_exit_code_after_unreachable_address():
    """Not by SIGABRT, as one does that ends while a thread of it is inside of torch."""
    codes = [
        subprocess.run([sys.executable, "-c", GIVES_UP, ELSEWHERE], capture_output=True, check=False).returncode
        for _ in range(4)
    ]
    assert codes == [1] * 4
