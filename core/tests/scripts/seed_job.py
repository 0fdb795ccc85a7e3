"""Train with a strategy that was written by copying an example: ``seed_job.py OUT SNIPPET [SNIPPET ...]``.

The snippets run exactly as they stand in core/tests/seeds but for their import line. What they expect a reader to
have (``MyAccelerator``, ``MyCustomDistributedDataParallel``, ...) is defined here. Each rank writes OUT/rank<r>.pt.
"""

import functools
import os
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import hardware
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal.precision import SinglePrecision

SEEDS = Path(__file__).parent.parent / "seeds"
IMPORT = re.compile(r"^from (pytorch_lightning|lightning\.pytorch)\.strategies import", re.MULTILINE)


class MyCustomDistributedDataParallel(DistributedDataParallel):
    """The examples pass a literal ``...`` where a reader would fill in device ids: taken for None."""

    forwards = 0

    def __init__(self, module, device_ids=None):
        super().__init__(module, device_ids=None if device_ids is ... else device_ids)

    def forward(self, *args, **kwargs):
        type(self).forwards += 1
        return super().forward(*args, **kwargs)


class MyAccelerator(type(hardware.accelerator())):
    """For which "auto" means two devices."""

    setups = 0

    def auto_device_count(self):
        return 2

    def setup(self, trainer=None):
        type(self).setups += 1


class MyPrecisionPlugin(SinglePrecision):
    connected = ()
    backwards = 0

    def connect(self, model=None, optimizers=(), lr_schedulers=()):
        type(self).connected += (model,)
        return super().connect(model, optimizers, lr_schedulers)

    def backward(self, loss, *args, **kwargs):
        type(self).backwards += 1
        super().backward(loss, *args, **kwargs)


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.body(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model(seed):
    torch.manual_seed(seed)
    return Net()


def read(snippet):
    """The text of a snippet, its import line turned into this project's."""
    return IMPORT.sub("from torchhal.strategies import", textwrap.dedent((SEEDS / snippet).read_text()))


def make_trainer(strategy, **options):
    """On the accelerator of the test, unless the strategy brings its own."""
    given = isinstance(strategy, str) or strategy.given["accelerator"] is None
    where = {"accelerator": hardware.name()} if given else {}
    return torchhal.Trainer(strategy=strategy, max_epochs=2, **where, **options)


def main(out, snippets):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    namespace = {
        "Trainer": functools.partial(make_trainer, **quiet),
        "MyCustomDistributedDataParallel": MyCustomDistributedDataParallel,
        "MyAccelerator": MyAccelerator,
        "MyPrecisionPlugin": MyPrecisionPlugin,
    }
    for snippet in snippets:
        exec(compile(read(snippet) if snippet.endswith(".txt") else snippet, snippet, "exec"), namespace)
    trainer = namespace["trainer"]
    net = model(seed=int(os.environ.get("RANK", "0")))  # every rank starts elsewhere; rank 0's weights count
    trainer.fit(net, DataLoader(dataset(), batch_size=4))
    torch.save(
        {
            "state": net.state_dict(),
            "world_size": trainer.plan.world_size,
            "strategy": type(trainer.strategy).__name__,
            "forwards": MyCustomDistributedDataParallel.forwards,
            "setups": MyAccelerator.setups,
            "connected": [value is ... for value in MyPrecisionPlugin.connected],
            "backwards": MyPrecisionPlugin.backwards,
        },
        os.path.join(out, f"rank{os.environ.get('RANK', '0')}.pt"),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
