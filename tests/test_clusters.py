"""Slurm, Open MPI, MPICH, torchrun and hosts by hand, all real, on two hosts: see cluster_hosts.py."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster_hosts import LAUNCHERS, MPICH, OPEN_MPI, TOOLS, Cluster, cluster_of, needs
from limits import scaled
from pages import blocks_of, write_files
from tiers import slow

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal.resolve._launcher_choice import choose_environment

pytestmark = pytest.mark.timeout(500)

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal

strategy, num_nodes = sys.argv[1], int(sys.argv[2])


class Digits(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weights(torchhal.Callback):
    def on_train_end(self, trainer, module):
        state = trainer.strategy.module_state_dict()
        if trainer.is_global_zero:
            total = [f"{float(value.double().sum()):.5f}" for value in state.values()]
            print("RESULT", trainer.world_size, *total, flush=True)


images, labels = torch.load("digits.pt")
trainer = torchhal.Trainer(
    accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp2" else "auto", num_nodes=num_nodes,
    max_epochs=1, callbacks=[Weights()], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(TensorDataset(images, labels), 48 // trainer.world_size))
"""


@pytest.fixture(scope="module")
def cluster():
    from sklearn.datasets import load_digits  # here: each worker of each session collects this file

    with cluster_of(2) as made:
        images, labels = (torch.tensor(part[:480]) for part in load_digits(return_X_y=True))
        torch.save((images.float() / 16, labels), made.folder / "digits.pt")
        (made.folder / "train.py").write_text(TRAIN)
        yield made


@pytest.fixture
def numbers_of(monkeypatch):
    """What each process of a job would be told, from its captured variables."""

    def read(rows, num_nodes):
        found = []
        for row in rows:
            with monkeypatch.context() as patch:
                for name in os.environ:
                    if name.startswith(LAUNCHERS):
                        patch.delenv(name)
                for name, value in row.items():
                    patch.setenv(name, value)
                part = choose_environment({}, CPUAccelerator(), [])
                environment = part.value
                if part.alias != "local":
                    environment.validate_settings(num_devices=environment.local_world_size(), num_nodes=num_nodes)
                found.append(
                    (
                        environment.global_rank(), environment.node_rank(), environment.local_rank(),
                        environment.world_size(), environment.local_world_size(), part.alias,
                        environment.main_address,
                    )
                )  # fmt: skip
        return sorted(found)

    return read


def ranks(alias, address, *places):
    """((node, local), ...) in the order of ranks, as :func:`numbers_of` gives them."""
    sizes = {node: sum(other == node for other, _ in places) for node, _ in places}
    return [(rank, node, local, len(places), sizes[node], alias, address) for rank, (node, local) in enumerate(places)]


ALONE = [(0, 0, 0, 1, 1, "local", "127.0.0.1")]


class TestSteps:
    def test_forms_of_srun(self, slurm, numbers_of):
        packed = ranks("slurm", "n1", (0, 0), (0, 1), (0, 2), (1, 0))
        cyclic = ranks("slurm", "n1", (0, 0), (1, 0), (0, 1), (0, 2))
        even = ranks("slurm", "n1", (0, 0), (0, 1), (1, 0), (1, 1))
        for nodes, expected, command in (
            (2, packed, ["srun", "-N2", "-n4"]),
            (2, cyclic, ["srun", "-N2", "-n4", "-m", "cyclic"]),
            (2, even, ["srun", "-N2", "--ntasks-per-node=2"]),
            (2, even, ["salloc", "-Q", "-N2", "--ntasks-per-node=2", "srun", "-J", "bash"]),
            (2, packed, ["srun", "-N2", "-n4", "--mpi=pmi2"]),
            (1, ranks("slurm", "n2", (0, 0), (0, 1)), ["srun", "-w", "n2", "-n2"]),
            (1, ALONE, ["srun", "-N1", "-n1"]),
            (1, ALONE, ["salloc", "-Q", "-N2", "-n4"]),
            (1, ALONE, ["srun", "--pty"]),
        ):
            assert numbers_of(slurm.captured(*command), nodes) == expected, command

    @pytest.mark.slow
    def test_a_step_in_a_part_of_the_allocation(self, slurm, numbers_of):
        rows = slurm.captured("salloc", "-Q", "-N2", "--ntasks-per-node=2", "srun", "-N1", "-w", "n2", "-n2")
        assert numbers_of(rows, 1) == ranks("slurm", "n2", (0, 0), (0, 1))

    @pytest.mark.slow
    def test_arbitrary_distribution(self, slurm, numbers_of):
        """Rank 0 is where the host file begins; Slurm's own list of the step's hosts is sorted."""
        path = slurm.folder / "order"
        path.write_text("n2\nn1\nn2\n")
        rows = slurm.captured("srun", "-n3", "-m", "arbitrary", variables={"SLURM_HOSTFILE": str(path)})
        found = numbers_of([{**row, "SLURM_HOSTFILE": str(path)} for row in rows], 2)
        assert [(rank, local, size, address) for rank, _, local, _, size, _, address in found] == [
            (0, 0, 2, "n2"), (1, 0, 1, "n2"), (2, 1, 2, "n2"),
        ]  # fmt: skip

    @pytest.mark.slow
    def test_a_heterogeneous_job(self, slurm, numbers_of):
        rows = slurm.captured("srun", "-n1", "-w", "n2", ":", "-n2", "-w", "n1")
        with pytest.raises(ConfigurationError, match=r"rank 0 runs on n2.*set MASTER_ADDR=n2"):
            numbers_of(rows, 2)
        found = numbers_of([{**row, "MASTER_ADDR": "n2"} for row in rows], 2)
        assert found == ranks("slurm", "n2", (0, 0), (1, 0), (1, 1))

    @pytest.mark.slow
    def test_array_elements_are_jobs(self, slurm, numbers_of, monkeypatch):
        """With a port each: one element's job number is the whole array's."""
        script = slurm.folder / "array.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --array=0-1 -o /dev/null\n"
            f"srun bash -c 'env -0 > {slurm.folder}/element-$SLURM_ARRAY_TASK_ID-$SLURM_PROCID'\n"
        )
        slurm.run("sbatch", "-W", str(script), timeout=60)
        ports = {}
        for element in "01":
            rows = [
                dict(line.split("=", 1) for line in path.read_text().split("\0") if line.startswith(LAUNCHERS))
                for path in sorted(slurm.folder.glob(f"element-{element}-*"))
            ]
            assert numbers_of(rows, 2) == ranks("slurm", "n1", (0, 0), (1, 0))
            with monkeypatch.context() as patch:
                for name, value in rows[0].items():
                    patch.setenv(name, value)
                ports[element] = choose_environment({}, CPUAccelerator(), []).value.main_port
        assert ports["0"] != ports["1"]

    @pytest.mark.slow
    def test_a_batch_script_that_a_step_has_submitted(self, slurm, numbers_of):
        script, kept = slurm.folder / "job.sh", slurm.folder / "batch.env"
        script.write_text(f"#!/bin/bash\n#SBATCH -N2 -n2 -o /dev/null\nenv -0 > {kept}\n")
        slurm.run("srun", "-n1", "sbatch", "-W", str(script), timeout=60)
        row = dict(line.split("=", 1) for line in kept.read_text().split("\0") if "=" in line)
        assert row["SLURM_STEP_NUM_TASKS"] == "1"
        assert row["SLURM_NTASKS"] == "2"
        assert numbers_of([{name: row[name] for name in row if name.startswith(LAUNCHERS)}], 1) == ALONE

    def test_concurrent_steps_have_own_ports(self, slurm, monkeypatch):
        """Two steps of one job on one node have ports of their own."""
        step = "srun --overlap -N1 -n2 -w n1"
        rows = slurm.captured("salloc", "-Q", "-N1", "-n4", "bash", "-c", f'{step} "$@" & {step} "$@"; wait', "both")
        assert len(rows) == 4
        ports = set()
        for row in rows:
            with monkeypatch.context() as patch:
                for name, value in row.items():
                    patch.setenv(name, value)
                ports.add(choose_environment({}, CPUAccelerator(), []).value.main_port)
        assert len(ports) == 2

    @pytest.mark.slow
    def test_other_devices_than_tasks_show_both_numbers(self, slurm):
        said = slurm.start("n0", "srun", "-K", "-n2", sys.executable, "-c", (
            "import torchhal; torchhal.Trainer(accelerator='cpu', devices=4, strategy='ddp')"
        )).communicate(timeout=120)[0]  # fmt: skip
        assert "srun started 2 process(es) on this node, but 4 device(s) are asked for" in said


@pytest.fixture(scope="module")
def alone(cluster):
    """The same global batch in one process."""
    return result(cluster.run(sys.executable, "train.py", "none", "1"), 1)


def result(said: str, world_size: int) -> list[float]:
    """The sums of the weights, which rank 0 of as many processes has printed."""
    lines = [line.split() for line in said.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 1 and lines[0][1] == str(world_size), said
    return [float(value) for value in lines[0][2:]]


def equal(expected: list[float]) -> object:
    return pytest.approx(expected, abs=5e-5)


PORTS = itertools.count(29500)


def on_both(cluster: Cluster, *command: str, **variables: str) -> str:
    """``command`` on both hosts, each with its NODE_RANK; what both said."""
    nodes = [cluster.start(host, *command, NODE_RANK=str(rank), **variables) for rank, host in enumerate(("n1", "n2"))]
    said = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    return "".join(said)


class TestTraining:
    """Digits on two hosts, equal to one process on the same global batch. Where the launcher can do it, one of the
    hosts has two of the three processes; ddp2 has one of each host, with two devices."""

    def srun(self, cluster: Cluster, processes: int, *script: str) -> str:
        needs("slurmctld", "slurmd", "srun")
        return cluster.run("srun", "-K", "-N2", f"-n{processes}", *script)

    def open_mpi(self, cluster: Cluster, processes: int, *script: str) -> str:
        """Rank 0 on the second host, and nodes of two sizes: who shares a host is found out among the ranks."""
        needs("mpirun.openmpi")
        meeting = ("-x", "MASTER_ADDR=n2", "-x", f"MASTER_PORT={next(PORTS)}")
        return cluster.run(*OPEN_MPI, "--host", f"n2:{processes - 1},n1:1", *meeting, *script)

    def mpich(self, cluster: Cluster, processes: int, *script: str) -> str:
        needs("mpiexec.hydra")
        meeting = ("-genv", "MASTER_ADDR", "n1", "-genv", "MASTER_PORT", str(next(PORTS)))
        hosts = ("-hosts", f"n1:{processes - 1},n2:1", "-n", str(processes))
        return cluster.run(*MPICH, *hosts, *meeting, *script)

    # zero3 asks the launcher for nothing that ddp doesn't; ddp2 does, for what a node has
    @pytest.mark.parametrize(
        ("launcher", "strategy"),
        [
            ("srun", "ddp"), slow("srun", "zero3"), slow("srun", "ddp2"), slow("open_mpi", "ddp"),
            slow("open_mpi", "ddp2"), slow("mpich", "ddp"), slow("mpich", "ddp2"),
        ],
    )  # fmt: skip
    def test_launchers_of_any_number(self, cluster, alone, launcher, strategy):
        processes = 2 if strategy == "ddp2" else 3
        said = getattr(self, launcher)(cluster, processes, sys.executable, "train.py", strategy, "2")
        assert result(said, processes) == equal(alone)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", "ddp2"])
    def test_torchrun(self, cluster, alone, strategy):
        said = on_both(
            cluster, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"n1:{next(PORTS)}", "train.py", strategy, "2",
        )  # fmt: skip
        assert result(said, 2) == equal(alone)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", "ddp2"])
    def test_by_hand(self, cluster, alone, strategy):
        meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": str(next(PORTS))}
        said = on_both(cluster, sys.executable, "train.py", strategy, "2", **meeting)
        assert result(said, 2) == equal(alone)

    @pytest.mark.slow
    def test_torchs_own_variables(self, cluster, alone):
        """RANK, WORLD_SIZE, LOCAL_RANK and an address: nothing else says that there are two hosts."""
        meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": str(next(PORTS)), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        script = f"unset NODE_RANK; exec {sys.executable} train.py ddp 2"
        said = on_both(cluster, "bash", "-c", f"export RANK=$NODE_RANK; {script}", **meeting)
        assert result(said, 2) == equal(alone)


class TestOneInsideTheOther:
    @pytest.mark.slow
    def test_torchrun_in_a_step(self, slurm, alone):
        said = slurm.run(
            "srun", "-K", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"n1:{next(PORTS)}",
            "train.py", "ddp", "2",
        )  # fmt: skip
        assert result(said, 2) == equal(alone)

    @pytest.mark.slow
    def test_open_mpi_in_an_allocation(self, slurm, alone):
        """Its daemons are a step of one task a node, whose variables every rank inherits."""
        needs("mpirun.openmpi")
        command = ("salloc", "-Q", "-N2", "--ntasks-per-node=2", "mpirun.openmpi", "--allow-run-as-root", "-n", "3")
        meeting = ("-x", "MASTER_ADDR=n1", "-x", f"MASTER_PORT={next(PORTS)}")
        rows = slurm.captured(*command, *meeting)
        assert {row["SLURM_NTASKS"] for row in rows} == {"2"}
        said = slurm.run(*command, *meeting, sys.executable, "train.py", "ddp", "2")
        assert result(said, 3) == equal(alone)

    @pytest.mark.slow
    def test_mpich_in_an_allocation(self, slurm, alone):
        needs("mpiexec.hydra")
        meeting = ("-genv", "MASTER_ADDR", "n1", "-genv", "MASTER_PORT", str(next(PORTS)))
        command = ("salloc", "-Q", "-N2", "--ntasks-per-node=2", "mpiexec.hydra", "-n", "3")
        said = slurm.run(*command, *meeting, sys.executable, "train.py", "ddp", "2")
        assert result(said, 3) == equal(alone)


class TestIPv6:
    ADDRESS = "fd99::101"  # n1's

    @pytest.mark.slow
    def test_srun(self, slurm, alone):
        meeting = {"MASTER_ADDR": self.ADDRESS, "MASTER_PORT": str(next(PORTS))}
        said = slurm.run("srun", "-K", "-N2", "-n3", sys.executable, "train.py", "ddp", "2", **meeting)
        assert result(said, 3) == equal(alone)

    @pytest.mark.slow
    def test_torchrun(self, cluster, alone):
        """The static rendezvous: torchrun's c10d doesn't take such an address."""
        said = on_both(
            cluster, "bash", "-c", f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 "
            f"--node-rank $NODE_RANK --master-addr {self.ADDRESS} --master-port {next(PORTS)} train.py ddp 2",
        )  # fmt: skip
        assert result(said, 2) == equal(alone)

    @pytest.mark.slow
    def test_by_hand(self, cluster, alone):
        meeting = {"MASTER_ADDR": self.ADDRESS, "MASTER_PORT": str(next(PORTS))}
        said = on_both(cluster, sys.executable, "train.py", "ddp", "2", **meeting)
        assert result(said, 2) == equal(alone)


@pytest.fixture(scope="module")
def mpi4py(tmp_path_factory):
    """A folder with mpi4py, which the other tests must not find: its wheel takes the MPI that it meets."""
    folder = tmp_path_factory.mktemp("mpi4py")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(folder)]
    done = subprocess.run([*command, "mpi4py>=4.1"], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"environment: mpi4py can't be installed here: {done.stderr.strip()[-300:]}")
    return str(folder)


class TestMPISaysWhereTheRanksMeet:
    """Without MASTER_ADDR and MASTER_PORT: rank 0's host and a port, by mpi4py."""

    @pytest.mark.slow
    def test_open_mpi(self, cluster, alone, mpi4py):
        needs("mpirun.openmpi")
        told = ("-x", f"PYTHONPATH={mpi4py}", "-x", "MPI4PY_MPIABI=openmpi")
        said = cluster.run(*OPEN_MPI, "--host", "n2:2,n1:1", *told, sys.executable, "train.py", "ddp", "2")
        assert result(said, 3) == equal(alone)

    @pytest.mark.slow
    def test_mpich(self, cluster, alone, mpi4py):
        needs("mpiexec.hydra")
        (library,) = Path("/usr/lib").glob("*/libmpich.so.12")
        (cluster.folder / "mpich").mkdir()
        (cluster.folder / "mpich" / "libmpi.so.12").symlink_to(library)  # its own name, which Debian has changed
        told = ("-genv", "PYTHONPATH", mpi4py, "-genv", "MPI4PY_MPIABI", "mpich", "-genv", "LD_LIBRARY_PATH",
                str(cluster.folder / "mpich"))  # fmt: skip
        hosts = ("-hosts", "n2:2,n1:1", "-n", "3")
        said = cluster.run(*MPICH, *hosts, *told, sys.executable, "train.py", "ddp", "2")
        assert result(said, 3) == equal(alone)

    @pytest.mark.slow
    def test_of_another_mpi(self, cluster, mpi4py):
        needs("mpirun.openmpi", "mpiexec.hydra")
        told = ("-genv", "PYTHONPATH", mpi4py, "-genv", "MPI4PY_MPIABI", "openmpi")
        hosts = ("-hosts", "n1:1,n2:1", "-n", "2")
        started = cluster.start("n0", *MPICH, *hosts, *told, sys.executable, "train.py", "ddp", "2")
        said = started.communicate(timeout=120)[0]
        assert started.returncode != 0
        assert "mpi4py counts 1 process(es), but mpiexec started 2" in said, said


class TestPages:
    """What docs/how-to shows, with the commands that it shows, on hosts of the names that it uses."""

    def folder(self, cluster, page):
        folder = cluster.folder / page
        folder.mkdir()
        blocks = blocks_of(PAGES / f"{page}.md")
        write_files(blocks, folder)
        return folder, [block.text[-1] for block in blocks if block.language == "bash"]

    @pytest.mark.slow
    def test_slurm(self, slurm):
        folder, _ = self.folder(slurm, "slurm")
        slurm.run("bash", "-c", f"cd {folder}; sbatch -W -o out job.sh", PATH=PATH)
        assert "4 process(es) ended at step 45" in (folder / "out").read_text()

    @pytest.mark.slow
    def test_mpi(self, cluster):
        needs("mpirun.openmpi", "mpiexec.hydra")
        folder, commands = self.folder(cluster, "mpi")
        there = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HYDRA_LAUNCHER": "ssh",
            "OMPI_MCA_plm_rsh_agent": f"{TOOLS}/rsh", "HYDRA_LAUNCHER_EXEC": f"{TOOLS}/rsh",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }  # fmt: skip
        assert len(commands) == 2
        for command in commands:
            # both packages call their program mpirun and mpiexec, and one of them has the name
            here = command.replace("mpirun ", "mpirun.openmpi ").replace("mpiexec ", "mpiexec.hydra ")
            said = cluster.run("bash", "-c", f"cd {folder}; {here}", PATH=PATH, **there)
            assert "4 process(es) ended at step 45" in said, command


REQUEUED = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal
from torchhal.cluster.slurm import SlurmEnvironment

folder = sys.argv[1]


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero:
            with open(f"{folder}/progress", "a") as file:
                print(os.environ.get("SLURM_RESTART_COUNT", "0"), self.trainer.global_step, file=file)
            time.sleep(float(sys.argv[2]))
        return (self.layer(batch[0]) * torch.rand(4)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(1)
trainer = torchhal.Trainer(
    accelerator="cpu", strategy="ddp", devices="auto", num_nodes=2, max_epochs=2, default_root_dir=folder,
    plugins=SlurmEnvironment(requeue=True), logger=False, enable_progress_bar=False, enable_model_summary=False,
)
torchhal.seed_everything(7)
net = Net()
trainer.fit(net, DataLoader(TensorDataset(torch.randn(120, 8)), 2, shuffle=True), ckpt_path="last")
if trainer.is_global_zero:
    torch.save(net.state_dict(), f"{folder}/weights.pt")
"""


@pytest.mark.slow
def test_requeued_job_equals_undisturbed(slurm):
    """Signal, save, scontrol requeue, the next life from the same batch: the weights are the same, bit for bit."""
    (slurm.folder / "requeued.py").write_text(REQUEUED)
    for name, pause in (("disturbed", "0.25"), ("alone", "0")):
        folder = slurm.folder / name
        folder.mkdir()
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --requeue --open-mode=append -o {folder}/out\n"
            f"srun -K {sys.executable} {slurm.folder}/requeued.py {folder} {pause}\n"
        )
        slurm.run("sbatch", "-J", name, str(script))

    progress = slurm.folder / "disturbed" / "progress"
    out = slurm.folder / "disturbed" / "out"

    def steps(life: int) -> list[int]:
        rows = [line.split() for line in progress.read_text().splitlines()] if progress.exists() else []
        return [int(step) for count, step in rows if int(count) == life]

    def wait(what: str, done: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + scaled(seconds)
        while not done():
            if time.monotonic() > deadline:
                said = out.read_text() if out.exists() else ""
                jobs = slurm.run("squeue", "-t", "all", "-o", "%i %j %T %r %S")
                raise AssertionError(f"{what}: nothing within {seconds} s\n{jobs}{said}")
            time.sleep(0.2)

    def begins() -> bool:
        """A requeued job waits for two minutes, unless it is told to begin at once, when its last life is over."""
        said = slurm.run("squeue", "-h", "-t", "all", "-n", "disturbed", "-o", "%i %T").split()
        if not said:  # between two lives there are moments without a job
            return False
        job, state = said
        if state == "PENDING":
            slurm.start("n0", "scontrol", "update", f"JobId={job}", "StartTime=now").wait(timeout=60)
        return state == "RUNNING"

    for life in range(3):
        wait(f"steps of life {life}", lambda life=life: len(steps(life)) >= 4)
        slurm.run("scancel", "-s", "USR1", "-n", "disturbed")
        wait(f"requeue {life + 1}", lambda life=life: out.read_text().count("is requeued") == life + 1)
        wait(f"life {life + 1}", begins)
    wait("the end", (slurm.folder / "disturbed" / "weights.pt").exists)
    wait("the end of the other", (slurm.folder / "alone" / "weights.pt").exists)

    everything = [step for life in range(4) for step in steps(life)]
    assert everything == list(range(60)), "each step once, in order"
    one, other = (torch.load(slurm.folder / name / "weights.pt") for name in ("disturbed", "alone"))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.slow
def test_an_element_of_an_array_is_requeued_alone(slurm):
    """By its own number: the job's would be all of them. Slurm ends the step before its scontrol has come back."""
    (slurm.folder / "requeued.py").write_text(REQUEUED)
    slow = slurm.folder / "slow" / "scontrol"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@"; status=$?; sleep 2; exit $status\n')
    slow.chmod(0o755)
    script = slurm.folder / "elements.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --array=0-1%1 --requeue\n"
        f"#SBATCH --open-mode=append -o {slurm.folder}/out-%a\n"
        f"mkdir -p {slurm.folder}/element-$SLURM_ARRAY_TASK_ID\nexport PATH={slow.parent}:$PATH\n"
        f"srun {sys.executable} {slurm.folder}/requeued.py {slurm.folder}/element-$SLURM_ARRAY_TASK_ID 0.1\n"
    )
    job = slurm.run("sbatch", "--parsable", "-J", "elements", str(script)).strip()
    first, second = (slurm.folder / f"element-{number}" for number in range(2))

    def wait(what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + scaled(120)
        while not done():
            assert time.monotonic() < deadline, f"{what}: {(slurm.folder / 'out-0').read_text()}"
            time.sleep(0.2)

    def steps(folder: Path) -> list[list[str]]:
        progress = folder / "progress"
        return [line.split() for line in progress.read_text().splitlines()] if progress.exists() else []

    wait("steps", lambda: len(steps(first)) >= 4)
    slurm.run("scancel", "-s", "USR1", f"{job}_0")
    wait("requeue", lambda: f"job {job}_0 is requeued" in (slurm.folder / "out-0").read_text())
    wait("the other element", (second / "weights.pt").exists)
    slurm.run("scontrol", "update", f"JobId={job}_0", "StartTime=now")
    wait("the end", (first / "weights.pt").exists)
    assert [step for _, step in steps(first)] == [str(step) for step in range(60)]
    assert {life for life, _ in steps(first)} == {"0", "1"} and {life for life, _ in steps(second)} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["srun -n1 ", "exec "], ids=["one task", "batch script"])
def test_a_job_whose_ranks_torchhal_starts_is_requeued(slurm, start):
    """Two devices in one task of a step, and in a batch script without one: nobody detects Slurm's environment."""
    script = REQUEUED.replace('devices="auto", num_nodes=2', "devices=2").replace(
        "plugins=SlurmEnvironment(requeue=True), ", ""
    )
    assert script.count("devices=2,") == 1 and "plugins=" not in script
    name = start.split()[0]
    folder = slurm.folder / f"own-{name}"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    job, out, progress = folder / "job.sh", folder / "out", folder / "progress"
    job.write_text(
        f"#!/bin/bash\n#SBATCH -N1 -n1 --requeue --open-mode=append -o {out}\nexport TORCHHAL_REQUEUE=1\n"
        f"{start}{sys.executable} {folder}/train.py {folder} 0.25\n"
    )
    slurm.run("sbatch", "-J", f"own-{name}", str(job))
    deadline = time.monotonic() + scaled(150)

    def wait(what: str, done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline, f"{what}: {out.read_text() if out.exists() else 'no output'}"
            time.sleep(0.2)

    def steps() -> list[list[str]]:
        return [line.split() for line in progress.read_text().splitlines()] if progress.exists() else []

    def begins() -> bool:
        for pending in slurm.run("squeue", "-h", "-t", "PENDING", "-n", f"own-{name}", "-o", "%i").split():
            slurm.start("n0", "scontrol", "update", f"JobId={pending}", "StartTime=now").wait(timeout=60)
        return (folder / "weights.pt").exists()

    wait("steps", lambda: len(steps()) >= 4)
    slurm.run("scancel", "-s", "USR1", *(() if name == "srun" else ("--batch",)), "-n", f"own-{name}")
    wait("requeue", lambda: "is requeued" in out.read_text())
    wait("the end", begins)
    assert [step for _, step in steps()] == [str(step) for step in range(60)]
    assert {life for life, _ in steps()} == {"0", "1"}
