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
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def engines() -> dict[str, str]:
    """Return the aliases of the engines, each with the reason why it can't run here, or an empty string."""
    from torchhal import registry

    found = {}
    for path in sorted(ROOT.glob("plugins/*/environment/install.py")):
        plugin = path.parents[1].name
        aliases = [entry for entry in registry.entries("strategy") if entry.distribution == f"torchhal-{plugin}"]
        if not aliases:
            found[plugin] = f"torchhal-{plugin} is not installed, or has no strategy"
        for entry in aliases:
            found[entry.component.alias] = entry.load().availability().reason
    return found


def worker(steps: int, rounds: int, aliases: list[str]) -> None:
    import torch
    from step_model import QUIET, Clock, Model, Times, dataset, fastest
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from torchhal import Trainer
    from torchhal.errors import TorchhalError

    torch.set_num_threads(1)
    data = dataset(steps)

    def through_torchhal(alias: str, times: list[float]) -> None:
        Trainer(strategy=alias, callbacks=[Times(times)], **QUIET).fit(Model(), DataLoader(data, 16))

    def by_hand(times: list[float]) -> None:
        strategy = Trainer(strategy="ddp", **QUIET).strategy
        strategy.setup_environment()  # the process group that the Trainer's runs have
        try:
            loop(DistributedSampler(data, **strategy.distributed_sampler_kwargs), times)
            gc.collect()  # the wrapper, which hangs now and then if it is freed after its process group
        finally:
            strategy.teardown()

    def loop(sampler: DistributedSampler, times: list[float]) -> None:
        module = Model()
        model, optimizer = DistributedDataParallel(module), module.configure_optimizers()
        clock = Clock(times)
        for index, (x, y) in enumerate(DataLoader(data, 16, sampler=sampler)):
            clock.batch(index)
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
        raw = fastest(times["by hand"])
        for name, taken in times.items():
            print(f"{name:20} {fastest(taken):8.2f} ms {fastest(taken) / raw:6.3f}x", flush=True)


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
