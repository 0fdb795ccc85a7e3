"""The Trainer computes what a plain PyTorch loop computes: bit for bit on one device."""

import copy

import hardware
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer
from torchhal.errors import UnsupportedCombinationError

pytestmark = pytest.mark.usefixtures("accelerator")


class Net(Module):
    """Convolution, batch norm and dropout: buffers and random numbers in the forward pass."""

    def __init__(self, optimizer="adam", scheduler=None):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 3)
        )
        self.optimizer_name = optimizer
        self.scheduler_name = scheduler
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.body(x), y))

    def make_optimizer(self):
        if self.optimizer_name == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        if self.scheduler_name is None:
            return optimizer
        interval = "step" if self.scheduler_name == "step" else "epoch"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if interval == "step" else 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def dataset(n=37):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def plain(model, loader, epochs, **options):
    """The loop anybody would write, on the device of the test; the model comes back to the CPU."""
    model.to(hardware.device())
    plain_steps(model, loader, epochs, **options)
    model.cpu()


def plain_steps(model, loader, epochs, *, accumulate=1, clip=None, algorithm="norm", max_steps=None):
    optimizer = model.make_optimizer()
    scheduler = None
    if model.scheduler_name is not None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if model.scheduler_name == "step" else 1, gamma=0.5)
    model.train()
    steps = 0
    for _ in range(epochs):
        pending = 0
        total = len(loader)
        for index, batch in enumerate(loader):
            if pending == 0:
                optimizer.zero_grad()
            loss = model.training_step(hardware.to_device(batch), index)
            (loss / accumulate).backward()
            pending += 1
            if pending == accumulate or index + 1 == total:
                if clip is not None and algorithm == "norm":
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                elif clip is not None:
                    nn.utils.clip_grad_value_(model.parameters(), clip)
                optimizer.step()
                pending = 0
                steps += 1
                if model.scheduler_name == "step":
                    scheduler.step()
                if steps == max_steps:
                    return
        if model.scheduler_name == "epoch":
            scheduler.step()


def trainer(**options):
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**defaults, **options})


def assert_same(one, other):
    assert len(one.losses) == len(other.losses)
    for index, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)):
        assert torch.equal(a, b), f"loss {index} differs: {a} and {b}"
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), f"{name} differs"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"clip": 0.1},
        {"clip": 0.01, "algorithm": "value"},
        {"accumulate": 2, "clip": 0.1},
        {"max_steps": 7},
        {"max_steps": 5, "accumulate": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("optimizer", "scheduler"), [("adam", None), ("sgd", "step"), ("adam", "epoch")])
def test_equals_a_plain_loop(optimizer, scheduler, options):
    torch.manual_seed(0)
    mine = Net(optimizer, scheduler)
    theirs = copy.deepcopy(mine)
    data = dataset()
    torch.manual_seed(1)
    plain(theirs, DataLoader(data, 5, shuffle=True), 3, **options)
    torch.manual_seed(1)
    t = trainer(
        max_epochs=3,
        accumulate_grad_batches=options.get("accumulate", 1),
        gradient_clip_val=options.get("clip"),
        gradient_clip_algorithm=options.get("algorithm"),
        max_steps=options.get("max_steps", -1),
    )
    t.fit(mine, DataLoader(data, 5, shuffle=True))
    assert_same(mine, theirs)


def test_loader_generator_draws_as_in_loop():
    """A loader with its own generator is exhausted as by a for loop."""
    # such a loader draws once more when its iterator ends: from the second epoch on the order would differ
    batches = []

    class Record(Net):
        def training_step(self, batch, batch_idx):
            batches.append(batch[1])
            return super().training_step(batch, batch_idx)

    def orders(run):
        batches.clear()
        run(DataLoader(dataset(), 5, shuffle=True, generator=torch.Generator().manual_seed(3)))
        return torch.cat(batches)

    by_hand = orders(lambda loader: plain(Record(), loader, 3))
    by_trainer = orders(lambda loader: trainer(max_epochs=3).fit(Record(), loader))
    assert torch.equal(by_hand, by_trainer)


def test_validation_and_the_sanity_check_leave_training_alone():
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine)
    data = dataset()
    torch.manual_seed(1)
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(theirs, DataLoader(data, 5))
    torch.manual_seed(1)
    trainer(max_epochs=2).fit(mine, DataLoader(data, 5), DataLoader(data, 5))
    # validation makes an iterator, which draws a seed: only the losses of the first epoch are comparable
    assert all(torch.equal(a, b) for a, b in zip(mine.losses[:8], theirs.losses[:8], strict=True))


def test_the_sanity_check_restores_the_random_state():
    data = dataset()

    def first_loss(steps):
        torch.manual_seed(0)
        model = Net()
        trainer(max_steps=1, num_sanity_val_steps=steps).fit(
            model, DataLoader(data, 5, shuffle=True), DataLoader(data, 5)
        )
        return model.losses[0]

    assert torch.equal(first_loss(0), first_loss(2))


def test_validation_restores_the_mode_of_each_submodule():
    modes = []

    class Spy(Net):
        def on_train_start(self):
            self.body[1].eval()  # a frozen batch norm stays one

        def on_train_batch_start(self, batch, batch_idx):
            modes.append((self.training, self.body[1].training))

    trainer(max_epochs=2, val_check_interval=2).fit(Spy(), DataLoader(dataset(), 5), DataLoader(dataset(), 5))
    assert len(modes) == 16
    assert set(modes) == {(True, False)}


class TwoOptimizers(Module):
    """A tiny adversarial pair: manual optimization, two optimizers, accumulated by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.maker = nn.Linear(4, 4)
        self.judge = nn.Linear(4, 1)

    def losses_of(self, x):
        made = self.maker(x)
        return F.softplus(-self.judge(made)).mean(), lambda: F.softplus(self.judge(made.detach())).mean()

    def training_step(self, batch, batch_idx):
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        first, second = self.losses_of(batch)
        maker.zero_grad()
        self.manual_backward(first)
        maker.step()
        self.untoggle_optimizer(maker)
        judge.zero_grad()
        self.manual_backward(second())
        judge.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.maker.parameters(), 0.1), torch.optim.Adam(self.judge.parameters(), 0.01)]


def test_two_optimizers_by_hand_equal_a_plain_loop():
    torch.manual_seed(0)
    mine = TwoOptimizers()
    theirs = copy.deepcopy(mine)
    batches = [torch.randn(8, 4) for _ in range(10)]
    maker, judge = theirs.configure_optimizers()
    for batch in batches:
        first, second = theirs.losses_of(batch)
        maker.zero_grad()
        first.backward()
        maker.step()
        judge.zero_grad()
        second().backward()
        judge.step()
    t = trainer(max_epochs=1)
    t.fit(mine, batches)
    assert t.global_step == 20  # one for each step of each optimizer
    for (name, a), (_, b) in zip(mine.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


class Quadratic(Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, -2.0]))

    def training_step(self, batch, batch_idx):
        return ((self.w - batch) ** 2).sum() + (self.w**4).sum() * 0.1

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def test_an_optimizer_that_needs_a_closure():
    mine, theirs = Quadratic(), Quadratic()
    batch = torch.tensor([1.0, 1.0])
    optimizer = theirs.configure_optimizers()

    def closure():
        optimizer.zero_grad()
        loss = theirs.training_step(batch, 0)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    trainer(max_epochs=3).fit(mine, [batch])
    assert torch.equal(mine.w, theirs.w)


def test_a_model_may_override_optimizer_step():
    calls = []

    class Own(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            calls.append((epoch, batch_idx))
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    torch.manual_seed(0)
    mine = Own()
    torch.manual_seed(0)
    theirs = Net()
    torch.manual_seed(1)
    trainer(max_epochs=1, gradient_clip_val=0.1).fit(mine, DataLoader(dataset(), 5))
    torch.manual_seed(1)
    plain(theirs, DataLoader(dataset(), 5), 1, clip=0.1)
    assert_same(mine, theirs)
    assert calls == [(0, index) for index in range(8)]


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_other_precisions_learn(precision):
    if precision not in hardware.accelerator().precisions:
        with pytest.raises(UnsupportedCombinationError, match=f"precision '{precision}' needs .*, which accelerator"):
            trainer(precision=precision)
        return
    torch.manual_seed(0)
    data = dataset(60)
    model = Net()
    trainer(max_epochs=8, precision=precision).fit(model, DataLoader(data, 20))
    assert model.losses[-1] < model.losses[0]


def test_double_precision_to_the_last_digit():
    """A third of a loss in float64 isn't that of one in float32."""
    if "64-true" not in hardware.accelerator().precisions:
        pytest.skip("the device has no float64")
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine).double()
    torch.manual_seed(1)  # of the dropout
    trainer(max_epochs=2, precision="64-true", accumulate_grad_batches=3).fit(mine, DataLoader(dataset(), 5))
    torch.manual_seed(1)
    x, y = dataset().tensors
    plain(theirs, DataLoader(TensorDataset(x.double(), y), 5), 2, accumulate=3)
    assert_same(mine, theirs)


def test_tied_frozen_unused_and_scalar_parameters():
    class Odd(Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Linear(5, 5)
            self.frozen.requires_grad_(False)
            self.unused = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def training_step(self, batch, batch_idx):
            hidden = self.frozen(self.embed(batch)) * self.scale
            return F.cross_entropy(self.head(hidden), batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    mine = Odd()
    theirs = copy.deepcopy(mine)
    batches = [torch.randint(0, 7, (6,)) for _ in range(12)]
    optimizer = theirs.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        theirs.training_step(batch, 0).backward()
        optimizer.step()
    trainer(max_epochs=1).fit(mine, batches)
    assert mine.head.weight is mine.embed.weight
    for (name, a), (_, b) in zip(mine.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_parameters_stay_the_objects_they_are():
    """On the way to the device and back: whoever holds one, as an optimizer made early does, holds the model's."""
    seen = []

    class Early(Net):
        def __init__(self):
            super().__init__()
            self.listed = list(self.parameters())
            self.optimizer = self.make_optimizer()

        def configure_optimizers(self):
            return self.optimizer

        def on_train_batch_end(self, *args):
            seen.append({parameter.device for parameter in self.listed})

    mine = Early()
    before = {name: (parameter, parameter.clone()) for name, parameter in mine.named_parameters()}
    mine.body[0].weight.grad = torch.ones_like(mine.body[0].weight)
    trainer(max_epochs=1).fit(mine, DataLoader(dataset(), 5))
    assert seen == [{hardware.device()}] * 8
    for name, parameter in mine.named_parameters():
        was, value = before[name]
        assert parameter is was and parameter.is_cpu and parameter.grad.is_cpu, name
        assert not torch.equal(parameter, value), name
