"""What a cluster costs, on two hosts made from namespaces: root, iproute2 and Slurm (``make cluster-tools``).

    python benchmarks/cluster.py [--rounds 5] [--only start,death,wire]

start: seconds from ``srun`` to the end of the first step on both hosts, as a ratio to a script with init_process_group
    and DistributedDataParallel under the same srun, in turns (bound 1.15).
death: seconds from the SIGKILL of one host's process to the end of the other's, with a process group that waits for
    five minutes.
wire: bytes that a host sends and receives per step of ``ddp`` over a slow link (20 ms, 20 Mbit/s), with 32-bit
    gradients and with torch's hook that sends 16 bits.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cluster_hosts import TOOLS, Cluster, cluster_of, needs

BOUND = 1.15
PARAMETERS = 400_000

RAW = """
import datetime, os, time
import torch
import torch.distributed as dist

os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
os.environ.update(MASTER_ADDR="n1", MASTER_PORT="29700")
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(24, 8)
loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
loss.backward()
optimizer.step()
print("stepped", time.monotonic(), flush=True)
optimizer.zero_grad()
dist.destroy_process_group()
"""

OURS = """
import sys, time
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset
from torchhal import Callback, Trainer
from torchhal.strategies import DDPStrategy

width, steps, hook = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Net(torch.nn.Sequential):
    def training_step(self, batch, batch_idx):
        if steps > 1000:
            print("step", flush=True)
            time.sleep(0.1)
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stepped(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 1:
            print("stepped", time.monotonic(), flush=True)


hooks = {
    "none": {},
    "fp16": {"comm_hook": default_hooks.fp16_compress_hook},
}
torch.manual_seed(0)
x = torch.randn(24, 8)
layers = [torch.nn.Linear(8, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)]
if width == 1:
    layers = [torch.nn.Linear(8, 1)]
trainer = Trainer(
    accelerator="cpu", strategy=DDPStrategy(**hooks[hook]), devices="auto", num_nodes=2,
    max_epochs=-1, max_steps=steps, callbacks=[Stepped()],
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Net(*layers), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12))
"""


def start(cluster: Cluster, rounds: int) -> float:
    """The ratio of the medians."""
    seconds: dict[str, list[float]] = {"raw": [], "ours": []}
    for _ in range(rounds):
        for name, arguments in (("raw", []), ("ours", ["1", "1", "none"])):
            begun = time.monotonic()
            job = cluster.start("n0", "srun", "-N2", "--ntasks-per-node=1", sys.executable, f"{name}.py", *arguments)
            said = job.communicate(timeout=120)[0]  # how it ended doesn't count: torch's own exit is a race
            stepped = [float(line.split()[1]) for line in said.splitlines() if line.startswith("stepped")]
            assert len(stepped) == 2, said
            seconds[name].append(max(stepped) - begun)
    raw, ours = (statistics.median(seconds[name]) for name in ("raw", "ours"))
    ratio = ours / raw
    print(f"start: {ours:.2f} s from srun to the end of the first step, raw {raw:.2f} s: {ratio:.3f} (bound {BOUND})")
    return ratio


def nodes(cluster: Cluster, port: int, *arguments: str) -> list[subprocess.Popen[str]]:
    return [
        cluster.start(
            f"n{rank + 1}", sys.executable, "-u", "ours.py", *arguments,
            NODE_RANK=str(rank), MASTER_ADDR="n1", MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]  # fmt: skip


def death(cluster: Cluster, rounds: int) -> None:
    seconds = []
    for number in range(rounds):
        killed = number % 2  # the host of the store, then the other one
        both = nodes(cluster, 29710 + number, "1", "100000", "none")
        survivor = both[1 - killed]
        assert survivor.stdout is not None
        while not survivor.stdout.readline().startswith("step"):
            pass
        both[killed].kill()
        begun = time.monotonic()
        survivor.communicate(timeout=120)
        seconds.append(time.monotonic() - begun)
    print(
        f"death: {statistics.median(seconds):.1f} s from a SIGKILL to the end of the other ({max(seconds):.1f} at most)"
    )


def wire(cluster: Cluster) -> None:
    width = round(PARAMETERS**0.5)
    link = subprocess.Popen(
        [sys.executable, TOOLS / "slow-link", cluster.hosts, "n2", "--delay", "20", "--rate", "20"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert link.stdout is not None
        assert link.stdout.readline() == "up\n"
        plain = 0.0
        for number, hook in enumerate(("none", "fp16")):
            few, many = (
                _traffic(cluster, 29730 + 2 * number + turn, str(width), str(steps), hook)
                for turn, steps in enumerate((4, 24))
            )
            bytes_per_step, seconds = ((many[i] - few[i]) / 20 for i in range(2))
            plain = plain or bytes_per_step
            print(
                f"wire: {hook:4} {bytes_per_step / 1e6:6.3f} MB and {seconds:.2f} s a step, "
                f"{bytes_per_step / plain:.2f} of the bytes without a hook"
            )
    finally:
        link.terminate()
        link.wait(30)


def _traffic(cluster: Cluster, port: int, *arguments: str) -> tuple[float, float]:
    """Bytes that one host sent and received, and seconds."""
    before, begun = _counted(cluster), time.monotonic()
    for process in nodes(cluster, port, *arguments):
        said = process.communicate(timeout=400)[0]
        assert process.returncode == 0, said
    return _counted(cluster) - before, time.monotonic() - begun


def _counted(cluster: Cluster) -> int:
    lines = cluster.run("cat", "/proc/net/dev", host="n2").splitlines()[2:]
    rows = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(int(numbers[0]) + int(numbers[8]) for name, numbers in rows.items() if name != "lo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="start,death,wire")
    options = parser.parse_args()
    asked = options.only.split(",")
    ratio = 0.0
    try:
        with cluster_of(2) as cluster:
            (cluster.folder / "raw.py").write_text(RAW)
            (cluster.folder / "ours.py").write_text(OURS)
            if "death" in asked:
                death(cluster, options.rounds)
            if "wire" in asked:
                wire(cluster)
            if "start" in asked:
                needs("srun")
                ratio = start(cluster, options.rounds)
    except pytest.skip.Exception as missing:
        print(f"cluster: not measured: {missing}")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
