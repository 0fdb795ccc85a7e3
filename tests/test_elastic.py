"""torchrun starts killed workers anew, on one host and on two, and with nodes that join and are lost: all real.

The hosts are made by ``tests/clusters``: root, iproute2 and util-linux, else the tests that need them skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from cluster_hosts import cluster_of

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

SAMPLES = 192
SHORT_CALL = "last_call_timeout=3"
QUICK = f"{SHORT_CALL},keep_alive_interval=1,keep_alive_max_attempt=8"
"""A node that says nothing for 8 s is lost: a busy machine may be silent for some."""

TRAIN = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal
from torchhal.checkpoint import _local_file as local

folder, strategy, epochs, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
kills = [entry.split(":") for entry in sys.argv[5:]]  # step:rank:how


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        time.sleep(0 if os.path.exists(f"{folder}/hurry") else pause)
        return (self.layers(batch[1]) * torch.rand(4)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Life(torchhal.Callback):
    def tell(self, *words):
        with open(f"{folder}/log", "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            self.tell("life", trainer.world_size, trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.tell("step", trainer.current_epoch, trainer.global_step, *batch[0].tolist())
        for step, rank, how in kills:
            if trainer.global_step == int(step) and trainer.global_rank == int(rank) and self.first(f"{step}-{how}"):
                if how == "saving":  # the file is written under another name, and not yet whole
                    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    def first(self, name):
        try:
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


torchhal.seed_everything(7)
samples = torch.arange(192)
trainer = torchhal.Trainer(
    accelerator="cpu", strategy=strategy, devices="auto", num_nodes="auto", max_epochs=epochs, logger=False,
    callbacks=[Life(), torchhal.ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=4)],
    enable_progress_bar=False, enable_model_summary=False,
)
net = Net()
data = TensorDataset(samples, torch.sin(samples.unsqueeze(1) * torch.arange(1.0, 9)))
trainer.fit(net, DataLoader(data, 4, shuffle=True), ckpt_path="last")
if trainer.is_global_zero:
    torch.save(net.state_dict(), f"{folder}/weights.pt")
"""

# the third one in the midst of a save
KILLS = ["6:1:step", "11:0:step", "16:0:saving", "27:1:step"]


class Run:
    """What a run under torchrun has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def rows(self, kind: str) -> list[list[int]]:
        path = self.folder / "log"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [[int(word) for word in row[1:]] for row in rows if row[0] == kind]

    @property
    def lives(self) -> list[list[int]]:
        """World size and first step of each."""
        return self.rows("life")

    def weights(self) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / "weights.pt")
        return loaded

    def seen(self, epoch: int) -> Counter[int]:
        """The samples of an epoch in the steps that count: those of the last life that took them."""
        rows = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        steps: dict[int, list[int]] = {}
        for row in rows:
            numbers = [int(word) for word in row[1:]]
            if row[0] == "life":
                steps = {step: samples for step, samples in steps.items() if step <= numbers[1]}
            elif numbers[0] == epoch:
                steps.setdefault(numbers[1], []).extend(numbers[2:])
        return Counter(sample for samples in steps.values() for sample in samples)


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def run_here(folder: Path, processes: int, *arguments: str, restarts: int = 0) -> tuple[Run, str]:
    run = Run(folder)
    script = folder / "train.py"
    script.write_text(TRAIN)
    options = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    left = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHHAL", "SLURM"))}
    # a session of its own, so that all of it can be ended
    process = subprocess.Popen(
        [*torchrun(*options), str(script), str(folder), *arguments], cwd=folder, text=True, start_new_session=True,
        env={**left, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    return run, said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("elastic") / "undisturbed", 2, "ddp", "2", "0")[0]


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(2) as made:
        (made.folder / "train.py").write_text(TRAIN)
        yield made


def check_same_end(run: Run, undisturbed: Run) -> None:
    """Five lives, each from the newest checkpoint, and in the end nothing tells them from one."""
    assert run.lives == [[2, 0], [2, 4], [2, 8], [2, 12], [2, 24]]
    expected = undisturbed.weights()
    found = run.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run.seen(0) == run.seen(1) == Counter(range(SAMPLES))


def test_killed_workers_cost_the_steps_since_the_last_checkpoint(tmp_path, undisturbed):
    """Two kills in an epoch, one in the midst of a save, one in the next: torchrun needs as many restarts."""
    run, _ = run_here(tmp_path / "killed", 2, "ddp", "2", "0", *KILLS, restarts=4)
    check_same_end(run, undisturbed)


def test_on_two_hosts(cluster, undisturbed):
    run = Run(cluster.folder / "two")
    options = [
        "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        "n1:29531", "--rdzv-conf", SHORT_CALL,
    ]  # fmt: skip
    nodes = [
        cluster.start(host, *torchrun(*options), "train.py", str(run.folder), "ddp", "2", "0", *KILLS)
        for host in ("n1", "n2")
    ]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    check_same_end(run, undisturbed)


def test_a_node_joins_and_is_lost(cluster):
    """--nnodes 1:2: alone, both, alone again; each sample counts once in each epoch."""
    run, epochs = Run(cluster.folder / "joins"), 10  # enough to do for one node until the other has imported torch
    options = [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        "n1:29532", "--rdzv-conf", QUICK,
    ]  # fmt: skip

    def start(host):
        return cluster.start(
            host, *torchrun(*options), "train.py", str(run.folder), "ddp", str(epochs), "0.15",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip

    def wait(done, seconds=150):
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (run.lives, (run.folder / "log").read_text()[-2000:])
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.1)

    first = start("n1")
    wait(lambda: len(run.rows("step")) >= 6)
    second = start("n2")
    wait(lambda: len(run.lives) == 2)
    both = len(run.rows("step"))
    wait(lambda: len(run.rows("step")) >= both + 20)
    lose(cluster, "n2")
    (run.folder / "hurry").touch()
    said = first.communicate(timeout=300)[0]
    second.communicate(timeout=30)
    assert first.returncode == 0, said
    assert [size for size, _ in run.lives] == [1, 2, 1]
    assert "SIGTERM" in said
    assert run.lives[1][1] >= 6, "the signal for the first to join in anew made it save"
    for epoch in range(epochs):
        assert run.seen(epoch) == Counter(range(SAMPLES)), epoch


def lose(cluster, host: str) -> None:
    """SIGKILL for all that runs on a host, as if its power had gone."""
    keeper = (cluster.hosts / f"{host}.pid").read_text().strip()
    network = os.readlink(f"/proc/{keeper}/ns/net")
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and entry != keeper and os.readlink(f"/proc/{entry}/ns/net") == network:
                os.kill(int(entry), signal.SIGKILL)
        except OSError:  # it has ended, or is none of ours
            pass


def test_another_number_of_processes_goes_on(tmp_path):
    """A job that died is started again with another number of processes: sharded states are shared out anew."""
    folder = tmp_path / "sizes"
    run = Run(folder)
    (folder / "train.py").write_text(TRAIN)
    said = []
    for processes, strategy, kills in ((2, "zero2", ["6:0:step"]), (3, "zero3", ["8:1:step"]), (1, "zero3", [])):
        options = ["--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [*torchrun(*options), "train.py", str(folder), strategy, "2", "0", *kills], cwd=folder, check=False,
            capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        said.append(done.stdout + done.stderr)
        assert done.returncode == bool(kills), said[-1]
    assert [size for size, _ in run.lives] == [2, 3, 1]
    for epoch in range(2):
        seen = run.seen(epoch)
        assert set(seen) == set(range(SAMPLES))
        assert sum(seen.values()) <= SAMPLES + 2, "three processes pad what they share"
    assert "An optimizer step takes 12 samples, not 8 as before" in said[1]
    assert "accumulate_grad_batches=2 keeps what an optimizer step takes as it was" in said[2]
