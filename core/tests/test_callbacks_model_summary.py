"""ModelSummary and RichSummary: layers, shapes that a forward finds, and the memory of a rank."""

from __future__ import annotations

import random
import re
import sys
import threading

import numpy
import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchhal import Callback, Module, Trainer
from torchhal.trainer.callbacks import ModelSummary, RichSummary, summarize

pytest.importorskip("rich")

BATCHES = [torch.ones(4, 2)] * 3
BOTH = pytest.mark.parametrize("kind", [ModelSummary, RichSummary])


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Shaped(Net):
    """A model with an example input, whose forward changes all that a forward can change."""

    def __init__(self, example=None):
        super().__init__()
        self.example_input_array = torch.zeros(4, 2) if example is None else example
        self.calls = 0
        self.twice = nn.Linear(2, 2)
        self.norm, self.dropout, self.unused = nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.inputs, self.cache = [], {"rows": [[]]}

    def forward(self, x, scale=None):
        self.calls += 1
        self.inputs.append(x.shape)
        self.cache["rows"][0].append(x)
        if len(self.inputs) == 1:  # as ActNorm and others do
            self.shift.copy_(x.mean(0) + 1)
        self.seen += 1
        self.latest = x
        random.random(), numpy.random.rand(), torch.rand(1)
        return self.layer(self.norm(self.dropout(self.twice(self.twice(x[:1]).expand_as(x)))))


def printed(capsys, model, kind=ModelSummary, **options):
    """Return the lines of the summary of a fit."""
    max_depth = options.pop("max_depth", 1)
    make(kind(max_depth), **options).fit(model, BATCHES)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def row(lines, name):
    return next(re.split(r"\s{2,}", line.strip()) for line in lines if line.startswith(name))


@BOTH
def test_rows(capsys, kind):
    model = Shaped()
    model.norm.weight.requires_grad_(False)
    model.unused.requires_grad_(False)
    lines = printed(capsys, model, kind)
    assert row(lines, "name") == ["name", "type", "parameters", "size", "trained", "input", "output"]
    assert row(lines, "layer") == ["layer", "Linear", "3", "12 bytes", "trainable", "[4, 2]", "[4, 1]"]
    assert row(lines, "norm")[3:5] == ["16 bytes", "partly"]
    assert row(lines, "unused") == ["unused", "Linear", "2", "8 bytes", "frozen", "?", "?"]
    assert row(lines, "dropout")[1:4] == ["Dropout", "0", "0 bytes"]
    assert row(lines, "twice")[-2:] == ["[1, 2]", "[1, 2]"], "the first call's"
    assert "11 trainable parameters, 6 frozen, 68 bytes" in lines


@pytest.mark.parametrize(
    ("example", "input"),
    [
        (torch.zeros(4, 2), "[4, 2]"),
        ((torch.zeros(3, 2), torch.ones(3)), "[3, 2]"),
        ({"x": torch.zeros(5, 2)}, "[5, 2]"),
    ],
)
def test_forms_of_the_example(example, input):
    assert row(summarize(Shaped(example)).splitlines(), "norm")[-1] == input


def test_shapes_of_containers():
    class Pairs(nn.Module):
        def forward(self, pair, name):
            return {"sum": pair[0]}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = Pairs()
            self.example_input_array = torch.zeros(2, 3)

        def forward(self, x):
            return self.pairs([x, x[0]], name="a")["sum"]

    assert row(summarize(Outer()).splitlines(), "pairs")[-2:] == ["[[[2, 3], [3]], ?]", "?"]


def test_a_forward_leaves_all_as_it_was():
    model = Shaped()
    model.norm.eval()
    hooked = []
    model.layer.register_forward_hook(lambda *_: hooked.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [set(vars(part)) for part in model.modules()]
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert "[4, 2]" in summarize(model)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert names == [set(vars(part)) for part in model.modules()] and model.calls == 0
    assert model.training and not model.norm.training and len(model.layer._forward_hooks) == 1
    assert not hooked and not model.inputs and model.cache == {"rows": [[]]}
    assert not any(part._forward_hooks for part in model.modules() if part is not model.layer)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_compiled():
    def compiles(graph, inputs):
        raise AssertionError

    model = Shaped()
    model.compile(backend=compiles)
    model.layer = torch.compile(model.layer, backend=compiles)
    lines = summarize(model, -1).splitlines()
    assert row(lines, "layer._orig_mod")[-2:] == row(lines, "layer ")[-2:] == ["[4, 2]", "[4, 1]"]
    assert model._compiled_call_impl is not None


def test_values_that_a_forward_asks_for():
    class Asks(Net):
        example_input_array = torch.ones(4, 2)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    assert "shapes of the layers: unknown, as forward(example_input_array) raised" in summarize(Asks())


def test_parts_that_are_compiled_shared_and_bound():
    class Bound(Net):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.ones(4, 2)
            self.parts = [self.layer]
            self.apply_layer = self._apply_layer
            self.scale = torch.ones(1)

        def _apply_layer(self, x):
            return self.parts[0](x * self.scale) + torch.zeros(4, 1) + torch.ones(4, 1, device=self.device)

        def forward(self, x):
            return self.apply_layer(x)

    assert row(summarize(Bound()).splitlines(), "layer")[-2:] == ["[4, 2]", "[4, 1]"]


def test_the_forward_costs_no_computation():
    class Large(Net):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.zeros(1, 2).expand(10**12, 2)

    assert row(summarize(Large()).splitlines(), "layer")[-1] == "[1000000000000, 1]"


def test_a_fit_trains_the_same_with_and_without():
    weights = []
    for callbacks in ([], [ModelSummary(-1)]):
        torch.manual_seed(0)
        model = Shaped()
        make(*callbacks, max_epochs=2).fit(model, BATCHES)
        weights.append(torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_a_forward_that_fails(capsys):
    lines = printed(capsys, Shaped(torch.zeros(4, 7)))
    (said,) = [line for line in lines if line.startswith("shapes")]
    assert said.startswith("shapes of the layers: unknown, as forward(example_input_array) raised RuntimeError: ")
    assert row(lines, "name")[-1] == "trained" and row(lines, "layer")[0] == "layer"


def test_a_module_without_forward():
    model = nn.ModuleDict({"a": nn.Linear(1, 1)})
    model.example_input_array = torch.zeros(1)
    assert "raised NotImplementedError" in summarize(model)


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    lines = summarize(model).splitlines()
    assert row(lines, "1") == ["1", "Linear", "9", "36 bytes", "trainable"]
    assert lines[-1] == "9 trainable parameters, 0 frozen, 36 bytes"


def test_lazy_parameters():
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(1)
            self.example_input_array = torch.zeros(1, 2)

    lines = summarize(Lazy()).splitlines()
    assert row(lines, "layer")[2] == "?"
    assert lines[-1] == "shapes of the layers: unknown, as parameters have no shape until the first batch"


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = Shaped()
    model.example_input_array = torch.zeros(4, 2)
    lines = summarize(model).splitlines()
    assert row(lines, "norm")[-1] == "[4, 2]" and lines[-1].endswith("68 bytes")


def memory(lines):
    start = next(index for index, line in enumerate(lines) if line.startswith("memory"))
    return " ".join(lines[start:])


class Optimized(Net):
    def __init__(self, make_optimizer):
        super().__init__()
        self.make_optimizer = make_optimizer

    def configure_optimizers(self):
        return self.make_optimizer(self)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "48 bytes   weights 12 bytes, gradients 12 bytes, "),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "24 bytes   weights 12 bytes, gradients 12 bytes"),
        (lambda model: torch.optim.RMSprop(model.parameters()), "gradients 12 bytes, optimizer state 12 bytes"),
        (lambda model: None, "24 bytes   weights 12 bytes, gradients 12 bytes"),
    ],
)
def test_memory_of_one_rank(capsys, optimizer, said):
    text = memory(printed(capsys, Optimized(optimizer)))
    assert "memory of 1 rank (estimate for single_device, without activations)" in text and said in text


def test_memory_in_the_runs_precision(capsys):
    assert "weights 6 bytes" in memory(printed(capsys, Net(), precision="bf16-true"))


def test_memory_of_what_other_callbacks_freeze(capsys):
    class Freezes(Callback):
        def setup(self, trainer, module, stage):
            module.layer.bias.requires_grad_(False)

    make(Freezes(), ModelSummary()).fit(Net(), BATCHES)
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, "layer")[4] == "partly" and "gradients 8 bytes" in memory(lines)


def test_the_estimate_runs_nothing_of_the_users(capsys):
    """The optimizer is made once, and neither it nor a hook of all optimizers knows of the copy's step."""
    steps, made = [], []

    def optimizer(model):
        made.append(torch.optim.Adam(model.parameters()))
        made[0].register_step_post_hook(lambda *_: steps.append("own"))
        return made[0]

    class Looks(Callback):
        def on_train_start(self, trainer, module):
            assert steps == [] and len(made) == 1 and not made[0].state

    handle = register_optimizer_step_post_hook(lambda *_: steps.append("all"))
    try:
        make(ModelSummary(), Looks()).fit(Optimized(optimizer), BATCHES)
    finally:
        handle.remove()
    assert steps.count("own") == steps.count("all") == len(BATCHES)


def test_an_optimizer_that_can_not_be_copied(capsys):
    class Holds(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.lock = threading.Lock()

    lines = printed(capsys, Optimized(lambda model: Holds(model.parameters())))
    assert memory(lines).endswith("unknown, as TypeError: cannot pickle '_thread.lock' object")


def test_nothing_of_the_model_is_kept():
    class Refuses(Callback):
        def on_fit_start(self, trainer, module):
            raise RuntimeError("no")

    summary = ModelSummary()
    with pytest.raises(RuntimeError, match="no"):
        make(Refuses(), summary).fit(Shaped(), BATCHES)
    assert not any(isinstance(value, nn.Module) for value in vars(summary).values())


def test_depth(capsys):
    model = Net()
    model.layer = nn.Sequential(nn.Sequential(nn.Linear(2, 1)))
    assert "layer.0 " not in summarize(model) and "layer.0 " in summarize(model, 2)
    assert "layer.0.0 " not in summarize(model, 2) and "layer.0.0 " in summarize(model, -1)
    assert printed(capsys, model, max_depth=0) == []


def test_a_narrow_terminal(capsys, monkeypatch):
    """Where the table doesn't fit the shapes have a table of their own."""
    monkeypatch.setattr("torchhal.trainer.callbacks.summary.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = printed(capsys, Shaped())
    assert max(map(len, lines)) <= 60
    assert [line.split() for line in lines if line.startswith("norm")] == [
        ["norm", "BatchNorm1d", "4", "16", "bytes", "trainable"],
        ["norm", "[4,", "2]", "[4,", "2]"],
    ]


@BOTH
def test_every_rank_knows_one_prints(tmp_path, capfd, kind):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[kind()], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), 2))
    out = capfd.readouterr().out
    assert out.count("memory of each of 2 ranks (estimate for ddp_spawn") == 1 and "temporary 12 bytes" in out


def test_alias():
    trainer = Trainer(accelerator="cpu", callbacks=["rich_summary"], logger=False)
    assert [type(each) for each in trainer.callbacks if isinstance(each, ModelSummary)] == [RichSummary]


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ModuleNotFoundError, match=r"RichSummary needs the package rich.*pip install torchhal\[rich\]"):
        RichSummary()
