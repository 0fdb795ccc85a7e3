"""find_batch_size against the memory limit of the simulated device, alone and on two ranks."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.tuning import find_batch_size, find_learning_rate
from torchhal_simulator import load, simulate

MEMORY = 3 * 2**20
QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Deep(Module):
    """Keeps activations of some 5 kB for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(5)))
        self.dropout = nn.Dropout(0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return mse_loss(self.dropout(self.layers(x)).mean(1), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data() -> TensorDataset:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean(1))


def trainer(**options: Any) -> Trainer:
    # by name: "auto" would take a fused optimizer where a batch is one sample too large
    chosen = {"accelerator": "sim", "strategy": "single_device", "devices": 1, "max_steps": 3}
    return Trainer(**{**chosen, **QUIET, **options})


@pytest.fixture(autouse=True)
def sim() -> None:
    load()


def test_the_size_found_fits_and_no_larger_one() -> None:
    module = torch.get_device_module("sim")
    gc.collect()
    before = module.memory_allocated()
    with simulate(memory=before + MEMORY):
        rows = data()
        found = find_batch_size(trainer(), Deep(), DataLoader(rows, 4), mode="binary", margin=0.0, max_size=None)
        gc.collect()
        assert module.memory_allocated() == before, "what a trial had on the device is free again"
        power = find_batch_size(trainer(), Deep(), DataLoader(rows, 4))
        assert power <= found < 2 * power
        trainer().fit(Deep(), DataLoader(rows, found))
        with pytest.raises(torch.OutOfMemoryError):
            trainer().fit(Deep(), DataLoader(rows, found + 1))


def test_device_generators_are_as_they_were() -> None:
    states = []
    for tested in (False, True):
        torch.manual_seed(5)
        model = Deep()
        torch.manual_seed(6)
        if tested:
            find_learning_rate(trainer(), model, DataLoader(data(), 64, shuffle=True), num_steps=12)
        trainer(max_steps=5).fit(model, DataLoader(data(), 64, shuffle=True))
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from test_tuning_memory import *

if __name__ == "__main__":
    load()
    strategy = sys.argv[1]
    one = trainer(strategy=strategy, devices=2)
    found = find_batch_size(one, Deep(), DataLoader(data(), 4), mode="binary", margin=0.0, max_size=None)
    one.fit(Deep(), DataLoader(data(), found))
    print(f"found {{found}}, then {{one.global_step}} steps", flush=True)
    if sys.argv[2] == "more":
        trainer(strategy=strategy, devices=2).fit(Deep(), DataLoader(data(), found + 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_two_ranks(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "search.py").write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    with simulate(memory=MEMORY):
        done = subprocess.run(
            [sys.executable, "search.py", strategy, "more"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    said = set(done.stdout.split("\n")) - {""}
    assert len(said) == 1 and said.pop().endswith("then 3 steps"), done.stdout + done.stderr
    assert done.returncode == 1 and "OutOfMemoryError" in done.stderr, "one sample more doesn't fit"
