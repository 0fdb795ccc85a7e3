"""What goes wrong on several hosts, for real: a link that is slow and loses frames, hosts that aren't there, that die,
that nobody knows; and Slurm's ways to end a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_hosts import MPICH, OPEN_MPI, TOOLS, cluster_of, needs
from limits import scaled

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

TRAIN = """
import os, sys, time
from datetime import timedelta
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal
from torchhal.strategies import DDPStrategy

epochs, pause, timeout = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])


class Net(torch.nn.Linear):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(torchhal.Callback):
    def on_train_start(self, trainer, module):
        with open(f"pid-{trainer.global_rank}", "w") as file:
            print(os.getpid(), file=file)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if pause and trainer.is_global_zero:
            print("step", trainer.global_step, flush=True)
        time.sleep(pause)
        if os.environ.get("FAILS") and trainer.global_rank == 1 and trainer.global_step == 3:
            raise ValueError("a bad batch")


torch.manual_seed(0)
x = torch.randn(48, 8)
model = Net(8, 1)
trainer = torchhal.Trainer(
    accelerator="cpu", strategy=DDPStrategy(timeout=timedelta(seconds=timeout)), devices="auto", num_nodes=2,
    max_epochs=epochs, callbacks=[Steps()], logger=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 6), ckpt_path="last")
if trainer.is_global_zero:
    print("RESULT", float(sum(p.detach().double().sum() for p in model.parameters())))
"""


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2) as made:
        (made.folder / "train.py").write_text(TRAIN)
        yield made


@pytest.fixture
def by_hand(cluster):
    """Both nodes of one job, each with its own line of arguments; the processes."""

    def start(port, *arguments, hosts=("n1", "n2"), address="n1", **variables):
        return [
            cluster.start(
                host, sys.executable, "train.py", *map(str, arguments),
                NODE_RANK=str(rank), MASTER_ADDR=address, MASTER_PORT=str(port), **variables,
            )
            for rank, host in enumerate(("n1", "n2")) if host in hosts
        ]  # fmt: skip

    return start


def ends(process, timeout=90):
    """What it said; it must have failed."""
    said = process.communicate(timeout=timeout)[0]
    assert process.returncode not in (0, None), said
    return said


def read_until(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"never said {word!r}")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def result(said):
    return float(re.search(r"RESULT (\S+)", said).group(1))


def test_lossy_link_keeps_result(cluster, by_hand):
    """Over a slow link that loses frames the result is the same."""
    fast = by_hand(29601, 2, 0, 100)
    said = [node.communicate(timeout=150)[0] for node in fast]
    assert [node.returncode for node in fast] == [0, 0], said
    link = subprocess.Popen(
        [sys.executable, TOOLS / "slow-link", cluster.hosts, "n2", "--delay", "20", "--loss", "2", "--rate", "20"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert link.stdout.readline() == "up\n"
        slow = by_hand(29602, 2, 0, 100)
        heard = [node.communicate(timeout=150)[0] for node in slow]
    finally:
        link.terminate()
        link.wait(30)
    assert [node.returncode for node in slow] == [0, 0], heard
    assert result("".join(heard)) == result("".join(said))


class TestWhoDoesNotCome:
    def test_a_main_host_that_nobody_knows(self, by_hand):
        start = time.monotonic()
        (node,) = by_hand(29603, 1, 0, 5, hosts=["n2"], address="n7")
        said = ends(node)
        assert time.monotonic() - start < scaled(60)
        assert "found nobody at n7:29603 (MASTER_ADDR, MASTER_PORT) within 5 s" in said, said
        assert "Name or service not known" in said or "name resolution" in said, said

    def test_the_main_host_never_comes(self, by_hand):
        (node,) = by_hand(29604, 1, 0, 5, hosts=["n2"])
        assert "found nobody at n1:29604 (MASTER_ADDR, MASTER_PORT) within 5 s" in ends(node)

    def test_another_host_never_comes(self, by_hand):
        (node,) = by_hand(29605, 1, 0, 5, hosts=["n1"])
        said = ends(node)
        assert "rank 1 (node 1) did not come within 5 s" in said, said

    @pytest.mark.parametrize(("name", "where"), [("n2", "is 10.99.0.102, another host's"), ("n7", "is not known here")])
    def test_foreign_main_address_is_named(self, cluster, name, where):
        """Within seconds, and mpirun ends the others: nobody waits for 300 s."""
        needs("mpirun.openmpi")
        job = cluster.start(
            "n0", *OPEN_MPI, "--host", "n1:1,n2:1", "-x", f"MASTER_ADDR={name}", "-x", "MASTER_PORT=29611",
            sys.executable, "train.py", "1", "0", "300",
        )  # fmt: skip
        start = time.monotonic()
        said = ends(job, 150)
        assert time.monotonic() - start < scaled(90)
        assert (
            f"rank 0 runs on n1 and serves {name}:29611, where the other ranks look for it, but {name} {where}" in said
        )
        assert "set MASTER_ADDR to an address of n1" in said

    def test_a_task_of_slurm_s_never_comes(self, slurm):
        """Its host has a name, which the error says."""
        late, seconds = "[ $(hostname) = n1 ] || exec sleep 600; exec", round(scaled(5))
        step = slurm.start("n0", "srun", "-N2", "-n3", "bash", "-c", f"{late} {sys.executable} train.py 1 0 {seconds}")
        read_until(step, f"rank 2 (node n2) did not come within {seconds} s")
        slurm.run("scancel", "-u", "root")
        step.communicate(timeout=60)

    def test_the_port_is_taken(self, cluster, by_hand):
        taken = cluster.start(
            "n1", sys.executable, "-u", "-c",
            "import socket, time; s = socket.socket(); s.bind(('', 29606)); s.listen(); print('up'); time.sleep(600)",
        )  # fmt: skip
        read_until(taken, "up")
        one, other = by_hand(29606, 1, 0, 5)
        assert "29606" in (said := ends(one)) and "MASTER_PORT" in said, said
        assert "what answers there is no store of this job" in (said := ends(other)), said
        taken.kill()


def test_when_a_host_dies_the_others_end(by_hand):
    """Within seconds, not at the process group's timeout of minutes; with the code of docs/how-to/launch.md."""
    one, other = by_hand(29607, 50, 0.2, 300)
    read_until(one, "step")
    other.send_signal(signal.SIGKILL)
    start = time.monotonic()
    ends(one, 60)
    assert one.returncode == 1
    assert time.monotonic() - start < scaled(30)  # "seconds": the process group waits for 300


class TestMPIEndsAJob:
    """As docs/how-to/mpi.md says."""

    @pytest.fixture(params=["open_mpi", "mpich"])
    def job(self, cluster, request):
        """Two ranks on two hosts, in their epochs; the launcher, and the pid of each rank."""
        port = {"open_mpi": "29608", "mpich": "29609"}[request.param]
        if request.param == "open_mpi":
            needs("mpirun.openmpi")
            kills = ("--mca", "odls_base_sigkill_timeout", "8")  # after 1 s otherwise: a save takes longer at times
            command = (*OPEN_MPI, *kills, "--host", "n1:1,n2:1", "-x", "MASTER_ADDR=n1", "-x", f"MASTER_PORT={port}")
        else:
            needs("mpiexec.hydra")
            command = (*MPICH, "-hosts", "n1:1,n2:1", "-n", "2", "-genv", "MASTER_ADDR", "n1", "-genv", "MASTER_PORT",
                       port)  # fmt: skip
        files = [cluster.folder / f"pid-{rank}" for rank in (0, 1)]  # on one pipe two ranks' words mix
        for file in files:
            file.unlink(missing_ok=True)
        launcher = cluster.start("n0", *command, sys.executable, "train.py", "200", "0.2", "300")
        for line in launcher.stdout:
            if line.startswith("step ") and all(file.exists() and file.read_text().endswith("\n") for file in files):
                return launcher, [int(file.read_text()) for file in files], request.param
        raise AssertionError("never trained")

    def rest(self, launcher):
        said = launcher.stdout.read()
        launcher.wait(60)
        return said

    def test_a_signal_to_the_launcher_saves(self, job):
        launcher, _, name = job
        launcher.send_signal(signal.SIGTERM)
        said = self.rest(launcher)
        assert re.search(r"fit stopped on SIGTERM at step \d+; saved ", said), said
        assert launcher.returncode == {"open_mpi": 1, "mpich": 0}[name]  # theirs: the ranks say 143

    def test_a_killed_rank_ends_the_job(self, job):
        launcher, pids, name = job
        os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        said = self.rest(launcher)
        assert time.monotonic() - start < scaled(30), said
        assert launcher.returncode in {"open_mpi": (137,), "mpich": (9, 255)}[name], (launcher.returncode, said)
        while any(map(lives, pids)):
            assert time.monotonic() - start < scaled(60)
            time.sleep(0.1)


class TestSlurmEndsAJob:
    def submit(self, slurm, name, *options, body=""):
        folder = slurm.folder / name
        folder.mkdir()
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --open-mode=append -o {folder}/out\n{body}"
            f"cd {folder} && srun --wait=60 {sys.executable} {slurm.folder}/train.py 200 0.2 100\n"
            "echo srun ended with $?\n"
        )
        slurm.run("sbatch", "-J", name, *options, str(script))
        return folder / "out"

    def wait(self, out, word, seconds=90):
        deadline = time.monotonic() + scaled(seconds)
        while not (out.exists() and word in out.read_text()):
            assert time.monotonic() < deadline, f"never {word!r}: {out.read_text() if out.exists() else ''}"
            time.sleep(0.2)

    def gone(self, slurm, name, seconds=60):
        deadline = time.monotonic() + scaled(seconds)
        while slurm.run("squeue", "-h", "-n", name, "-o", "%i"):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def test_a_failure_has_its_own_status(self, slurm):
        """srun's is the highest of its tasks'; with -K it would be 143, as if somebody had stopped the job."""
        out = self.submit(slurm, "failing", body="export FAILS=1\n")
        self.wait(out, "srun ended with")
        assert "srun ended with 1\n" in out.read_text(), out.read_text()
        assert "ValueError: a bad batch" in out.read_text()
        self.gone(slurm, "failing")

    def test_scancel_saves(self, slurm):
        out = self.submit(slurm, "cancelled")
        self.wait(out, "step")
        slurm.run("scancel", "-n", "cancelled")
        self.wait(out, "fit stopped on SIGTERM at step")
        self.gone(slurm, "cancelled")
        assert "saved " in out.read_text()
        assert list(out.parent.rglob("interrupted*.ckpt"))

    @pytest.mark.parametrize("seconds", [1, 4, 7])
    def test_scancel_while_the_ranks_start_ends_them_at_once(self, slurm, seconds):
        """Not when Slurm kills them, 30 s later; the step's status is that of SIGTERM."""
        name = f"starting-{seconds}"
        out = self.submit(slurm, name, body="trap '' TERM\necho begun\n")
        self.wait(out, "begun")
        time.sleep(seconds)
        cancelled = time.monotonic()
        slurm.run("scancel", "-n", name)
        self.gone(slurm, name)
        assert time.monotonic() - cancelled < scaled(15), out.read_text()
        assert not re.search(r"SIGKILL|^[\w.]+Error\b", out.read_text(), re.MULTILINE), out.read_text()

    def test_preempted_job_resumes(self, slurm):
        """Slurm ends it for a job of a higher tier, and puts it back by itself."""
        out = self.submit(slurm, "preempted", "--requeue")
        self.wait(out, "step 3")
        slurm.run("srun", "-p", "urgent", "-N2", "--exclusive", "true")
        self.wait(out, "fit stopped on SIGTERM at step")
        (step,) = re.findall(r"fit stopped on SIGTERM at step (\d+); saved", out.read_text())
        deadline = time.monotonic() + scaled(90)
        while not (again := re.findall(r"^step (\d+)$", out.read_text().partition("fit stopped")[2], re.MULTILINE)):
            assert time.monotonic() < deadline, out.read_text()
            job = slurm.run("squeue", "-h", "-t", "PENDING", "-n", "preempted", "-o", "%i").strip()
            if job:  # it would wait for two minutes
                slurm.start("n0", "scontrol", "update", f"JobId={job}", "StartTime=now").wait(timeout=60)
            time.sleep(0.5)
        assert again[0] == step
        slurm.run("scancel", "-n", "preempted")
        self.gone(slurm, "preempted")

    def test_the_signal_before_the_time_limit_without_scontrol(self, slurm):
        """``--signal`` as Slurm sends it, in a container without Slurm's client: that is said, and not fatal."""
        out = self.submit(
            slurm,
            "contained",
            "--time=60",
            "--signal=USR1@3000",
            body="export TORCHHAL_REQUEUE=1\nmkdir bin; ln -s $(which srun) bin/srun\nexport PATH=$PWD/bin\n",
        )
        self.wait(out, "step")
        job = slurm.run("squeue", "-h", "-n", "contained", "-o", "%i").strip()
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=40")  # the signal is due, 50 minutes before that
        self.wait(out, "fit stopped on SIGUSR1 at step")
        self.gone(slurm, "contained")
        said = out.read_text()
        assert "there is no scontrol here" in said and "saved " in said
        assert f"srun ended with {128 + signal.SIGUSR1}" in said, said
