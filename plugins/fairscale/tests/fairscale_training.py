"""In a rank of a test's world: train small models under a strategy, with a Trainer."""

import logging
import os

import averaging_training
import torch
from averaging_training import QUIET, Alternating, FrozenInTheMiddle, Unused
from parity_models import Attention, Convolution, Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from torchhal import Callback, ModelCheckpoint, Trainer
from torchhal.strategies import DDPStrategy


def oss(**options):
    from torchhal_fairscale import FairscaleOSSStrategy

    return FairscaleOSSStrategy(**options)


def sdp(**options):
    from torchhal_fairscale import FairscaleSDPStrategy

    return FairscaleSDPStrategy(**options)


STRATEGIES = {
    "oss": oss,
    "sdp": sdp,
    "oss_unused": lambda: oss(find_unused_parameters=True),
    "sdp_unused": lambda: sdp(find_unused_parameters=True),
    "oss_checkpointed": lambda: oss(activation_checkpointing=nn.TransformerEncoderLayer),
    "sdp_checkpointed": lambda: sdp(activation_checkpointing=nn.TransformerEncoderLayer),
    "ddp": DDPStrategy,
    "ddp_unused": lambda: DDPStrategy(find_unused_parameters=True),
}


def fit(strategy, model, **options):
    """Train and return the weights, with the losses of this rank."""
    made = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
    return averaging_training.fit(made, model, **options)


def train(strategy, name, options=None):
    return fit(strategy, MODELS[name](), **(options or {}))


def error_of(strategy, name, options=None):
    """Train, and return the error."""
    return averaging_training.error_of(train, strategy, name, options)


class Manual(averaging_training.Manual):
    clip_by = 0.5


class Toggled(Manual):
    """Two optimizers by hand, of which one's parameters are frozen while the other's are trained."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, frozen in ((first, self.body[1:]), (second, self.body[:1])):
            frozen.requires_grad_(False)
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            frozen.requires_grad_(True)
        self.losses.append(float(loss.detach()))


class TwoGroups(Perceptron):
    """Two parameter groups, and a scheduler."""

    def configure_optimizers(self):
        first, rest = self.body[0].parameters(), self.body[1:].parameters()
        optimizer = torch.optim.AdamW([{"params": first, "lr": 1e-2}, {"params": rest, "weight_decay": 0.1}], lr=2e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class OwnStep(Perceptron):
    """Steps in a hook of its own, with the closure that it is given."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure)


class ManyKinds(Perceptron):
    """A complex parameter, one that isn't contiguous, float64, an empty one, and two uses of one layer."""

    def build(self):
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(64, 32).t())
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.twice = nn.Linear(64, 64)
        return nn.Linear(32, 4)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        logits = self.body(F.linear(x, self.turned)) * self.wide.float() + self.empty.sum()
        return (logits.to(torch.complex64) * self.phases).abs()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Twice(Perceptron):
    """A layer that is used twice."""

    def build(self):
        self.twice = nn.Linear(64, 64)
        return nn.Linear(64, 4)

    def use(self, x):
        return torch.tanh(self.twice(x))

    def forward(self, x):
        return self.body(self.use(self.use(x + 0 * self.twice.bias)))


class TwiceCheckpointed(Twice):
    """The same, computed again in backward each time, in a backward of its own."""

    def use(self, x):
        return checkpoint(super().use, x, use_reentrant=True)


class Sparse(Perceptron):
    """An embedding with sparse gradients."""

    def build(self):
        self.rows = nn.Embedding(8, 64, sparse=True)
        return nn.Linear(64, 4)

    def forward(self, x):
        return self.body(torch.tanh(self.rows((x[:, 0] > 0).long()) + x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OtherOrder(Perceptron):
    """Two layers of one shape, which rank 1 steps, and which the ranks use in another order."""

    def build(self):
        self.large = nn.Linear(64, 256)
        self.one, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        return nn.Linear(256, 4)

    def forward(self, x):
        layers = [self.one, self.other]
        if self.trainer.global_rank:
            layers.reverse()
        for layer in layers:
            x = torch.tanh(layer(x))
        return self.body(self.large(x))

    def configure_optimizers(self):
        named = dict(self.named_parameters())
        first = ["large.weight", "one.weight", "other.weight"]
        return torch.optim.Adam([named[name] for name in [*first, *sorted(set(named) - set(first))]], lr=1e-2)


class OtherOrderLater(OtherOrder):
    """The ranks part in the third step."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps < 3:
            return self.body(self.large(torch.tanh(self.other(torch.tanh(self.one(x))))))
        return super().forward(x)


class OtherOwners(OtherOrder):
    """The same, but each of the layers is stepped by another rank."""

    def configure_optimizers(self):
        return torch.optim.Adam([*self.one.parameters(), *self.other.parameters(), *self.body.parameters()], lr=1e-2)


class AllFrozenAtTimes(Perceptron):
    """Trains the last layer alone for an epoch: some ranks own nothing that is trained."""

    def on_train_epoch_start(self):
        self.body[:4].requires_grad_(self.current_epoch != 1)


class ReplacedMemory(Perceptron):
    """Gives a parameter other memory between two steps, as an average of weights does that is swapped in."""

    def on_train_batch_start(self, batch, batch_idx):
        self.body[0].weight.data = self.body[0].weight.data * 1.0


class GroupAdded(Perceptron):
    """Adds a parameter group to the optimizer before the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.body[2:].parameters()), "lr": 1e-3})

    def configure_optimizers(self):
        return torch.optim.Adam(self.body[0].parameters(), lr=1e-2)


class Clipped(Perceptron):
    """Notes the norm of the gradients that the strategy tells."""

    norms = ()

    def on_before_optimizer_step(self, optimizer):
        self.norms = [*self.norms, float(self.trainer.strategy.grad_norm(optimizer))]


class Normed(Convolution):
    """A batch norm whose statistics are those of each rank, or of all of them."""


class OwnLBFGS(Perceptron):
    """An optimizer that evaluates the model several times in a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class ByTheNorm(torch.optim.SGD):
    """Scales its step by the norm of all gradients."""

    def step(self, closure=None):
        found = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = nn.utils.get_total_norm(found)
        for one in found:
            one.div_(norm + 1)
        return super().step(closure)


class Coupled(Perceptron):
    """An optimizer that looks at all gradients together."""

    def configure_optimizers(self):
        return ByTheNorm(self.parameters(), lr=0.1)


class Views(Perceptron):
    """Two parameters in the same memory."""

    def build(self):
        both = torch.randn(8, 64)
        self.upper, self.lower = nn.Parameter(both[:5]), nn.Parameter(both[3:])
        return nn.Linear(64, 4)

    def forward(self, x):
        return self.body(x) + (self.upper.sum() + self.lower.sum()) * 1e-3


class OwnRate(Perceptron):
    """Sets the learning rate by the loss of a rank's own batch."""

    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 + 1e-3 * self.trainer.global_rank


class OwnNoise(Perceptron):
    """Writes other numbers into a weight on each rank."""

    def on_train_start(self):
        with torch.no_grad():
            self.body[0].weight.add_(self.trainer.global_rank)


class OwnClipping(Perceptron):
    """Clips by the norm of the gradients that this rank has."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class HookOfTheStep(Perceptron):
    """Clips in a hook of the optimizer's step, from the first on."""

    def add_hook(self, optimizer):
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(self.parameters(), 0.05) and None)
        return optimizer

    def configure_optimizers(self):
        return self.add_hook(super().configure_optimizers())


class HookOfALaterStep(HookOfTheStep):
    """The same, registered when training has begun."""

    def on_train_start(self):
        self.add_hook(self.trainer.optimizers[0])

    def configure_optimizers(self):
        return Perceptron.configure_optimizers(self)


class HookByHand(Manual):
    """A hook of the step under manual optimization, where all ranks have all gradients."""

    def configure_optimizers(self):
        return [HookOfTheStep.add_hook(self, optimizer) for optimizer in super().configure_optimizers()]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Ignoring(Perceptron):
    """Trains a weight on each rank by itself."""

    _ddp_params_and_buffers_to_ignore = ("body.0.weight",)


class FullySharded(Perceptron):
    """A layer in fairscale's FullyShardedDataParallel."""

    def configure_model(self):
        from fairscale.nn import FullyShardedDataParallel

        self.body[4] = FullyShardedDataParallel(self.body[4])


MODELS = {cls.__name__: cls for cls in (
    Perceptron, Attention, Manual, Toggled, TwoGroups, OwnStep, ManyKinds, Twice, TwiceCheckpointed, Sparse, Unused,
    OtherOrder, OtherOrderLater, OtherOwners, Alternating, FrozenInTheMiddle, AllFrozenAtTimes,
    ReplacedMemory, GroupAdded, Clipped, Normed, OwnLBFGS, Coupled, Views, OwnRate, OwnNoise, FullySharded, OwnClipping,
    HookOfTheStep, HookOfALaterStep, HookByHand, Ignoring,
)}  # fmt: skip


def norms(strategy, options):
    model = Clipped()
    return {**fit(strategy, model, **options), "norms": model.norms}


def save(strategy, folder, devices=2, io=None):
    """Train three epochs and keep the checkpoint of the first; return what came of it, and the checkpoint's path."""
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1)
    model = TwoGroups()
    trained = fit(
        strategy, model, max_epochs=3, callbacks=[callback], enable_checkpointing=True, devices=devices,
        **({} if io is None else {"plugins": [io]}),
    )  # fmt: skip
    return trained, sorted(str(path) for path in callback_files(folder))


def callback_files(folder):
    return [os.path.join(folder, name) for name in os.listdir(folder) if "epoch=0" in name]


def resume(strategy, path, devices=2, io=None):
    model = TwoGroups()
    trainer = Trainer(
        strategy=STRATEGIES[strategy](), **{**QUIET, "devices": devices}, max_epochs=3, enable_checkpointing=False,
        **({} if io is None else {"plugins": [io]}),
    )  # fmt: skip
    trainer.fit(model, DataLoader(model.dataset(), batch_size=4), ckpt_path=path)
    return {"state": dict(model.state_dict()), "losses": model.losses}


def one_batch_more(strategy):
    return averaging_training.one_batch_more(STRATEGIES[strategy]())


def error_of_one_rank(strategy):
    return averaging_training.error_of_one_rank(STRATEGIES[strategy]())


def runs_of_one_object(strategy):
    """Return the losses of two fits by one strategy object, of one model and of another, and an evaluation between."""
    made = STRATEGIES[strategy]()
    first = Perceptron()
    trained = fit(made, first)["losses"][:]
    trainer = Trainer(strategy=made, **QUIET)
    first.validation_step = lambda batch, batch_idx: first.log("loss", first.loss(batch))
    loader = DataLoader(first.dataset(), batch_size=4)
    evaluated = trainer.validate(first, loader, verbose=False)[0]["loss"]
    again = fit(made, first)["losses"][len(trained) :]
    return trained, float(evaluated), again, fit(made, Perceptron())["losses"]


def left_behind(strategy):
    """Return what a run leaves on the module: memory shared by parameters, hooks, own forwards, optimizer objects."""
    model, seen = Attention(), []
    handlers, logging.root.handlers = logging.root.handlers, []

    class See(Callback):
        def on_train_start(self, trainer, module):
            seen.append(trainer.optimizers[0])

        def on_train_end(self, trainer, module):
            seen.append(trainer.optimizers[0])

    made = model.configure_optimizers
    optimizers = []
    model.configure_optimizers = lambda: optimizers.append(made()) or optimizers[0]
    fit(strategy, model, callbacks=[See()])
    memory = [one.untyped_storage().data_ptr() for one in model.parameters()]
    sizes = [one.untyped_storage().nbytes() == one.numel() * one.element_size() for one in model.parameters()]
    hooks = [
        bool(one._backward_hooks) or bool(getattr(one, "_post_accumulate_grad_hooks", None))
        for one in model.parameters()
    ]
    added, logging.root.handlers = logging.root.handlers, handlers
    forwards = [name for name, layer in model.named_modules() if "forward" in vars(layer)]
    return {
        "own memory": len(set(memory)) == len(memory) and all(sizes), "hooks": any(hooks), "forwards": forwards,
        "handlers of the root logger": added,
        "same optimizer": all(each is optimizers[0] for each in seen),
    }  # fmt: skip


def share_of_state(strategy):
    """Return the numbers of parameters of which this rank has optimizer state, and gradients after backward."""
    found = []

    class See(Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            found.append(sum(one in trainer.optimizers[0].state for one in module.parameters()))

        def on_before_optimizer_step(self, trainer, module, optimizer):
            found.append(sum(one.grad is not None for one in module.parameters()))

    fit(strategy, Perceptron(), max_epochs=1, callbacks=[See()], limit_train_batches=1)
    return found
