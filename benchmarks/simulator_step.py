"""What the simulated accelerator costs: a training step as a ratio to the CPU's in the same run, and one operator.

    python benchmarks/simulator_step.py [--steps 100] [--rounds 5]

One thread. Each round times both devices one after the other; the median of the rounds' ratios counts. For information,
no bound: the device checks and counts every operator and has a memory of its own.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from torchhal_simulator import load


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(64, 64)


def conv_net():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16 * 12 * 12, 10)), torch.randn(32, 3, 16, 16)


def step_seconds(make, device, steps):
    torch.manual_seed(0)
    model, x = make()
    model, x, y = model.to(device), x.to(device), torch.zeros(len(x), dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps + 3):
        if step == 3:  # warm
            start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def operator_microseconds(device, calls=20_000):
    x = torch.ones(4, device=device)
    start = time.perf_counter()
    for _ in range(calls):
        x + x
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load()
    for name, make in (("mlp", mlp), ("conv", conv_net)):
        rounds = [
            [step_seconds(make, device, arguments.steps) for device in ("cpu", "sim")] for _ in range(arguments.rounds)
        ]
        ratio = statistics.median(sim / cpu for cpu, sim in rounds)
        cpu, sim = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        print(f"{name}: {ratio:.2f} times the CPU's step ({sim:.0f} and {cpu:.0f} microseconds)")
    cpu, sim = operator_microseconds("cpu"), operator_microseconds("sim")
    print(f"one addition of four numbers: {sim:.1f} microseconds, {cpu:.1f} on the CPU")


if __name__ == "__main__":
    main()
