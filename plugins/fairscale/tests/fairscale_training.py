"""In a rank of a test's world: train small models under a strategy, with a Trainer."""

import torch
from parity_models import Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal import ModelCheckpoint, Trainer
from torchhal.strategies import DDPStrategy

QUIET = {
    "accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def horovod(**options):
    from torchhal_horovod import fairscaleStrategy

    return fairscaleStrategy(**options)


STRATEGIES = {
    "horovod": horovod,
    "unused": lambda: horovod(find_unused_parameters=True),
    "fp16": lambda: horovod(compression="fp16"),
    "ddp": DDPStrategy,
    "ddp_unused": lambda: DDPStrategy(find_unused_parameters=True),
}


def fit(strategy, model, *, batch=4, **options):
    """Train and return the weights, with the losses of this rank."""
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = Trainer(strategy=STRATEGIES[strategy](), **{**QUIET, **options})
    trainer.fit(model, DataLoader(model.dataset(), batch_size=batch))
    return {"state": {name: value.clone() for name, value in model.state_dict().items()}, "losses": model.losses}


def train(strategy, name, options=None):
    return fit(strategy, MODELS[name](), **(options or {}))


class Manual(Perceptron):
    """Two optimizers by hand, each over its own layers; every second step accumulates over two backward passes."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for turn, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            for _ in range(1 + (batch_idx + turn) % 2):
                loss = self.loss(batch)
                self.manual_backward(loss)
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self):
        first, rest = self.body[0].parameters(), self.body[1:].parameters()
        return [torch.optim.Adam(first, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


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


class Unused(Perceptron):
    """A layer that no rank uses, with weight decay, and one that rank 1 alone uses in some steps."""

    def build(self):
        self.idle, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)
        return super().build()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if self.trainer.global_rank == 1 and batch_idx % 2:
            logits = self.seldom(logits)
        loss = F.cross_entropy(logits, batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Alternating(Perceptron):
    """Freezes and unfreezes layers from epoch to epoch, and replaces one before the third."""

    def on_train_epoch_start(self):
        self.body[0].requires_grad_(self.current_epoch % 2 == 0)
        self.body[2].requires_grad_(self.current_epoch != 1)


class FrozenInTheMiddle(Perceptron):
    """Unfreezes a layer between two batches."""

    def on_train_batch_start(self, batch, batch_idx):
        self.body[2].requires_grad_(batch_idx > 2)

    def on_train_start(self):
        self.body[2].requires_grad_(False)


class HalfPrecision(Perceptron):
    """Weights in bfloat16, whose gradients fairscale can't add up."""

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
    """Train with a batch more on rank 0; return the error."""
    from datetime import timedelta

    made = STRATEGIES[strategy]()
    made.timeout = timedelta(seconds=4)
    model = Perceptron()
    trainer = Trainer(strategy=made, **QUIET, max_epochs=1, enable_checkpointing=False, use_distributed_sampler=False)
    batches = [part for number, part in enumerate(DataLoader(model.dataset(), batch_size=8)) if number < 3]
    import os

    if os.environ["RANK"] == "0":
        batches.append(batches[0])
    try:
        trainer.fit(model, batches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def error_of_one_rank():
    """Raise on rank 1 while rank 0 averages; return the error of each."""
    model = Perceptron()

    def fail(batch, batch_idx):
        if model.trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("the cause")
        return Perceptron.training_step(model, batch, batch_idx)

    model.training_step = fail
    try:
        fit("horovod", model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_unused():
    try:
        fit("horovod", Unused())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def environment_afterwards():
    """Return what is left of fairscale, its variables and its threads after a run, and what a second run computes."""
    import os
    import threading

    import horovod.torch as hvd

    before = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    first = train("horovod", "Perceptron")
    after = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    threads = [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
    return before == after, hvd.is_initialized(), threads, first["losses"] == train("horovod", "Perceptron")["losses"]


def initialised_before():
    """Initialise fairscale as a program of its own would, alone, and return the error of a run."""
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
    """Return the step of a fresh Adam after fairscale's own broadcast of its state."""
    import horovod.torch as hvd

    hvd.init()
    try:
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(layer.parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
        return [float(state["step"]) for state in optimizer.state.values()]
    finally:
        hvd.shutdown()
