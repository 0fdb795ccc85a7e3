"""In a rank of a test's world: train small models under a strategy, with a Trainer."""

from datetime import timedelta

import averaging_training
import torch
from averaging_training import QUIET, Manual
from parity_models import Convolution, Perceptron
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal import Callback, ModelCheckpoint, Trainer
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy


def made(plugin, stage=None, **arguments):
    from torchhal_colossalai import ColossalAIStrategy

    options = arguments.pop("options", {}) | ({} if stage is None else {"stage": stage})
    return ColossalAIStrategy(plugin=plugin, options=options, **arguments)


STRATEGIES = {
    "colossalai": lambda: made("torch_ddp"),
    "colossalai_unused": lambda: made("torch_ddp", find_unused_parameters=True),
    "zero1": lambda: made("low_level_zero", 1),
    "zero2": lambda: made("low_level_zero", 2),
    "zero1_unused": lambda: made("low_level_zero", 1, find_unused_parameters=True),
    "zero2_unused": lambda: made("low_level_zero", 2, find_unused_parameters=True),
    "zero1_small": lambda: made("low_level_zero", 1, options={"reduce_bucket_size_in_m": 0.0005}),
    "zero2_small": lambda: made("low_level_zero", 2, options={"reduce_bucket_size_in_m": 0.0005}),
    "ddp": DDPStrategy,
    "ddp_unused": lambda: DDPStrategy(find_unused_parameters=True),
    "single_device": SingleDeviceStrategy,
}


def fit(strategy, model, **options):
    """Train and return the weights, with the losses of this rank."""
    made = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
    return averaging_training.fit(made, model, **options)


def train(strategy, name, options=None):
    return fit(strategy, MODELS[name](), **(options or {}))


def error_of(strategy, name, options=None):
    """Train and return the error."""
    return averaging_training.error_of(train, strategy, name, options)


class Toggled(Manual):
    """Each optimizer's step trains its own layers alone; gradients of a step are given up, through the module."""

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx % 3 == number:
                self.zero_grad()
                self.manual_backward(2 * self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.losses.append(float(self.loss(batch).detach()))


class ManualClosure(Perceptron):
    """Steps by hand with a closure that runs backward."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        self.losses.append(float(self.loss(batch).detach()))


class OwnStep(Perceptron):
    """Overrides optimizer_step, with the loop's closure."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class Shapes(Perceptron):
    """Parameters whose elements no number of ranks divides, one without a dimension, one without an element, one that
    isn't contiguous, and a layer that is used twice."""

    def build(self):
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(64, 33).t())
        self.twice = nn.Linear(64, 64)
        return nn.Linear(33, 4)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.body(F.linear(x, self.turned)) * self.scale + self.empty.sum()

    def configure_optimizers(self):
        groups = [{"params": [self.empty]}, {"params": [self.scale, self.turned], "lr": 0.02}]
        return torch.optim.NAdam([*groups, {"params": [*self.twice.parameters(), *self.body.parameters()]}], lr=0.01)


class GroupAdded(Perceptron):
    """Adds a layer to the optimizer in the second epoch, as fine-tuning does, and gives another one new memory."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.body[2:].parameters(), lr=1e-2)

    def on_fit_start(self):
        self.body[0].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.body[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.body[0].parameters()), "lr": 1e-3})
            self.body[4].weight.data = self.body[4].weight.data.clone()


class Replaced(Perceptron):
    """Has another layer from the second epoch on, which no optimizer has."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(4)
            self.body[2] = nn.Linear(32, 32)


class Running(Perceptron):
    """Computes with a buffer that follows each rank's own data."""

    def build(self):
        self.register_buffer("mean", torch.zeros(64))
        return super().build()

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.3)
        return self.body(x - self.mean)


class LossesInFloat(Perceptron):
    """Computes its loss in float32, whatever the model's dtype."""

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]).float(), batch[1])


class InHalfPrecision(LossesInFloat):
    """SGD with momentum: the eps of Adam is zero in float16."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Sparse(Perceptron):
    def build(self):
        self.rows = nn.Embedding(8, 64, sparse=True)
        return super().build()

    def forward(self, x):
        return self.body(x + self.rows((x[:, 0] > 0).long()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Complex(Perceptron):
    def build(self):
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        return super().build()

    def forward(self, x):
        return (self.body(x).to(torch.complex64) * self.phases).abs()


class TwoDtypes(Perceptron):
    def build(self):
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        return super().build()

    def forward(self, x):
        return self.body(x) * self.wide.float()


class TwoOwners(Perceptron):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        raise AssertionError("it must not come to a step")

    def configure_optimizers(self):
        return [torch.optim.Adam(self.parameters()), torch.optim.SGD(self.body[0].parameters(), lr=0.1)]


class Views(Perceptron):
    def build(self):
        body = super().build()
        body[2].weight = nn.Parameter(body[0].weight.data[:, :32])
        return body


class SteppingBy(Perceptron):
    """With an optimizer of its own."""

    optimizer = None

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-2)


class NormedSGD(torch.optim.SGD):
    """Divides each parameter's gradient by its norm."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=-group["lr"])


class SignSGD(torch.optim.SGD):
    """Goes by the sign of each element."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter]["last"] = parameter.grad.sign()
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class ByNorm(SteppingBy):
    optimizer = NormedSGD


class BySign(SteppingBy):
    optimizer = SignSGD


class ByLBFGS(SteppingBy):
    optimizer = torch.optim.LBFGS


class ByAdafactor(SteppingBy):
    optimizer = torch.optim.Adafactor


class ByASGD(SteppingBy):
    optimizer = torch.optim.ASGD


class ByRprop(SteppingBy):
    optimizer = torch.optim.Rprop


class ClipsItself(Perceptron):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Scheduled(Perceptron):
    """A scheduler that goes by a metric, and one with momentum in its groups."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LrOfTheRank(Perceptron):
    """Sets a learning rate by the rank."""

    def on_train_epoch_start(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 * (1 + self.trainer.global_rank)


class FrozenOnOneRank(Perceptron):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            self.body[0].requires_grad_(False)


MODELS = {name: cls for name, cls in vars().items() if isinstance(cls, type) and issubclass(cls, Perceptron)}
MODELS |= {cls.__name__: cls for cls in (
    Convolution, averaging_training.Alternating, averaging_training.FrozenInTheMiddle, averaging_training.Manual,
    averaging_training.Unused,
)}  # fmt: skip


def save(strategy, folder, name="Perceptron", options=None):
    """Train three epochs and keep the checkpoint of the first; return what came of it, and the checkpoint's path."""
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1)
    options = {"max_epochs": 3, "callbacks": [callback], "enable_checkpointing": True, **(options or {})}
    trained = fit(strategy, MODELS[name](), **options)
    steps = 6 * 2 // options.get("devices", 2) if "accumulate_grad_batches" not in options else 3
    return trained, f"{folder}/epoch=0-step={steps}.ckpt"


def resume(strategy, path, name="Perceptron", options=None):
    model = MODELS[name]()
    options = {**QUIET, "max_epochs": 3, "enable_checkpointing": False, **(options or {})}
    trainer = Trainer(strategy=STRATEGIES[strategy](), **options)
    trainer.fit(model, DataLoader(model.dataset(), batch_size=4), ckpt_path=path)
    return {"state": dict(model.state_dict()), "losses": model.losses}


def saved_twice(strategy, folder):
    """Save within the last epoch and after the fit; return both checkpoints, and what the optimizer has then."""
    model, path = Perceptron(), f"{folder}/after.ckpt"
    callback = ModelCheckpoint(dirpath=folder, filename="within")
    trainer = Trainer(strategy=STRATEGIES[strategy](), **QUIET, max_epochs=1, callbacks=[callback])
    trainer.fit(model, DataLoader(model.dataset(), batch_size=4))
    trainer.save_checkpoint(path)
    within, after = (torch.load(one, weights_only=True) for one in (f"{folder}/within.ckpt", path))
    shapes = {tuple(each.shape) for each in trainer.optimizers[0].state}
    padded = [p.untyped_storage().nbytes() - p.numel() * p.element_size() for p in model.parameters()]
    return within["optimizer_states"], after["optimizer_states"], shapes, sum(padded)


class Interrupt(Callback):
    """Saves in the middle of an accumulation."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 0:
            trainer.save_checkpoint(self.path)


class SaveByBooster(Callback):
    """Writes Colossal-AI's own files, and keeps what a checkpoint has of the optimizer."""

    def __init__(self, folder):
        self.folder = folder
        self.state = None

    def on_train_end(self, trainer, module):
        strategy, (optimizer,) = trainer.strategy, trainer.optimizers
        strategy.booster.save_model(strategy.boosted_module, f"{self.folder}/model.pt")
        if (engine := getattr(strategy, "engines", {}).get(optimizer)) is not None:
            strategy.booster.save_optimizer(engine.zero, f"{self.folder}/optimizer.pt")
        self.state = strategy.optimizer_state(optimizer)["state"]


def save_by_booster(strategy, folder):
    callback = SaveByBooster(folder)
    result = fit(strategy, Perceptron(), callbacks=[callback])
    return result["state"], callback.state


def saved_after_a_failure(strategy, path):
    """Fail in a step, on every rank, and save; return the error of that."""
    model = Perceptron()

    def fail(batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("the cause")
        return Perceptron.training_step(model, batch, batch_idx)

    model.training_step = fail
    trainer = Trainer(strategy=STRATEGIES[strategy](), **QUIET, max_epochs=1, enable_checkpointing=False)
    try:
        trainer.fit(model, DataLoader(model.dataset(), batch_size=4))
    except ValueError:
        pass
    try:
        trainer.strategy.optimizer_state(trainer.optimizers[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_in_accumulation(strategy, path):
    return fit(strategy, Perceptron(), accumulate_grad_batches=2, callbacks=[Interrupt(path)])


class Watch(Callback):
    """Keeps what a callback sees of the optimizer and the gradients."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        own = [each for group in optimizer.param_groups for each in group["params"]]
        same = all(one is other for one, other in zip(own, module.parameters(), strict=True))
        grads = [each.grad is not None for each in own]
        self.seen.append((same, all(grads), any(grads), float(trainer.strategy.grad_norm(optimizer))))


def watched(strategy):
    watch = Watch()
    fit(strategy, Perceptron(), callbacks=[watch], gradient_clip_val=0.3, max_epochs=1)
    return watch.seen


def one_batch_more(strategy):
    return averaging_training.one_batch_more(STRATEGIES[strategy]())


def frozen_on_one_rank(strategy):
    chosen = STRATEGIES[strategy]()
    chosen.timeout = timedelta(seconds=4)
    try:
        fit(chosen, FrozenOnOneRank())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def again(strategy):
    """Fit a model twice with one strategy object, after a training by hand; return the weights and the losses."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(model.dataset()[:8]).backward()
    optimizer.step()
    chosen = STRATEGIES[strategy]()
    for _ in range(2):
        result = fit(chosen, model)
    return result


def evaluate_without_a_fit(strategy):
    model = Convolution()
    model.validation_step = lambda batch, batch_idx: model.losses.append(float(model.loss(batch)))
    model.predict_step = lambda batch, batch_idx: model(batch[0])
    trainer = Trainer(strategy=STRATEGIES[strategy](), **QUIET)
    loader = DataLoader(model.dataset(), batch_size=4)
    trainer.validate(model, loader, verbose=False)
    predicted = trainer.predict(model, loader)
    return model.losses, torch.cat(predicted)


def globals_of_the_process():
    import logging
    import os
    import sys
    import warnings

    found = {
        "environ": dict(os.environ),
        "validates": torch.distributions.Distribution._validate_args,
        "filters": list(warnings.filters),
        "disabled": logging.root.manager.disable,
        "converts": torch.nn.SyncBatchNorm.__dict__["convert_sync_batchnorm"],
        "threads": torch.get_num_threads(),
    }
    if "colossalai" in sys.modules:
        from colossalai.accelerator import api
        from colossalai.booster.plugin import LowLevelZeroPlugin
        from colossalai.cluster import DistCoordinator
        from colossalai.context.singleton_meta import SingletonMeta
        from colossalai.zero.low_level.low_level_optim import LowLevelZeroOptimizer

        found["accelerator"] = api._ACCELERATOR
        found["name"] = LowLevelZeroPlugin.__name__
        found["coordinator"] = DistCoordinator in SingletonMeta._instances
        found["check"] = LowLevelZeroOptimizer._sanity_checks
    return found


def left_behind(strategy):
    """Return the names of globals that a first and a second run have changed, and what is left on the model."""
    fit("ddp", Convolution())  # what torch leaves
    before = globals_of_the_process()
    model = Convolution()
    fit(strategy, model)
    between = globals_of_the_process()
    first = [name for name, value in before.items() if between[name] != value]
    again = Convolution()
    fit(strategy, again)
    after = globals_of_the_process()
    second = [name for name, value in between.items() if after[name] != value]
    kinds = sorted({type(layer).__name__ for layer in model.modules()})
    attributes = [name for name in vars(model) if "torchhal" in name or name == "zero_grad"]
    hooks = [name for name, each in model.named_parameters() if getattr(each, "_post_accumulate_grad_hooks", None)]
    return first, second, kinds, attributes, hooks, model.losses == again.losses
