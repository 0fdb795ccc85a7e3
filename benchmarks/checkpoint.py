"""What an atomic, sealed checkpoint costs beside plain torch: python benchmarks/checkpoint.py [FOLDER]

Ratios within one run: the two ways take turns, so that a slow moment of the disk hits both, and medians are compared.
Memory is what a fresh process peaks at beyond its state while it saves. The exit code is 1 when a bound is missed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAYLOAD_MB = 200
ROUNDS = 15
MOST_TIME = 1.10
MOST_MEMORY = 1.2

PEAK = """
import resource, sys, torch
from torchhal.checkpoint import TorchCheckpointIO

io, peak = TorchCheckpointIO(), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
io.save_checkpoint({"warm": torch.ones(3)}, sys.argv[1])
state = {str(i): torch.ones(int(sys.argv[2]) // 40) for i in range(10)}
before = peak()
io.save_checkpoint(state, sys.argv[1])
print(peak() - before)
"""


def state_of(megabytes: int) -> dict[str, Any]:
    """A model and two moments of an optimizer: a few large tensors and hundreds of small ones."""
    import torch

    tensors = {f"layer{i}.bias": torch.randn(256) for i in range(300)}
    tensors.update({f"layer{i}.weight": torch.randn(megabytes * 250_000 // 20) for i in range(20)})
    return {"state_dict": tensors, "epoch": 3, "global_step": 1234}


def save_plainly(state: dict[str, Any], path: str) -> None:
    import torch

    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_plainly(path: str) -> None:
    import torch

    torch.load(path, map_location="cpu", weights_only=True)


def in_turns(rounds: int, *ways: Callable[[], object]) -> list[float]:
    """The median seconds of each way."""
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        # The second of two writes waits for the disk of the first: each way comes first every other time.
        for index in range(len(ways)) if turn % 2 else reversed(range(len(ways))):
            start = time.perf_counter()
            ways[index]()
            if turn:  # the first round warms up
                seconds[index].append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def peak_beyond_state(path: str, payload: int) -> float:
    """Peak memory of a save beyond the state itself, in payloads."""
    done = subprocess.run([sys.executable, "-c", PEAK, path, str(payload)], check=True, capture_output=True, text=True)
    return int(done.stdout) / payload


def main() -> int:
    from torchhal.checkpoint import TorchCheckpointIO

    io, state = TorchCheckpointIO(), state_of(PAYLOAD_MB)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as folder:
        plain, ours = str(Path(folder, "plain.pt")), str(Path(folder, "ours.ckpt"))
        torch_save, save = in_turns(ROUNDS, lambda: save_plainly(state, plain), lambda: io.save_checkpoint(state, ours))
        torch_load, load, load_foreign = in_turns(
            ROUNDS,
            lambda: load_plainly(plain),
            lambda: io.load_checkpoint(ours),
            lambda: io.load_checkpoint(plain),
        )
        memory = peak_beyond_state(ours, PAYLOAD_MB * 1_000_000)
    print(f"{PAYLOAD_MB} MB, median of {ROUNDS}")
    print(f"save    torch.save + fsync {torch_save:.3f} s   torchhal {save:.3f} s   {save / torch_save:.2f}x")
    print(f"load    torch.load         {torch_load:.3f} s   torchhal {load:.3f} s   {load / torch_load:.2f}x")
    print(f"load    a file of plain torch.save             {load_foreign:.3f} s   {load_foreign / torch_load:.2f}x")
    print(f"memory  peak of a save beyond the state: {memory:.2f}x of the payload")
    return int(save / torch_save > MOST_TIME or memory > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
