"""In a rank of a test's world: what happens around a step under ZeRO and under ddp."""

import copy
import pickle
import random

import colossalai_training as training
import torch
from averaging_training import ReadsBuffers
from parity_models import Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal import Callback, Trainer


def reads_buffers(strategy, accumulate):
    return training.fit(strategy, ReadsBuffers(), accumulate_grad_batches=accumulate, val_check_interval=3)


class KeepsGraph(training.Running):
    """Its buffer is saved by a graph that runs backward in the step after."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.kept.backward()
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def forward(self, x):
        return self.body(x - self.mean)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.factor = torch.ones(64, requires_grad=True)
        self.kept = (self.factor * self.mean).sum()


def keeps_graph(strategy):
    return training.fit(strategy, KeepsGraph(), max_epochs=1)


class ComesWithState(Perceptron):
    """Its optimizer has been loaded, or comes from an earlier fit."""

    state = None

    def build(self):
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        return super().build()

    def forward(self, x):
        return self.body(x) * self.scale + self.empty.sum()

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=1e-2)
        if self.state is not None:
            optimizer.load_state_dict(self.state)
        return optimizer


def loaded_state(strategy):
    """Fit with an optimizer that has been loaded with the state of steps by hand."""
    before = ComesWithState()
    optimizer = before.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        before.loss(before.dataset()[:8]).backward()
        optimizer.step()
    model = ComesWithState()
    model.state = optimizer.state_dict()
    return training.fit(strategy, model)


def same_optimizer(strategy, options=None):
    """Fit twice with one optimizer object; the second fit is as if the first had gone on."""
    model = ComesWithState()
    optimizer = model.configure_optimizers()
    model.configure_optimizers = lambda: optimizer
    for _ in range(2):
        result = training.fit(strategy, model, **(options or {}))
    return result


class ChannelsLast(Perceptron):
    """A convolution in channels_last, and a matrix that is laid out by columns."""

    def build(self):
        self.turned = nn.Parameter(torch.randn(33, 64).t())
        body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3 * 6 * 6, 4))
        self.more = nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)
        return body

    def forward(self, x):
        x = torch.tanh(self.body[0](x.view(-1, 1, 8, 8)))
        x = x + F.pad(self.more(x), (1, 1, 1, 1))
        return self.body[1:](x) + F.linear(x[:, :1].flatten(1)[:, :33], self.turned)[:, :4]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:  # another division of the optimizer
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def orders(strategy):
    """Return the strides of parameters and of the optimizer's state before a run and after it."""
    model = ChannelsLast()
    before = {name: each.stride() for name, each in model.named_parameters()}
    options = {**training.QUIET, "max_epochs": 2, "enable_checkpointing": False}
    trainer = Trainer(strategy=training.STRATEGIES[strategy](), **options)
    trainer.fit(model, DataLoader(model.dataset(), batch_size=4))
    after = {name: each.stride() for name, each in model.named_parameters()}
    state = trainer.optimizers[0].state
    moments = {n: state[p]["exp_avg"].stride() for n, p in model.named_parameters() if p in state}
    alone = [p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return before, after, moments, all(alone), {"state": weights, "losses": model.losses}


class FrozenInAccumulation(Perceptron):
    """Freezes a layer between the two micro-batches of a step, of which rank 0 alone has used it in the first."""

    def build(self):
        self.aux = nn.Linear(64, 4)
        return super().build()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if self.trainer.global_rank == 0 and batch_idx == 0:
            logits = logits + self.aux(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.aux.requires_grad_(batch_idx == 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.should_stop = True


def frozen_in_accumulation(strategy):
    options = {"accumulate_grad_batches": 2, "max_epochs": 1, "limit_train_batches": 2}
    return training.fit(strategy, FrozenInAccumulation(), **options)


class Copies(Callback):
    """Makes copies of the model in a run, and clears the gradients of these."""

    def __init__(self):
        self.copies = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx or trainer.current_epoch:
            return
        attached, vars(module)["_trainer"] = vars(module).get("_trainer"), None
        try:
            self.copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        finally:
            vars(module)["_trainer"] = attached
        for each in self.copies:
            each.loss(each.dataset()[:4]).backward()
            each.zero_grad()


def copies(strategy):
    callback, model = Copies(), Perceptron()
    result = training.fit(strategy, model, callbacks=[callback], max_epochs=1)
    own = all(each.zero_grad.__self__ is each for each in callback.copies)
    cleared = all(p.grad is None for each in callback.copies for p in each.parameters())
    apart = all(
        p.data_ptr() != q.data_ptr()
        for each in callback.copies
        for p, q in zip(each.parameters(), model.parameters(), strict=True)
    )
    for each in callback.copies:
        pickle.dumps(each)
    return result, len(callback.copies), own, cleared, apart


class OwnZeroGrad(Perceptron):
    """Has a ``zero_grad`` on the object."""

    def build(self):
        self.cleared = 0
        self.zero_grad = self.count
        return super().build()

    def count(self, set_to_none=True):
        self.cleared += 1
        nn.Module.zero_grad(self, set_to_none)


def own_zero_grad(strategy):
    model = OwnZeroGrad()
    training.fit(strategy, model, max_epochs=1)
    return vars(model)["zero_grad"] == model.count


class Ignored(Perceptron):
    _ddp_params_and_buffers_to_ignore = ("body.2.weight",)


class HookedStep(Perceptron):
    """Its optimizer has a hook before each step from the first epoch on, or from the second."""

    epoch = 0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if not self.epoch:
            optimizer.register_step_pre_hook(self.clip)
        return optimizer

    def on_train_epoch_start(self):
        if self.epoch and self.current_epoch == self.epoch:
            self.trainer.optimizers[0].register_step_pre_hook(self.clip)

    @staticmethod
    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.05)


class HookedLater(HookedStep):
    epoch = 1


class DrawsInStep(training.SignSGD):
    """Draws from a generator that no trial looks at."""

    def step(self, closure=None):
        random.random()
        return super().step(closure)


class Draws(training.SteppingBy):
    optimizer = DrawsInStep

    def on_train_start(self):
        self.drawn = [random.random(), float(torch.rand(()))]


def drawn(strategy):
    """Return what generators give when training starts."""
    random.seed(1)
    model = Draws()
    training.fit(strategy, model, max_epochs=1)
    return model.drawn


class HookedAfter(Perceptron):
    """Bounds the norm of each weight after a step, and then keeps an average of the weights, both in hooks."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        self.averages = [each.detach().clone() for each in self.parameters()]
        optimizer.register_step_post_hook(self.bound)
        optimizer.register_step_post_hook(self.average)
        return optimizer

    @staticmethod
    def bound(optimizer, args, kwargs):
        with torch.no_grad():
            for number, each in enumerate(optimizer.param_groups[0]["params"]):
                bounded = each * (0.9 * each.norm().clamp(max=2.0) / each.norm())
                if number % 2:
                    each.copy_(bounded)
                else:
                    each.data = bounded

    def average(self, optimizer, args, kwargs):
        for average, each in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(each.detach(), 0.3)


def hooked_after(strategy, options):
    model = HookedAfter()
    return training.fit(strategy, model, **options), model.averages


training.MODELS |= {cls.__name__: cls for cls in (Ignored, HookedStep, HookedLater, ComesWithState)}


def train(strategy, name, options=None):
    return training.train(strategy, name, options)


def error_of(strategy, name):
    return training.error_of(strategy, name)
