"""Define the model, the data and the misdeeds of the run_*.py scripts, and record each batch in a file per rank.

    python run_straight.py '{"out": DIR, "run": {...}, "misdeed": "...", ...}'

Each batch of rank r is a line of DIR/rank<r>.jsonl. A misdeed happens on rank 1 at optimizer step 3, unless "ranks" and
"at" say otherwise.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module

CLASSES = 3


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.body(x)


class NetModule(Module):
    """The same parameters under the same names, for the Trainer."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.body = Net(config.get("dropout", 0.0)).body

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        misbehave(self.config, self.global_rank, self.global_step)
        loss = F.cross_entropy(self.body(x), y)
        record(self.config, self.global_rank, self.current_epoch, loss, index)
        return loss

    def configure_optimizers(self):
        return make_optimizer(self)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def dataset(n=64):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(n))


def make_loader(config):
    rank = int(os.environ.get("RANK", "0"))
    n = config.get("samples", 64) + (config["longer"] * rank if "longer" in config else 0)
    return DataLoader(
        dataset(n), config.get("batch_size", 4), shuffle=config.get("shuffle", False),
        num_workers=config.get("workers", 0),
    )  # fmt: skip


def run_options(config):
    options = {
        "accelerator": os.environ.get("CORE_TESTS_ACCELERATOR", "cpu"), "devices": 2, "strategy": "ddp",
        "default_root_dir": config["out"], **config.get("run", {}),
    }  # fmt: skip
    if "collective_timeout" in config:
        from torchhal.strategies import DDPStrategy

        options["strategy"] = DDPStrategy(timeout=timedelta(seconds=config["collective_timeout"]))
    return options


def record(config, rank, epoch, loss, index):
    """Write what a batch was and gave, at once: the process may be killed in the next one."""
    with open(os.path.join(config["out"], f"rank{rank}.jsonl"), "a") as file:
        print(json.dumps({"epoch": epoch, "loss": loss.item(), "seen": index.tolist()}), file=file)
    time.sleep(config.get("pause", 0))  # so that a signal finds ranks in their steps


def mark(config):
    """Write when the failure happened, for the test's clock."""
    with open(os.path.join(config["out"], "failed"), "w") as file:
        file.write(str(time.time()))


def misbehave(config, rank, step, where="step"):
    if config.get("where", "step") != where or rank not in config.get("ranks", [1]):
        return
    if where == "step" and step != config.get("at", 3):
        return
    misdeed = config.get("misdeed")
    if misdeed is not None:
        mark(config)
    if misdeed == "raise":
        raise ZeroDivisionError(f"rank {rank} is broken")
    if misdeed == "os_exit":
        os._exit(config.get("code", 0))
    if misdeed == "sys_exit":
        sys.exit(config.get("code", 3))
    if misdeed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if misdeed == "abort":
        os.abort()
    if misdeed == "hang":
        time.sleep(600)
    if misdeed == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if misdeed == "sigterm_group":
        signal_the_group("TERM")
    if misdeed == "sigint_group":
        signal_the_group("INT")
    if misdeed == "sigint_twice":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2.5)  # within two seconds they count as one
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def signal_the_group(name):
    """As a scheduler or a terminal does it: from outside the group."""
    subprocess.run(["kill", f"-{name}", "--", f"-{os.getpgid(0)}"], start_new_session=True, check=True)
