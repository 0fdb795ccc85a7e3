"""Test the model under a strategy: initial weights of the ranks, forward and hooks in a step, buffers, precision."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import hardware
import pytest
import torch
from regression import Regression, batches, close, plain, same_everywhere, sgd, train
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from world import compose, joined, rank, size

from torchhal.errors import (
    DistributedError,
    ModelError,
)
from torchhal.precision import MixedPrecision, Precision, TruePrecision
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal.strategies._forward_through import forward_through

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("accelerator")]


# -- models --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Every kind of tensor that a broadcast could get wrong."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 4, sparse=hardware.name() == "cpu")  # others may have no sparse tensors
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = nn.Parameter(torch.randn(11, 4))
        self.tied = nn.Linear(4, 11, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.odd = nn.Parameter(torch.randn(7, 13))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.normal_()
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.register_buffer("spread", torch.randn(1).expand(6))

    def training_step(self, batch, batch_idx):
        hidden = (
            self.norm(self.embed(batch)) * self.scale + self.turned.sum() + self.odd.mean() + self.narrow.sum().float()
        )
        return F.cross_entropy(self.head(hidden) + self.tied(hidden), batch) + self.spread.sum() * 0


# -- weights ---------------------------------------------------------------------------------------------------


def initial_weights():
    with joined(find_unused_parameters=True) as strategy:
        model, expected = Odd(seed=100 + rank()), Odd(seed=100)
        pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        strategy.connect(model)
        strategy.setup_model()
        assert isinstance(strategy.model, DistributedDataParallel) and strategy.module is model
        for (name, found), wanted in zip(
            [*model.named_parameters(), *model.named_buffers()],
            [*expected.parameters(), *expected.buffers()],
            strict=True,
        ):
            assert found.device == strategy.root_device and torch.equal(found.cpu(), wanted), name
        assert model.tied.weight is model.head.weight and not model.turned.is_contiguous()
        if hardware.name() == "cpu":
            assert pointers == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        # and it trains, the sparse gradient too
        dense = [p for n, p in model.named_parameters() if n != "embed.weight" and p.requires_grad]
        own = torch.optim.SparseAdam if model.embed.sparse else torch.optim.Adam
        strategy.setup_optimizers([torch.optim.SGD(dense, lr=0.1), own([model.embed.weight], lr=0.1)])
        step = strategy.step_function("training_step")
        for index in range(3):
            batch = strategy.batch_to_device(torch.tensor([rank(), 3, 3, 5 + index]))
            strategy.backward(step(batch, index))
            assert model.embed.weight.grad.is_sparse is model.embed.sparse
            for optimizer in strategy.optimizers:
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        same_everywhere(strategy, dict(model.named_parameters()))


def test_weights_broadcast_from_rank_0(world):
    """Every rank starts from the weights of rank 0.

    Parameters and buffers, tied, frozen, 0-dim, strided, expanded, of several dtypes.

    Checks: STR-13, STR-47.
    """
    world.run(initial_weights)


def unequal_models(kind):
    r = rank()
    model = Regression()
    if kind == "shape":
        model.body[2] = nn.Linear(8, 2 + r)
    elif kind == "name":
        setattr(model, f"extra{r}", nn.Linear(2, 2))
    elif kind == "more":
        model.extra = nn.Linear(2, 2) if r else nn.Identity()
    elif kind == "frozen":
        model.body[0].weight.requires_grad_(not r)
    elif kind == "buffer":
        model.register_buffer("cache", torch.zeros(2 + r), persistent=False)
    elif kind == "lazy":
        model.late = nn.LazyLinear(3)
    with joined() as strategy:
        strategy.connect(model)
        try:
            strategy.setup_model()
        except (DistributedError, ModelError):
            assert strategy.reduce(1, "sum") == size()
            raise


@pytest.mark.parametrize("kind", ["shape", "name", "more", "frozen", "buffer", "lazy"])
def test_unequal_models_fail_on_all_ranks(world2, kind):
    """Alone, torch mixes what doesn't match, or fails on one rank."""
    outcomes = world2.outcomes(unequal_models, kind)
    assert [o.error for o in outcomes] == ["ModelError" if kind == "lazy" else "DistributedError"] * 2, outcomes
    assert outcomes[0].message == outcomes[1].message
    texts = {"shape": "body.2.weight", "name": "extra1", "more": "nothing in its place", "frozen": "body.0.weight",
             "buffer": "cache", "lazy": "'late.weight'"}  # fmt: skip
    assert texts[kind] in outcomes[0].message


def test_meta_model_refused():
    """A model on the meta device is refused.

    Moving it would be an error of torch's, filling it would train garbage.

    Checks: STR-41.
    """
    with torch.device("meta"):
        model = Regression()
    strategy = compose(SingleDeviceStrategy())
    strategy.connect(model)
    with pytest.raises(ModelError, match=r"'body.0.weight', 'body.0.bias', .* and others of Regression .* meta"):
        strategy.setup_model()


def nothing_to_train():
    with joined() as strategy:
        for model in (Regression().requires_grad_(False), nn.Identity(), nn.BatchNorm1d(3, affine=False)):
            strategy.connect(model)
            strategy.setup_model()
            assert strategy.model is strategy.module is model
            with strategy.no_backward_sync():  # which pauses once something is unfrozen and wrapped
                assert strategy.model is model and "require_backward_grad_sync" not in vars(model)
        strategy.connect(model)
        strategy.setup_model(training=False)
        assert strategy.model is model


def test_nothing_to_train_is_not_wrapped(world2):
    """A model without trained parameters is not wrapped.

    Checks: STR-41.
    """
    world2.run(nothing_to_train)


# -- the module's own face ---------------------------------------------------------------------------------------


class Curious(Regression):
    """Looks at itself while it is called through a wrapper."""

    def forward(self, x):
        assert self.training_step.__func__ is Curious.training_step
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        assert "forward" not in self.__dict__
        first, second = self(batch[0]), self.forward(batch[0])
        assert torch.equal(first, second)
        return F.mse_loss(first, batch[1])


def own_face():
    data = batches(2, 2, size())
    with joined() as strategy:
        model = Curious()
        names = list(model.state_dict())
        train(strategy, model, sgd, data)
        assert list(strategy.module_state_dict()) == names  # no "module."
        assert model.forward.__func__ is Curious.forward
        other = Curious(seed=5)
        strategy.load_module_state_dict(other.state_dict())
        assert torch.equal(model.body[0].weight.cpu(), other.body[0].weight)

        def failing(batch, batch_idx):
            raise ValueError("boom")

        model.training_step = failing
        step = strategy.step_function("training_step")
        for _ in range(2):
            try:
                step((torch.ones(2, 6), None), 0)
            except ValueError as error:
                assert str(error) == "boom"
            else:
                raise AssertionError("no error")
            assert "forward" not in model.__dict__
        # a forward that the user set on the object stays the user's
        model.__dict__["forward"] = mine = model.body.forward
        del model.__dict__["training_step"]
        model.training_step = lambda batch, batch_idx: F.mse_loss(model(batch[0]), batch[1])
        batch = strategy.batch_to_device((torch.ones(2, 6), torch.ones(2, 2)))
        strategy.step_function("training_step")(batch, 0)
        assert model.__dict__["forward"] is mine


def test_the_module_is_itself_inside_the_step(world2):
    """The module is itself inside the step.

    Checks: STR-21.
    """
    world2.run(own_face)


class Wrapper(nn.Module):
    """Hooks the module that it wraps, as torch's wrapper does for its mixed precision."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, []
        self.handle = module.register_forward_pre_hook(self.before)

    def before(self, module, inputs):
        self.calls.append(len(inputs))

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize("global_hooks", [False, True])
def test_hooks_run_in_own_forward(global_hooks):
    """The wrapper's belong to its call, which runs the step."""
    seen = []

    def training_step(batch, batch_idx):
        seen.append("step")
        late = model.register_forward_hook(lambda module, inputs, output: seen.append("late"))
        output = model(batch)
        late.remove()
        if batch_idx == 1:
            raise ValueError("boom")
        return output

    class Line(nn.Linear):
        pass

    model = Line(2, 1)
    handles = [
        model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)) or (inputs[0] * 0,)),
        model.register_forward_hook(lambda module, inputs, output: seen.append("after") or output + 1),
        model.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward")),
    ]
    wrapper = Wrapper(model)
    step = forward_through(SimpleNamespace(model=wrapper), model, training_step)
    if global_hooks:
        handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))
    expected = ["step", 1, "after", "late"]
    output = step(torch.ones(3, 2), 0)
    assert seen == expected and wrapper.calls == [2, 1]
    assert torch.equal(output, (model.bias + 1).expand(3, 1))
    output.sum().backward()
    assert seen == [*expected, "backward"]
    with pytest.raises(ValueError, match="boom"):
        step(torch.ones(3, 2), 1)
    assert seen[5:] == expected and "forward" not in vars(model)
    for handle in (*handles, wrapper.handle):
        handle.remove()
    assert not any(vars(model)[name] for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"))


def batch_norm():
    r = rank()
    with joined() as strategy:
        torch.manual_seed(r)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        model.training_step = lambda batch, batch_idx: model(batch).sum()
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        model.register_buffer("grown", torch.zeros(2))
        strategy.connect(model)
        strategy.setup_model()
        batch = strategy.batch_to_device(torch.randn(8, 4) + 10 * r)
        strategy.backward(strategy.step_function("training_step")(batch, 0))
        mine = model[0].running_mean.clone()
        first, second = strategy.all_gather(mine)[:2]
        assert not torch.equal(first, second)  # each rank's own data
        model.scratch = torch.zeros(3 + r)  # a cache grows with what a rank has seen
        model.grown = torch.zeros(3 + r)
        state = strategy.module_state_dict()
        assert torch.equal(state["0.running_mean"], strategy.all_gather(mine)[0])
        assert "scratch" not in state and state["grown"].shape == (3 + r,)
        assert torch.equal(model[0].running_mean, mine)  # saving changes nothing
        assert state["1.weight"].data_ptr() == model[1].weight.data_ptr()  # and copies no weights


def test_buffers_are_saved_from_rank_0(world):
    """A batch norm's statistics differ between ranks after a step."""
    world.run(batch_norm)


# -- precision ---------------------------------------------------------------------------------------------------

WATCHED = {
    "setup", "convert_module", "convert_input", "convert_output", "forward_context", "backward", "unscale_gradients",
    "clip_gradients", "optimizer_step", "check_optimizer", "teardown",
}  # fmt: skip


class Spy(Precision):
    """Writes down what it is asked for."""

    alias = "spy"

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in WATCHED:
            self.calls.append(name)
        return super().__getattribute__(name)

    def convert_input(self, batch):
        return tuple(part * 1 for part in batch)

    def convert_output(self, output):
        return output

    def forward_context(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("cls", [SingleDeviceStrategy, DDPStrategy])
def test_the_given_precision_is_called(cls, monkeypatch):
    """The strategy calls the given precision.

    Checks: STR-36.
    """
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    spy = Spy()
    strategy = compose(cls(), precision=spy)
    assert strategy.precision_plugin is strategy.precision is spy
    strategy.setup_environment()
    spy.calls.clear()
    train(strategy, Regression(), sgd, batches(1, 4, 1), clip=1.0)
    strategy.teardown()
    seen = list(dict.fromkeys(spy.calls))
    assert WATCHED - {"setup"} <= set(seen), seen
    assert seen.index("convert_module") < seen.index("backward") < seen.index("optimizer_step") < seen.index("teardown")


def half_precision():
    n, r = size(), rank()
    data = batches(5, 4, n)
    reference = Regression()
    optimizer = sgd(reference.parameters())
    for batch in zip(*data, strict=True):
        with torch.autocast(hardware.name(), torch.bfloat16):
            loss = reference.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy = compose(DDPStrategy(), precision=MixedPrecision("bfloat16"))
    strategy.setup_environment()
    try:
        model = Regression(seed=r)
        train(strategy, model, sgd, data)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert found.dtype is torch.float32
            close(found, wanted, 5e-3)
        same_everywhere(strategy, dict(model.named_parameters()))
        strategy.teardown()
        strategy = compose(DDPStrategy(), precision=TruePrecision("float64"))
        strategy.setup_environment()
        reference, model = Regression().double(), Regression(seed=r)
        plain(reference, sgd(reference.parameters()), [part.double() for part in data])
        train(strategy, model, sgd, data)
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            close(found, wanted, 1e-12)
    finally:
        strategy.teardown()


def test_other_precisions_under_ddp(world2):
    """Other precisions work under ddp.

    Checks: STR-36.
    """
    world2.run(half_precision)


# -- without a Trainer -------------------------------------------------------------------------------------------


def test_connected_wrapper_stays(world2):
    """A wrapper that a precision has connected stays when parameters are idle."""
    world2.run(idle_when_connected)


def idle_when_connected():
    with joined(find_unused_parameters=True) as strategy:
        strategy.connect(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        strategy.setup_model()
        wrapper, strategy.model_is_connected = strategy.model, True
        strategy.module[0].requires_grad_(False)
        for _ in range(3):
            strategy.on_train_epoch_start()
        assert strategy.model is wrapper
