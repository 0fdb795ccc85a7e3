"""Jobs of two processes: how they are started, by whatever, and how they end when something happens to them."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from job_processes import job_starter, wait_for_end

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
HOROVODRUN = (str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2")
LAUNCHERS = {"torchhal": (), "horovodrun": HOROVODRUN}

pytestmark = [pytest.mark.usefixtures("horovod"), pytest.mark.timeout(240)]


@pytest.fixture
def start(tmp_path):
    yield from job_starter(tmp_path, SCRIPT)


def test_started_by_torchhal_by_horovodrun_and_by_torchrun(start):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    here = start("torchhal").result()
    run = start("horovodrun", launcher=HOROVODRUN).result()
    elastic = start("torchrun", launcher=torchrun).result()
    assert here["weights"] == run["weights"] == elastic["weights"]
    assert [one["world"] for one in (here, run, elastic)] == [2, 2, 2]
    environments = [one["environment"] for one in (here, run, elastic)]
    assert environments == ["LocalEnvironment", "HorovodEnvironment", "TorchElasticEnvironment"]


def test_two_hosts_meet_where_horovodruns_server_says(start):
    """The variables that horovodrun sets on two hosts with a process each, and its own server."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, False)
    server.init([])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    common = {
        "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "TORCHHAL_CLUSTER": "horovod",
    }  # fmt: skip
    try:
        jobs = [
            start("hosts", "devices=1", "nodes=2", variables=common | {
                "HOROVOD_RANK": str(rank), "HOROVOD_CROSS_RANK": str(rank), "HOROVOD_HOSTNAME": f"host-{rank}",
            })
            for rank in (0, 1)
        ]  # fmt: skip
        codes = [job.ends() for job in jobs]
        said = jobs[0].said
    finally:
        server.shutdown()
        server.server_close()
    assert codes == [0, 0], said
    told = jobs[0].result()
    assert (told["world"], told["environment"]) == (2, "HorovodEnvironment")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job(start, launcher):
    job = start("killed", "slow", launcher=LAUNCHERS[launcher])
    other = job.pid_of(0)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.ends() != 0
    if launcher == "torchhal":
        assert "SIGKILL" in job.said, job.said
    wait_for_end({other})


def test_sigterm_saves_and_the_run_goes_on_from_there(start):
    whole = start("whole").result()
    job = start("stopped", "slow")
    job.pid_of(0), job.pid_of(1)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.ends() == 128 + signal.SIGTERM, job.said
    assert "fit stopped on SIGTERM at step" in job.said
    assert start("stopped", "ckpt=last").result()["weights"] == whole["weights"]


def test_ctrl_c_ends_every_process(start):
    job = start("interrupted", "slow")
    pids = [job.pid_of(0), job.pid_of(1)]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ends() == -signal.SIGINT, job.said
    wait_for_end(pids)


def test_a_rank_that_hangs_is_named(start):
    job = start("hangs", "slow", "timeout=5")
    job.pid_of(0)
    hung = job.pid_of(1)
    os.kill(hung, signal.SIGSTOP)
    assert job.ends(90) != 0
    assert "rank 1" in job.said, job.said


def test_elastic_horovod_is_refused(start):
    elastic = (*HOROVODRUN, "--min-np", "2", "--max-np", "2", "-H", "localhost:2")
    job = start("elastic", variables={"HOROVOD_ELASTIC": "1"}, launcher=elastic[:4])
    assert job.ends() != 0
    assert "exchanges ranks inside of running processes" in job.said, job.said
