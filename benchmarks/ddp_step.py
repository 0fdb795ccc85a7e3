"""ddp on two CPU processes under the Trainer, as a ratio to raw DistributedDataParallel in the same processes.

    python benchmarks/ddp_step.py [--steps 300] [--rounds 7]

Both runs live in one pair of processes and take turns, so that a slow moment of the machine hits both. Bound: 1.03.
"""

import argparse
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchhal
from torchhal import Callback, Trainer


class Net(torchhal.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def raw(batches) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dist.barrier()
    start = time.perf_counter()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


class TakeTurns(Callback):
    """Each epoch times the Trainer's own steps; before each, the raw loop runs in the same process group."""

    def __init__(self, batches) -> None:
        self.batches = batches
        self.seconds = {"raw": [], "trainer": []}

    def on_train_epoch_start(self, trainer, module):
        self.seconds["raw"].append(raw(self.batches))
        dist.barrier()
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        self.seconds["trainer"].append(time.perf_counter() - self.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(64, 256, generator=generator), torch.randint(0, 10, (64,), generator=generator))
        for _ in range(arguments.steps)
    ]
    turns = TakeTurns(batches)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=arguments.rounds + 1, callbacks=[turns], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), batches)
    ratios = [
        mine / base for mine, base in zip(turns.seconds["trainer"][1:], turns.seconds["raw"][1:], strict=True)
    ]  # the first round warms up
    step = statistics.median(turns.seconds["raw"][1:]) / arguments.steps
    trainer.print(
        f"raw DDP {step * 1e6:.0f} us a step; Trainer(strategy='ddp') ratio {statistics.median(ratios):.3f} "
        f"(min {min(ratios):.3f}, max {max(ratios):.3f}; bound 1.03)"
    )
    if trainer.is_global_zero and statistics.median(ratios) > 1.03:
        raise SystemExit("the bound is missed")


if __name__ == "__main__":
    main()
