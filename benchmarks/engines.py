"""A training step of each engine that is installed here through torchhal, as a ratio to raw DistributedDataParallel.

    .venv-horovod/bin/python benchmarks/engines.py [--steps 50] [--rounds 12]

Two processes on the CPU, over gloo. In each round the raw loop, ddp and the engines train the same model on the same
batches, one after the other, so that a slow moment of the machine falls on all of them. The ratio is that of the
fastest tenths of all steps: what they take where nothing else runs. An engine is a strategy of a plugin that has an
environment of its own (plugins/*/environment/install.py); one that isn't installed here is named with the reason.
Nothing here is a bound.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WARM_UP = 10


def engines() -> dict[str, str]:
    """Return the aliases of the engines, each with the reason why it can't run here, or an empty string."""
    from torchhal import registry

    found = {}
    for path in sorted(ROOT.glob("plugins/*/environment/install.py")):
        plugin = path.parents[1].name
        aliases = [entry for entry in registry.entries("strategy") if entry.distribution == f"torchhal-{plugin}"]
        if not aliases:
            found[plugin] = f"torchhal-{plugin} is not installed"
        for entry in aliases:
            found[entry.component.alias] = entry.load().availability().reason
    return found


def worker(steps: int, rounds: int, aliases: list[str]) -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from torchhal import Callback, Trainer
    from torchhal.errors import TorchhalError

    torch.set_num_threads(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
            self.head = nn.Linear(256, 1)

        def forward(self, x):
            return self.head(self.layers(x))

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = TensorDataset(torch.randn(32 * (steps + WARM_UP), 256), torch.randn(32 * (steps + WARM_UP), 1))

    class Times(Callback):
        """From the start of one batch to that of the next."""

        def __init__(self, times: list[float]) -> None:
            self.times = times

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            now = time.perf_counter()
            if batch_idx > WARM_UP:
                self.times.append(now - self.last)
            self.last = now

    def through_torchhal(alias: str, times: list[float]) -> None:
        trainer = Trainer(
            accelerator="cpu", strategy=alias, devices=2, max_epochs=1, callbacks=[Times(times)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Model(), DataLoader(data, 16))

    def by_hand(times: list[float]) -> None:
        strategy = Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=False).strategy
        strategy.setup_environment()  # the process group that the Trainer's runs have
        try:
            loop(DistributedSampler(data, **strategy.distributed_sampler_kwargs), times)
            gc.collect()  # the wrapper, which hangs now and then if it is freed after its process group
        finally:
            strategy.teardown()

    def loop(sampler: DistributedSampler, times: list[float]) -> None:
        module = Model()
        model, optimizer = DistributedDataParallel(module), module.configure_optimizers()
        last = 0.0
        for index, (x, y) in enumerate(DataLoader(data, 16, sampler=sampler)):
            now = time.perf_counter()
            if index > WARM_UP:
                times.append(now - last)
            last = now
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    times: dict[str, list[float]] = {name: [] for name in ("by hand", *aliases)}
    for _ in range(rounds):
        by_hand(times["by hand"])
        for alias in list(times)[1:]:
            try:
                through_torchhal(alias, times[alias])
            except TorchhalError as error:  # a strategy for other models, on every rank
                del times[alias]
                if os.environ["RANK"] == "0":
                    print(f"{alias:20} left out: {error}", flush=True)
    if os.environ["RANK"] == "0":
        fastest = {name: statistics.quantiles(taken, n=10)[0] * 1e3 for name, taken in times.items()}
        for name, taken in fastest.items():
            print(f"{name:20} {taken:8.2f} ms {taken / fastest['by hand']:6.3f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.steps, arguments.rounds, arguments.worker)
        return
    here = []
    for name, missing in engines().items():
        if missing:
            print(f"{name:20} left out: {missing}")
        else:
            here.append(name)
    if not here:
        return
    numbers = ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, *numbers]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command += ["--worker", "ddp", *here]
    sys.exit(subprocess.run([sys.executable, *command], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
