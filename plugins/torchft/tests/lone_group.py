"""Fits of a group that is alone, one after another in this process: ``lone_group.py FOLDER`` leaves FOLDER/results.pt.

The process is a fresh one, so that what a fit leaves behind can be counted. TORCHFT_LIGHTHOUSE is a lighthouse for lone
groups, LIGHTHOUSE_OF_TWO one that waits for two.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.resolve import Request, resolve
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal_torchft.strategy import TorchFTStrategy

NOBODY = "http://127.0.0.1:9"


class Small(Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)
        self.seen, self.validated = [], 0

    def training_step(self, batch, batch_idx):
        self.seen += batch[-1].tolist() if len(batch) == 3 else []
        return F.mse_loss(self.body(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.validated += len(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count=12, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)
    ]


def trainer_of(strategy, callbacks=(), **options):
    options = {
        "max_epochs": 1,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **options,
    }
    return Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip


def fit(model, data, *, ckpt_path=None, callbacks=(), trainer=None, val=None, **options):
    runner = trainer_of(TorchFTStrategy(**options), callbacks, **(trainer or {}))
    runner.fit(model, data, val, ckpt_path=ckpt_path)
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "step": runner.global_step,
        "batches": runner.fit_loop.total_batches,
        "lr": runner.optimizers[0].param_groups[0]["lr"],
        "seen": model.seen,
        "validated": model.validated,
    }


class Skips(Small):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx < 2 else None


def refused(data=None, model=Small, **options):
    began = time.monotonic()
    try:
        fit(model(), data or batches(), **options)
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


class Spoils(Callback):
    """Reports, as TorchFT lets one, that the gradients of some batches are no good."""

    def __init__(self, *indices):
        self.indices, self.norms = indices, []

    def on_before_backward(self, trainer, module, loss):
        if trainer.fit_loop.batch_idx in self.indices:
            trainer.strategy._group.report_error(RuntimeError("spoiled"))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms.append(sum(p.grad is not None for p in module.parameters()))


def stopped_while_waiting(folder):
    """Nobody comes, and a scheduler sends SIGTERM."""
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    found = refused(
        lighthouse_addr=os.environ["LIGHTHOUSE_OF_TWO"], callbacks=[ModelCheckpoint(dirpath=folder)],
        quorum_timeout=timedelta(seconds=100),
    )  # fmt: skip
    return *found, len(list(folder.glob("*interrupt*")))


def by_hand():
    """A loop of one's own, without the Trainer."""
    strategy = resolve(Request(accelerator="cpu", strategy=TorchFTStrategy())).build()
    strategy.setup_environment()
    try:
        model = Small()
        strategy.connect(model)
        strategy.setup_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.setup_optimizers([optimizer])
        taken = []
        for batch in batches():
            optimizer.zero_grad()
            strategy.backward(model.training_step(batch, 0))
            taken.append(strategy.optimizer_step(optimizer))
        return model.state_dict(), taken
    finally:
        strategy.teardown()


def averages():
    """Two groups in threads: several dtypes, a gradient of one, one of nobody, then one that stands back."""
    from torchhal_torchft import _config as config
    from torchhal_torchft import _sdk as sdk
    from torchhal_torchft._gradients import average
    from torchhal_torchft._group import ReplicaGroup

    sdk.load(verbose=False)
    found = {}
    together = threading.Barrier(2)

    def run(rank):
        strategy = TorchFTStrategy(replica_id=f"thread_{rank}", lighthouse_addr=os.environ["LIGHTHOUSE_OF_TWO"])
        assert isinstance(strategy.settings, config.Settings)
        group = ReplicaGroup(
            strategy.settings, state=lambda: {"from": rank}, load_state=found.setdefault(f"taken {rank}", {}).update,
            look=lambda: None,
        )  # fmt: skip
        try:
            for contributes in (True, rank == 0):
                parameters = [
                    nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros((), dtype=torch.float64)),
                    nn.Parameter(torch.zeros(2, dtype=torch.complex64)), nn.Parameter(torch.zeros(3)),
                    nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(4).bfloat16()),
                ]  # fmt: skip
                for index, parameter in enumerate(parameters):
                    if (index == 3 and rank == 1) or index == 4:
                        continue
                    parameter.grad = torch.full_like(parameter, 1 + 2 * rank)
                    if parameter.is_complex():
                        parameter.grad = parameter.grad * 1j
                optimizer = SimpleNamespace(param_groups=[{"params": parameters}])
                group.begin()
                average(group, optimizer, contributes=contributes)
                committed = group.should_commit()
                grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
                found.setdefault(rank, []).append((committed, grads))
            together.wait(60)
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def tasks():
    return len(os.listdir("/proc/self/task"))


def main(folder):
    torch.set_num_threads(1)
    data = batches()
    items = TensorDataset(torch.randn(20, 4), torch.randn(20, 1), torch.arange(20))
    loader = DataLoader(items, batch_size=4, shuffle=True)
    seconds = timedelta(seconds=1)
    two = os.environ["LIGHTHOUSE_OF_TWO"]
    saves = ModelCheckpoint(dirpath=folder / "run", every_n_train_steps=1, save_top_k=-1)
    both = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 2}
    results = {"clipped": fit(Small(), data, trainer=both, callbacks=[saves])}
    before = tasks(), threading.active_count()  # after the first, which imports and starts what stays
    saved = str(folder / "run" / "epoch=0-step=5.ckpt")
    results["resumed"] = fit(Small(9), data, trainer=both, ckpt_path=saved)
    spoils = Spoils(2, 7)
    results["spoiled"] = fit(Small(), data, callbacks=[spoils], trainer={"gradient_clip_val": 0.05})
    results["with gradients"] = spoils.norms
    results["always spoiled"] = refused(callbacks=[Spoils(*range(12))], max_retries=2)
    shares = {"replica_rank": 1, "num_replica_groups": 3}
    results["share"] = fit(Small(), loader, val=DataLoader(items, batch_size=4), **shares)
    whole = {"use_distributed_sampler": False}
    results["whole"] = fit(Small(), loader, trainer=whole, **shares)
    results["averages"] = averages()  # before others knock at that lighthouse, and leave
    results["skips"] = refused(model=Skips)
    results["unreachable"] = refused(lighthouse_addr=NOBODY, connect_timeout=seconds)
    results["nameless"] = refused(hostname="no-such-host.invalid")
    results["no quorum"] = refused(lighthouse_addr=two, timeout=seconds / 2, quorum_timeout=seconds)
    results["too few"] = refused(min_replica_size=2, timeout=seconds / 2, quorum_timeout=seconds)
    results["stopped"] = stopped_while_waiting(folder / "stopped")
    trainer_of(TorchFTStrategy(lighthouse_addr=NOBODY)).validate(Small(), DataLoader(items), verbose=False)
    results["by hand"] = by_hand()
    deadline = time.monotonic() + 20  # what is closed is gone a moment later
    while (tasks() > before[0] or threading.active_count() > before[1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    results["threads"] = before, (tasks(), threading.active_count()), [each.name for each in threading.enumerate()]
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
