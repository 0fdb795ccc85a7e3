"""Test what ddp_fork says after a backward has started autograd's threads for the device."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
import torchhal_simulator
from torchhal import Module, Trainer

class Model(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

torchhal_simulator.load("sim")
torch.ones(2, requires_grad=True).sum().backward()
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), 2))
"""


def test_fork_after_backward_names_spawn() -> None:
    """torch's own error names neither the cause nor another strategy."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert "LaunchError: the process that started this worker by fork has run a backward" in done.stderr
    assert "use strategy='ddp_spawn'" in done.stderr
