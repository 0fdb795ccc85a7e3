"""Bytes per rank and time per step of each strategy, at 1, 2 and 4 processes on the CPU.

    python benchmarks/strategies.py [--steps 12] [--sizes 1 2 4]

Every line is a run of its own of the same small transformer on the same global batch: what a rank holds between two
steps, as a multiple of the whole model's parameters, and the median time of a step as a ratio to one process. `dp` has
that many devices in one process, `ddp2` that many nodes of one device. On a machine with few cores the times say what a
strategy costs beside the computation, not what it gains. Nothing here is a bound.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

CASES = {
    "single_device": [1],
    "dp": [1, 2, 4],
    "ddp2": [1, 2, 4],
    "ddp": [1, 2, 4],
    "zero1": [1, 2, 4],
    "zero2": [1, 2, 4],
    "zero3": [1, 2, 4],
    "tensor_parallel": [1, 2, 4],
    "pipeline": [2, 4],
    "hybrid tensor=2": [2, 4],
    "hybrid shard=2 tensor=2": [4],
    "hybrid pipeline=2 tensor=2": [4],
}
BATCH = 32


def worker(case: str, size: int, steps: int) -> None:
    """One run; rank 0 prints what it found."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import torchhal
    from torchhal import Callback, Trainer

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Model(torchhal.Module):
        tensor_parallel_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(64, 256)
            self.layers = nn.ModuleList(Block(256) for _ in range(8))
            self.head = nn.Linear(256, 10)

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def local(tensor):
        tensor = tensor.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    class Watch(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.held: dict[str, int] = {}
            self.gradients = 0

        def on_before_optimizer_step(self, trainer, module, optimizer):
            grads = (p.grad for p in module.parameters() if p.grad is not None)
            self.gradients = sum(local(grad).nbytes for grad in grads)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.start = time.perf_counter()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.times.append(time.perf_counter() - self.start)

        def on_train_end(self, trainer, module):
            state = trainer.strategy.optimizers[0].state.values()
            moments = [value for entry in state for value in entry.values() if getattr(value, "ndim", 0)]
            self.held = {
                "parameters": sum(local(p).nbytes for p in module.parameters() if not p.is_meta),
                "gradients": self.gradients,
                "optimizer": sum(local(value).nbytes for value in moments),
            }

    alias, *axes = case.split()
    strategy = alias
    if axes:
        from torchhal_parallel.hybrid import HybridStrategy

        strategy = HybridStrategy(data=None, **{axis.split("=")[0]: int(axis.split("=")[1]) for axis in axes})
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1,
        **({"devices": 1, "num_nodes": size} if alias == "ddp2" else {"devices": size}),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=watch,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    data = TensorDataset(torch.randn(steps * BATCH, 64), torch.randint(0, 10, (steps * BATCH,)))

    def loader():
        share = (trainer.strategy.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        return DataLoader(data, BATCH // share)

    model.train_dataloader = loader
    trainer.fit(model)
    if trainer.is_global_zero:
        found = {name: held / whole for name, held in watch.held.items()}
        print("RESULT", json.dumps({**found, "seconds": statistics.median(watch.times[2:])}))


def measure(case: str, size: int, steps: int) -> dict[str, float]:
    """What rank 0 of one run printed; each node of `ddp2` is started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--worker", case, str(size), "--steps", str(steps)]
    count = size if case == "ddp2" else 1
    threads = str(max(1, (os.cpu_count() or 1) // count))  # hosts of their own would not share the cores
    nodes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": str(node),
                **({"OMP_NUM_THREADS": threads} if count > 1 else {}),
            },
        )
        for node in range(count)
    ]
    said = [node.communicate(timeout=300) for node in nodes]
    for out, _ in said:
        for line in out.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{case} on {size} failed:\n" + "\n".join(err[-3000:] for _, err in said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker[0], int(arguments.worker[1]), arguments.steps)
        return
    print("| strategy | processes | parameters | gradients | optimizer | time per step |")
    print("|---|---|---|---|---|---|")
    alone = None
    for case, sizes in CASES.items():
        for size in sizes:
            if size not in arguments.sizes:
                continue
            found = measure(case, size, arguments.steps)
            alone = alone or found["seconds"]
            cells = [f"{found[name]:.2f}" for name in ("parameters", "gradients", "optimizer")]
            print(f"| {case} | {size} | {' | '.join(cells)} | {found['seconds'] / alone:.2f} |", flush=True)


if __name__ == "__main__":
    main()
