"""Strategies that do nothing as core does: the contract has to carry them without a special case."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhal import Module, Trainer
from torchhal.strategies import SingleDeviceStrategy

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


class Net(Module):
    def __init__(self, scheduler=False):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scheduler = scheduler
        self.rates = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layer(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.optimizers:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(n=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randint(0, 2, (6,), generator=generator)) for _ in range(n)]


def plain(accumulate=1, clip=None):
    torch.manual_seed(0)
    model = Net()
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(batches()):
        (model.training_step(batch, index) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def fit(strategy, **options):
    torch.manual_seed(0)
    model = Net(options.pop("scheduler", False))
    trainer = Trainer(strategy=strategy, max_epochs=1, **QUIET, **options)
    trainer.fit(model, batches())
    return trainer, model


def assert_equal(model, reference):
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


class Engine(SingleDeviceStrategy):
    """As DeepSpeed's: accumulates, clips, clears gradients and steps schedulers by itself, inside its own step."""

    features = frozenset({"owns_accumulation", "owns_clipping", "owns_schedulers"})

    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        # no super(): the engine takes model and optimizer together
        self.made = getattr(self, "made", 0) + 1
        self.optimizers, self.lr_scheduler_configs = list(optimizers), list(lr_scheduler_configs)
        self.micro = 0

    def setup_model(self, *, training=True):
        self.models = getattr(self, "models", 0) + 1
        self.model = self.module

    def backward(self, loss, *args, **kwargs):
        (loss / self.accumulate_grad_batches).backward()
        self.micro += 1

    def zero_grad(self, optimizer):
        raise AssertionError("the engine clears gradients itself")

    def optimizer_step(self, optimizer, closure=None):
        if self.micro % self.accumulate_grad_batches:
            return None
        if self.gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.gradient_clip_val)
        optimizer.step()
        optimizer.zero_grad()
        for config in self.lr_scheduler_configs:
            config.scheduler.step()
        return True


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, None), (4, 0.1)])
def test_an_engine_that_owns_everything(accumulate, clip):
    strategy = Engine()
    trainer, model = fit(strategy, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert_equal(model, plain(accumulate, clip))
    assert trainer.global_step == 12 // accumulate
    assert (strategy.models, strategy.made) == (1, 1)  # an override without super() is not done twice


def test_max_steps_counts_an_engines_steps():
    trainer, _ = fit(Engine(), accumulate_grad_batches=3, max_steps=2)
    assert trainer.global_step == 2
    assert trainer.fit_loop.total_batches == 6


def test_an_engines_schedulers_step_once():
    _, model = fit(Engine(), scheduler=True)
    assert model.rates[:3] == [0.5, 0.25, 0.125]


class Compiled(SingleDeviceStrategy):
    """As an IPU's executor: one call is forward, backward and optimizer step; the loss comes back detached."""

    features = frozenset({"owns_step"})

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        loss = self.module.training_step(batch, batch_idx)
        loss.backward()
        optimizer.step()
        return loss.detach()


def test_a_step_function_that_does_it_all():
    trainer, model = fit(Compiled())
    assert_equal(model, plain())
    assert trainer.global_step == 12


class Pipeline(SingleDeviceStrategy):
    """As a pipeline's schedule: the step function has run backward, and only the last stage knows the loss."""

    features = frozenset({"owns_backward"})

    def training_step(self, batch, batch_idx):
        (self.module.training_step(batch, batch_idx) / self.accumulate_grad_batches).backward()


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, 0.1)])
def test_a_step_function_that_leaves_gradients(accumulate, clip):
    trainer, model = fit(Pipeline(), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert_equal(model, plain(accumulate, clip))
    assert trainer.global_step == 12 // accumulate


class Bare(SingleDeviceStrategy):
    """Overrides setup without super(), as the documents that this library was asked for with do."""

    def setup(self, trainer):
        self.seen = (self.accelerator.name, self.precision.alias)


def test_what_an_override_of_setup_leaves_out_is_done():
    strategy = Bare()
    _, model = fit(strategy)
    assert strategy.seen == ("cpu", "32-true")
    assert_equal(model, plain())


class OwnLoader(SingleDeviceStrategy):
    """As a vendor's loader around the user's."""

    def process_dataloader(self, loader, *, training):
        return [(x * 0, y) for x, y in loader] if training else loader


def test_a_strategy_may_wrap_loaders():
    _, model = fit(OwnLoader())
    torch.manual_seed(0)
    assert torch.equal(model.layer.weight, Net().layer.weight)  # nothing to learn from zeros but the bias


ORDER = ["make_launcher", "setup_environment", "setup_communication", "connect", "setup", "setup_model", "wrap_model",
         "setup_optimizers", "step_function", "teardown"]  # fmt: skip


class Vocal(SingleDeviceStrategy):
    """Says what is called."""


def _said(name):
    def method(self, *args, **kwargs):
        self.__dict__.setdefault("calls", []).append(name)
        return getattr(super(Vocal, self), name)(*args, **kwargs)

    return method


for _name in ORDER:
    setattr(Vocal, _name, _said(_name))


def test_the_order_of_a_life():
    strategy = Vocal()
    fit(strategy)
    assert strategy.calls == ORDER


def test_sparse_gradients_are_clipped_by_their_true_norm():
    class Sparse(Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(9, 3, sparse=sparse)
            self.head = nn.Linear(3, 2)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.head(self.embed(batch)), batch % 2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    data = [torch.tensor([1, 2, 2, 5]), torch.tensor([0, 1, 1, 8])]
    models = []
    for sparse in (True, False):
        model = Sparse(sparse)
        Trainer(max_epochs=2, gradient_clip_val=0.05, **QUIET).fit(model, data)
        models.append(model)
    for (name, a), (_, b) in zip(models[0].state_dict().items(), models[1].state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
