"""Trainings over two ranks that wait for each other in vain, in forks of one process that has imported torch.

``python hangs.py FOLDER NAME...``: each NAME is trained in FOLDER/NAME; its error is written to FOLDER/NAME/error.txt.
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer
from torchhal.resolve import Request, resolve
from torchhal.strategies import DDPStrategy

AT_ONCE = 3
"""Trainings that run at a time: they wait for the most part."""


def own_strategy():
    return DDPStrategy(start_method="fork", timeout=timedelta(seconds=100))


def limit(strategy):
    """The time-out of the test; not from the beginning: a busy machine takes its time to start a process."""
    strategy.timeout = timedelta(seconds=6)
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since 2.14
    set_timeout(timedelta(seconds=6))


class Net(torchhal.Module):
    def __init__(self, misdeed):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.misdeed = misdeed

    def on_train_start(self):
        limit(self.trainer.strategy)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        if batch_idx == 2:
            self.misbehave(loss)
        return loss

    def misbehave(self, loss):
        strategy, rank = self.trainer.strategy, self.global_rank
        if self.misdeed == "log" and rank == 0:
            self.log("lonely", loss, sync_dist=True, on_step=True)
        if self.misdeed in ("sleep", "read-only") and rank == 1:
            fall_asleep()
        if self.misdeed == "stop" and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.misdeed == "hold" and rank == 1:
            re.fullmatch("(a+)+b", "a" * 40)  # takes hours, and Python's lock
        if self.misdeed == "mismatch":
            several = torch.zeros(3)
            dist.all_reduce(several) if rank == 0 else dist.broadcast(several, src=0)
        if self.misdeed == "barrier" and rank == 0:
            strategy.barrier("evaluation of rank 0")
        if self.misdeed == "abort" and rank == 1:
            os.abort()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fall_asleep():
    time.sleep(600)


class OneMore:
    """Says that it has seven batches on every rank, and gives rank 0 only six."""

    def __len__(self):
        return 7

    def __iter__(self):
        for _ in range(6 + int(os.environ["RANK"])):
            yield [torch.ones(2, 4)]


def train(name, folder):
    folder.mkdir(parents=True)
    root = folder
    if name == "read-only":
        root = folder / "root"
        if os.geteuid() == 0:  # who may write everywhere, but into a file
            root.write_text("")
        else:
            root.mkdir(mode=0o500)
    data = OneMore() if name == "one more" else DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=2)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=own_strategy(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    try:
        trainer.fit(Net(name), data)
    except RuntimeError as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def by_hand(folder):
    """A loop without a Trainer: rank 1 has a batch more."""
    folder.mkdir()
    strategy = resolve(Request(accelerator="cpu", strategy=own_strategy(), devices=2)).build()
    try:
        strategy.make_launcher().launch(loop, strategy, folder)
    except RuntimeError as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def loop(strategy, folder):
    strategy.setup_environment()
    strategy.watch.hang.run_folder = str(folder)
    try:
        strategy.connect(torch.nn.Linear(4, 1))
        strategy.setup_model()
        limit(strategy)
        optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1)
        strategy.setup_optimizers([optimizer])
        for _ in range(3 + strategy.global_rank):
            optimizer.zero_grad()
            strategy.backward(strategy.model(torch.ones(2, 4)).mean())
            strategy.optimizer_step(optimizer)
    finally:
        strategy.teardown()


def main():
    folder = Path(sys.argv[1])
    os.environ["TMPDIR"] = str(folder / "temporary")
    (folder / "temporary").mkdir()
    running = set()
    for name in sys.argv[2:]:
        if len(running) == AT_ONCE:
            running.remove(os.wait()[0])
        if pid := os.fork():
            running.add(pid)
            continue
        by_hand(folder / name) if name == "by hand" else train(name, folder / name)
        os._exit(0)
    while running:
        running.remove(os.wait()[0])


if __name__ == "__main__":
    main()
