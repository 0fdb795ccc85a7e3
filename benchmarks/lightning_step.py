"""What a training step of a LightningModule costs through torchhal, beside Lightning's own Trainer and a raw loop.

    .venv-lightning/bin/python benchmarks/lightning_step.py [--steps 2000] [--rounds 7]

The model and the loop are those of trainer_step.py. Rows: a torchhal.Module under torchhal's Trainer; a LightningModule
under the same (bridge), under the Trainer with Lightning's signature (facade), and under Lightning's own; the
stand-in's LightningModule under the facade. Where Lightning isn't installed, those without it. Each with everything off
(bare), and with the defaults and a logged loss. Bound: bridge, facade and stand-in take at most 1.3 times what
torchhal's own takes.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from importlib import util

import torch
from trainer_step import MLP, QUIET, Clock, raw

import torchhal
import torchhal_lightning
from torchhal_lightning import stand_in

BOUND = 1.30
OPTIONS = {"bare": QUIET, "defaults": {}}


class Batches:
    """A loader of prebuilt batches; a list would be one of several loaders for Lightning."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


def of_tree(pl):
    """Return trainer_step's model and clock as classes of a tree of Lightning's."""

    class Net(pl.LightningModule):
        def __init__(self, log):
            super().__init__()
            self.net = MLP(log).net
            self.log_loss = log

        training_step, configure_optimizers = MLP.training_step, MLP.configure_optimizers

    class Times(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer, pl_module):
            self.seconds = time.perf_counter() - self.start

    return Net, Times


def ways():
    """Return (Trainer, model's class, callback's class) of each row."""
    found = {
        "torchhal": (torchhal.Trainer, MLP, Clock),
        "stand-in": (stand_in.Trainer, *of_tree(stand_in)),
    }
    if util.find_spec("lightning"):
        import lightning.pytorch as pl

        classes = of_tree(pl)
        found["bridge"] = (torchhal.Trainer, *classes)
        found["facade"] = (torchhal_lightning.Trainer, *classes)
        found["Lightning"] = (pl.Trainer, *classes)
    return found


def trained(way, name, batches, root):
    trainer_of, model, clock_of = way
    torch.manual_seed(0)
    clock = clock_of()
    trainer = trainer_of(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[clock], enable_model_summary=False,
        default_root_dir=root, **OPTIONS[name],
    )  # fmt: skip
    trainer.fit(model(log=name == "defaults"), batches)
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    batches = Batches([
        (torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator))
        for _ in range(arguments.steps)
    ])  # fmt: skip
    rows = ways()
    missed = False
    for name in OPTIONS:
        seconds = {way: [] for way in ("raw", *rows)}
        with tempfile.TemporaryDirectory() as root:
            for _ in range(arguments.rounds):  # in turn, so that a slow moment of the machine hits all alike
                seconds["raw"].append(raw(batches))
                for way, parts in rows.items():
                    seconds[way].append(trained(parts, name, batches, root))
        for way, mine in seconds.items():
            of_raw, of_own = (
                statistics.median(one / other for one, other in zip(mine, seconds[base], strict=True))
                for base in ("raw", "torchhal")
            )
            bounded = way in ("stand-in", "bridge", "facade")
            missed |= bounded and of_own > BOUND
            print(
                f"{name:9} {way:10} {statistics.median(mine) / arguments.steps * 1e6:7.1f} us a step, "
                f"{of_raw:5.2f} of raw, {of_own:5.2f} of torchhal's" + (f" (bound {BOUND:.2f})" if bounded else "")
            )
    if missed:
        raise SystemExit("a bound is missed")


if __name__ == "__main__":
    main()
