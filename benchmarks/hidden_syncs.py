"""What a training step makes the device do beside the model: python benchmarks/hidden_syncs.py

Copies to the device, copies from it and synchronisations of each step, counted on the simulated accelerator: of a plain
PyTorch loop, and of a Trainer that does the same with everything switched on that people have switched on (logging of
steps and epochs, the progress bar, a logger, clipping, accumulation, a scheduler, EarlyStopping, ModelCheckpoint,
validation). Steps whose values go to the logger read them: one copy from the device. The exit code is 1 when any other
step of the Trainer has more than the loop's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchhal
from torchhal import EarlyStopping, ModelCheckpoint, Trainer
from torchhal.trainer.callbacks import LearningRateMonitor
from torchhal.trainer.loggers import CSVLogger

STEPS = 12
EPOCHS = 2
LOG_EVERY = 5
ACCUMULATE = 2
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

Counts = tuple[int, int, int]
"""h2d, d2h, synchronizations."""


class Net(torchhal.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"worst": loss, "half": loss / 2}, on_step=True, on_epoch=True, reduce_fx="max")
        self.log("constant", 1.0)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Batches:
    """Fixed batches; what the device did between two of them is one step."""

    def __init__(self) -> None:
        self.steps: list[Counts] = []
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(STEPS)
        ]

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        from torchhal_simulator._counters import counters

        before = None
        for batch in self.batches:
            now = counters()
            if before is not None:
                self._note(before, now)
            before = now
            yield batch
        # the last step ends at an epoch's end, which may read what it likes

    def _note(self, before: Any, now: Any) -> None:
        difference = now - before
        self.steps.append((difference.h2d, difference.d2h, difference.synchronizations))


def plain_loop(precision: str, device: torch.device, wrap: Callable[[nn.Module], Any]) -> list[Counts]:
    """The counts of each step of the loop that anybody would write."""
    torch.manual_seed(0)
    net = Net().to(device)
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    data = Batches()
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(data):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            update = (index + 1) % ACCUMULATE == 0
            pause = contextlib.nullcontext() if update or not hasattr(model, "no_sync") else model.no_sync()
            with pause:
                with torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None):
                    loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss / ACCUMULATE).backward()
            if update:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
    return data.steps


class Forward(nn.Module):
    """The model's forward, which DDP needs."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.body(x)  # type: ignore[no-any-return]


def with_trainer(precision: str, folder: str, devices: int) -> list[Counts]:
    """The counts of each step of the same under a Trainer; in the process of this rank."""
    torch.manual_seed(0)
    data = Batches()
    trainer = Trainer(
        accelerator="sim",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=precision,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(folder),
        use_distributed_sampler=False,
        callbacks=[
            EarlyStopping("val_loss", patience=9),
            ModelCheckpoint(folder, monitor="val_loss", save_last=True),
            LearningRateMonitor(),
        ],
        enable_model_summary=False,
    )
    trainer.fit(Net(), data, data.batches[:2])
    return data.steps


def allowed(raw: list[Counts]) -> list[Counts]:
    """What the Trainer may need in each step: the loop's, and one read where the logger gets values."""
    limits, updates = [], 0
    for index, (h2d, d2h, waits) in enumerate(raw):
        step = index % (STEPS - 1)  # the last one of each epoch is not among them
        updates = updates + 1 if (step + 1) % ACCUMULATE == 0 else updates
        read = int((step + 1) % ACCUMULATE == 0 and updates % LOG_EVERY == 0)
        if step == STEPS - 2:
            updates += 1  # in the last step
        limits.append((h2d, d2h + read, waits + read))
    return limits


def report(name: str, raw: list[Counts], trainer: list[Counts]) -> bool:
    """Print both; whether the Trainer has no more than it may."""
    assert len(raw) == len(trainer) == EPOCHS * (STEPS - 1), (len(raw), len(trainer))
    limits = allowed(raw)
    good = all(
        mine <= limit
        for step, most in zip(trainer, limits, strict=True)
        for mine, limit in zip(step, most, strict=True)
    )
    print(f"{name}: {'as the plain loop' if good else 'MORE than the plain loop'}")
    print("  step                 " + " ".join(f"{index:>7}" for index in range(STEPS - 1)))
    for epoch in range(EPOCHS):
        part = slice(epoch * (STEPS - 1), (epoch + 1) * (STEPS - 1))
        for title, steps in (("plain loop", raw[part]), ("Trainer", trainer[part])):
            print(f"  epoch {epoch}, {title:<11}  " + " ".join(f"{'/'.join(map(str, step)):>7}" for step in steps))
    return good


def measure(precision: str, devices: int) -> bool:
    """Both loops in this process, or on this rank; whether the Trainer is as good."""
    import torchhal_simulator

    torchhal_simulator.load()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("sim", rank)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = with_trainer(precision, folder, devices)
        if devices > 1:
            dist.init_process_group("cpu:gloo,sim:sim")
        raw = plain_loop(precision, device, lambda net: _wrapped(net, devices))
        if devices > 1:
            dist.destroy_process_group()
    return rank != 0 or report(f"{precision} on {devices} device(s), h2d/d2h/synchronizations", raw, trainer)


def _wrapped(net: nn.Module, devices: int) -> Any:
    assert isinstance(net, Net)
    return DistributedDataParallel(Forward(net)) if devices > 1 else Forward(net)


def main() -> int:
    if len(sys.argv) > 1:  # a rank: torchrun hidden_syncs.py PRECISION
        return 0 if measure(sys.argv[1], 2) else 1
    good = [measure(precision, 1) for precision in PRECISIONS]
    for precision in PRECISIONS:
        good.append(under_torchrun(precision))
    return 0 if all(good) else 1


def under_torchrun(precision: str) -> bool:
    import subprocess

    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, precision]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
