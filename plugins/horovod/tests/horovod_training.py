"""In a rank of a test's world: train small models under a strategy, with a Trainer."""

import averaging_training
import torch
from averaging_training import QUIET, Alternating, FrozenInTheMiddle, Manual, Unused
from parity_models import Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal import ModelCheckpoint, Trainer
from torchhal.strategies import DDPStrategy


def horovod(**options):
    from torchhal_horovod import HorovodStrategy

    return HorovodStrategy(**options)


STRATEGIES = {
    "horovod": horovod,
    "unused": lambda: horovod(find_unused_parameters=True),
    "fp16": lambda: horovod(compression="fp16"),
    "ddp": DDPStrategy,
    "ddp_unused": lambda: DDPStrategy(find_unused_parameters=True),
}


def fit(strategy, model, **options):
    """Train and return the weights, with the losses of this rank."""
    return averaging_training.fit(STRATEGIES[strategy](), model, **options)


def train(strategy, name, options=None):
    return fit(strategy, MODELS[name](), **(options or {}))


class ManyKinds(Perceptron):
    """A complex parameter, a sparse gradient, one that isn't contiguous, float64, and two uses of one layer."""

    def build(self):
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.rows = nn.Embedding(8, 64, sparse=True)
        self.turned = nn.Parameter(torch.randn(64, 32).t())
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.twice = nn.Linear(64, 64)
        return nn.Linear(32, 4)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))) + self.rows((x[:, 0] > 0).long()))
        logits = self.body(F.linear(x, self.turned)) * self.wide.float()
        return (logits.to(torch.complex64) * self.phases).abs()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class HalfPrecision(Perceptron):
    """Weights in bfloat16, whose gradients Horovod can't add up."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS = {cls.__name__: cls for cls in (
    Perceptron, Manual, ManyKinds, Unused, Alternating, FrozenInTheMiddle, HalfPrecision
)}  # fmt: skip


def save(strategy, folder):
    """Train three epochs and keep the checkpoint of the first; return what came of it, and the checkpoint's path."""
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1)
    trained = fit(strategy, Perceptron(), max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    return trained, f"{folder}/epoch=0-step=6.ckpt"


def resume(strategy, path):
    model = Perceptron()
    trainer = Trainer(strategy=STRATEGIES[strategy](), **QUIET, max_epochs=3, enable_checkpointing=False)
    trainer.fit(model, DataLoader(model.dataset(), batch_size=4), ckpt_path=path)
    return {"state": dict(model.state_dict()), "losses": model.losses}


def one_batch_more(strategy):
    return averaging_training.one_batch_more(STRATEGIES[strategy]())


def error_of_one_rank():
    return averaging_training.error_of_one_rank(horovod())


def refused_unused():
    return averaging_training.error_of(fit, "horovod", Unused())


def environment_afterwards():
    """Return what is left of Horovod, its variables and its threads after a run, and what a second run computes."""
    import os
    import threading

    import horovod.torch as hvd

    before = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    first = train("horovod", "Perceptron")
    after = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    threads = [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
    return before == after, hvd.is_initialized(), threads, first["losses"] == train("horovod", "Perceptron")["losses"]


def initialised_before():
    """Initialise Horovod as a program of its own would, alone, and return the error of a run."""
    import horovod.torch as hvd

    hvd.init()
    try:
        train("horovod", "Perceptron")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hvd.shutdown()
    return ""


def broadcast_trap():
    """Return the step of a fresh Adam after Horovod's own broadcast of its state."""
    import horovod.torch as hvd

    hvd.init()
    try:
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(layer.parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
        return [float(state["step"]) for state in optimizer.state.values()]
    finally:
        hvd.shutdown()
