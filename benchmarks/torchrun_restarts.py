"""A worker under torchrun is killed again and again: how often the job forms anew, and how long that takes.

    python benchmarks/torchrun_restarts.py [--restarts 20] [--processes 2] [--hosts 1,2] [--raw]

In each life one rank, another one each time, is ended by SIGKILL after its third step. torchrun gets as many restarts
as there are kills, so a single attempt that doesn't form fails the job. Two hosts are made from namespaces, by
tests/clusters: root and iproute2, else they are left out. ``--raw`` does the same with init_process_group alone,
to see what torch does without us.

Seconds are from the kill to the first step of the next life: torchrun sees it, ends the others, starts Python, which
imports torch. "without work" is that start alone: a process that imports torch and torchhal and ends.
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tests" / "clusters"
LAST_STEPS = 3


def log(folder: Path, *words: object) -> None:
    with open(folder / "log", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def kills(folder: Path) -> int:
    path = folder / "log"
    return path.read_text().count("kill ") if path.exists() else 0


before = 0  # kills before this life


def after_step(folder: Path, restarts: int, rank: int, world_size: int, step: int) -> None:
    """``step`` counts this life's, from 1."""
    global before
    if step == 1:
        before = kills(folder)  # now: when the victim of this life has died, another one would think that it is next
        if rank == 0:
            log(folder, "step", time.time())
    if step == LAST_STEPS and before < restarts and rank == before % world_size:
        log(folder, "kill", time.time())
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, restarts: int) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from torchhal import Callback, ModelCheckpoint, Trainer

    class Line(torch.nn.Linear):
        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Kill(Callback):
        first = 0

        def on_train_start(self, trainer, module):
            self.first = trainer.global_step

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            step = trainer.global_step - self.first
            after_step(folder, restarts, trainer.global_rank, trainer.world_size, step)

    x = torch.randn(4096, 8)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices="auto", num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), logger=False,
        max_steps=(restarts + 1) * LAST_STEPS, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[Kill(), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1)],
    )  # fmt: skip
    trainer.fit(Line(8, 1), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8), ckpt_path="last")


def train_raw(folder: Path, restarts: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    left = restarts - kills(folder)
    dist.barrier()
    for step in range(1, LAST_STEPS + 1 + (left > 0) * 100):
        dist.all_reduce(torch.ones(8))
        after_step(folder, restarts, dist.get_rank(), dist.get_world_size(), step)
    dist.destroy_process_group()


def run(hosts: int, processes: int, restarts: int, raw: bool, timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="torchhal-restarts-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        up = folder / "hosts"
        rendezvous = ["--standalone"] if hosts == 1 else [
            "--nnodes", str(hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29500",
            "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes),
            "--max-restarts", str(restarts), __file__, "--worker", name, "--restarts", str(restarts),
            *(["--raw"] if raw else []),
        ]  # fmt: skip
        started = []
        try:
            if hosts > 1:
                subprocess.run([TOOLS / "hosts-up", up, str(hosts)], check=True)
            for host in range(1, hosts + 1):
                there = [*([TOOLS / "on", up, f"n{host}"] if hosts > 1 else []), *command]
                environ = {**os.environ, "OMP_NUM_THREADS": "1"}
                with open(folder / f"out{host}", "w") as out:
                    started.append(subprocess.Popen(there, stdout=out, stderr=out, env=environ, start_new_session=True))
            deadline = time.monotonic() + timeout
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if hosts > 1:
                subprocess.run([TOOLS / "hosts-down", up], check=False, capture_output=True)
        report(f"{hosts} host(s) x {processes} process(es){', init_process_group alone' if raw else ''}", folder, codes)


def report(title: str, folder: Path, codes: list) -> None:
    rows = [line.split() for line in (folder / "log").read_text().splitlines()]
    seconds = [
        float(after[1]) - float(row[1])
        for row, after in itertools.pairwise(rows)
        if (row[0], after[0]) == ("kill", "step")
    ]
    formed, asked = len(seconds), sum(row[0] == "kill" for row in rows)
    how = f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s" if seconds else "none"
    print(f"{title}: {formed} of {asked} restarts ({how}), torchrun ended with {codes}", flush=True)
    if any(codes):
        for path in sorted(folder.glob("out*")):
            print("\n".join(path.read_text(errors="replace").splitlines()[-40:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="on each host")
    parser.add_argument("--hosts", default="1,2", help="numbers of hosts, one after the other")
    parser.add_argument("--raw", action="store_true", help="init_process_group alone, without torchhal")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        (train_raw if options.raw else train)(options.worker, options.restarts)
        return
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torchhal, torch.distributed"], check=True)
    print(f"without work: {time.perf_counter() - start:.1f} s")
    for hosts in map(int, options.hosts.split(",")):
        if hosts > 1 and (os.geteuid() != 0 or not shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")):
            print(f"{hosts} hosts: left out, as they need root and iproute2")
            continue
        run(hosts, options.processes, options.restarts, options.raw, options.timeout)


if __name__ == "__main__":
    main()
