"""Strategies that do nothing as core does: the contract has to carry them without a special case."""

import hardware
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhal import Module, Trainer
from torchhal.strategies import SingleDeviceStrategy, StepResult
from torchhal.trainer.loops._fit_loop import DataPositionChanged

pytestmark = pytest.mark.usefixtures("accelerator")


def make(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}  # fmt: skip
    return Trainer(accelerator=hardware.name(), devices=1, **quiet, **options)


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
    trainer = make(strategy=strategy, max_epochs=1, **options)
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
        self.model_to_device()
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


class Swarm(SingleDeviceStrategy):
    """As a peer among others: a step is due when all together have done enough, and who was late takes over theirs."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def optimizer_step(self, optimizer, closure=None):
        answer = self.answers[self.asked % 6]
        self.asked += 1
        return answer


NOT_DUE, UPDATED, SKIPPED = StepResult.NOT_DUE, StepResult.UPDATED, StepResult.SKIPPED


@pytest.mark.parametrize(
    "answers",
    [
        (None, 5, None, True, False, None),  # as strategies answered before there was StepResult
        (NOT_DUE, StepResult(5, updated=True), NOT_DUE, UPDATED, SKIPPED, NOT_DUE),
    ],
)
def test_a_step_may_be_none_or_many(answers):
    strategy = Swarm(answers)
    strategy.asked = 0
    trainer, _ = fit(strategy, scheduler=True)
    assert trainer.global_step == 14  # 5 at once, one, one that was skipped, twice
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4  # asked after 5 and after True
    strategy.asked = 0
    trainer, _ = fit(strategy, max_steps=6)
    assert (trainer.global_step, trainer.fit_loop.total_batches) == (6, 4)


class Follower(SingleDeviceStrategy):
    """As a replica group that comes late: before its first step it takes over the counters of the others."""

    def __init__(self, **counters):
        super().__init__()
        self.counters = counters

    def step_function(self, name):
        function = super().step_function(name)

        def step(batch, batch_idx):
            if self.counters:
                fit = self.trainer.fit_loop
                fit.load_state_dict({**fit.state_dict(), **self.counters})
                self.counters = {}
                raise DataPositionChanged
            return function(batch, batch_idx)

        return step


@pytest.mark.parametrize(
    ("epoch", "batches_done", "seen"),
    [(0, 3, [3, 4, 5, *range(6)]), (1, 4, [4, 5]), (1, 0, range(6)), (0, 6, range(6)), (0, 9, range(6)), (2, 0, [])],
)
def test_strategy_repositions_data(epoch, batches_done, seen):
    """A strategy may continue elsewhere in the data."""
    data = torch.utils.data.DataLoader(Indices(6), batch_size=1, shuffle=True, generator=torch.Generator())
    order = [[int(batch) for batch in epoch] for epoch in (data, data)]
    data.generator.manual_seed(torch.Generator().initial_seed())
    model = Collecting()
    strategy = Follower(epoch=epoch, batches_done=batches_done, global_step=epoch * 6 + batches_done)
    trainer = make(strategy=strategy, max_epochs=2)
    trainer.fit(model, data)
    assert model.indices == list(seen)
    # an epoch in whose midst it began is in this process's own order, and no batch is drawn twice or left out
    first = order[0][batches_done:] if epoch < 2 and 0 < batches_done < 6 else []
    assert model.items[: len(first)] == first
    assert trainer.global_step == epoch * 6 + batches_done + len(seen)


class Indices(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Collecting(Net):
    def __init__(self):
        super().__init__()
        self.indices, self.items = [], []

    def training_step(self, batch, batch_idx):
        self.indices.append(batch_idx)
        self.items.append(int(batch))
        return self.layer.weight.square().sum()


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


class Iterating(Compiled):
    """As an IPU that runs several steps in one call: its batches are several."""

    features = frozenset({"owns_backward", "owns_accumulation"})
    steps_per_batch = 3

    def optimizer_step(self, optimizer, closure=None):
        return self.steps_per_batch


def test_a_batch_may_be_several_steps():
    class Planning(Net):
        def configure_optimizers(self):
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    torch.manual_seed(0)
    model = Planning()
    trainer = make(strategy=Iterating(), max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(model, batches())
    assert trainer.global_step == model.planned == 36


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
        self.seen = (self.accelerator.name, self.precision.alias, self.trainer is trainer)


def test_setup_override_without_super():
    """The Trainer does what an override of setup leaves out."""
    strategy = Bare()
    _, model = fit(strategy)
    assert strategy.seen == (hardware.name(), "32-true", True)
    assert strategy.trainer is None, "the run is over"
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


@pytest.mark.one_accelerator  # others may have no sparse tensors
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
        make(max_epochs=2, gradient_clip_val=0.05).fit(model, data)
        models.append(model)
    for (name, a), (_, b) in zip(models[0].state_dict().items(), models[1].state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_step_marker_calls(monkeypatch, strategy):
    """After each backward, after each update, after each step without training: nowhere else, and no more after the
    run. A strategy of several tells it first which rank this is."""
    cls, events = type(hardware.accelerator()), []
    monkeypatch.setattr(cls, "setup_process", lambda self, **ranks: events.append(ranks))
    monkeypatch.setattr(cls, "step_marker", lambda self: lambda: events.append("mark"))

    class Noting(Net):
        def training_step(self, batch, batch_idx):
            events.append("train")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            events.append("validate")

        def on_before_optimizer_step(self, optimizer):
            events.append("update")

    trainer = Trainer(
        accelerator=hardware.name(), devices=1, strategy=strategy, max_epochs=1, accumulate_grad_batches=2,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(2)]
    trainer.fit(Noting(), batches, batches)
    ranks = [{"global_rank": 0, "local_rank": 0, "world_size": 1}] if strategy == "ddp" else []
    step = ["train", "mark", "train", "mark", "update", "mark"]
    assert events == [*ranks, *step, *["validate", "mark"] * 2]
    assert trainer.strategy.mark_step is None
