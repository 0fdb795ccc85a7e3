"""What a training step costs under the Trainer, as ratios to a raw PyTorch loop in the same run.

    python benchmarks/trainer_step.py [--steps 2000] [--rounds 9]

A small MLP (32-64-2, batch 32, SGD, prebuilt batches) on one CPU thread: the raw step takes some 100 microseconds,
so every microsecond of the loop shows. Bounds: 1.10 with everything off, 1.15 with a progress bar alone (ProgressBar;
RichProgress as "rich"), 1.25 with the defaults. On a terminal the bars are drawn there, else lines are written.
"""

import argparse
import statistics
import tempfile
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import torchhal
from torchhal import Callback, Trainer


class MLP(torchhal.Module):
    def __init__(self, log: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
        self.log_loss = log

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.log_loss:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """Seconds from the first batch to the last, without the fit's set-up."""

    def on_train_epoch_start(self, trainer, module):
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        self.seconds = time.perf_counter() - self.start


def raw(batches) -> float:
    torch.manual_seed(0)
    model = MLP(log=False)
    optimizer = model.configure_optimizers()
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        loss = model.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
OPTIONS = {
    "bare": QUIET,
    "bar": QUIET | {"enable_progress_bar": True},
    "rich": QUIET | {"enable_progress_bar": True, "callbacks": ["rich_progress"]},
    "defaults": {},
}


def trained(batches, name: str, root: str) -> float:
    torch.manual_seed(0)
    clock = Clock()
    options = dict(OPTIONS[name])
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[clock, *options.pop("callbacks", [])], enable_model_summary=False,
        default_root_dir=root, **options,
    )  # fmt: skip
    trainer.fit(MLP(log=name == "defaults"), batches)
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator))
        for _ in range(arguments.steps)
    ]
    seconds = {name: [] for name in ("raw", *OPTIONS)}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(arguments.rounds):  # in turn, so that a slow moment of the machine hits all alike
            seconds["raw"].append(raw(batches))
            for name in OPTIONS:
                seconds[name].append(trained(batches, name, root))
    micro = 1e6 / arguments.steps
    missed = False
    print(f"raw loop            {statistics.median(seconds['raw']) * micro:7.1f} us a step")
    for name, bound in (("bare", 1.10), ("bar", 1.15), ("rich", 1.15), ("defaults", 1.25)):
        ratios = [mine / base for mine, base in zip(seconds[name], seconds["raw"], strict=True)]
        missed |= statistics.median(ratios) > bound
        print(
            f"Trainer, {name:<10} {statistics.median(seconds[name]) * micro:7.1f} us a step, ratio "
            f"{statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}; bound {bound:.2f})"
        )
    if missed:
        raise SystemExit("a bound is missed")


if __name__ == "__main__":
    main()
