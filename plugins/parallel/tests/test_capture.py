"""A forward that a pipeline follows once stays the user's: what it reads may change, what it does once is refused."""

import random
from types import SimpleNamespace

import changing
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhal.errors import ModelError
from torchhal.trainer import rng
from torchhal_parallel.capture import Capture, around
from torchhal_parallel.cut import check_trained, cut, untrainable
from torchhal_parallel.rehearsal import drawn_between

pytestmark = pytest.mark.timeout(170)


class Layer(nn.Module):
    """Draws by itself, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 + 0.0 * random.random())


class Net(nn.Module):
    scale = 1.0

    def __init__(self, act=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.act = act
        self.beta, self.config, self.options, self.unread = 0.5, SimpleNamespace(depth=4), {"shift": 0}, 0
        self.seen, self.count, self.last, self.draws = [], 0, None, random.Random(0)
        self.table = torch.ones(4)
        self.register_buffer("mean", torch.zeros(4))

    @property
    def doubled(self):
        return 2 * self._half

    _half = 0.25

    def forward(self, x):
        for layer in self.layers[: self.config.depth]:
            x = layer(x) * self.beta + self.options["shift"] + self.doubled * self.scale
        if self.act is not None:
            x = self.act(self, x)
        return x * self.table


class Run:
    current_epoch = 0


def follow(module, trainer=None):
    capture = Capture(module, around(["layers.2"]), torch.device("cpu"), trainer)
    return lambda: capture({"x": torch.ones(4, 4)}, 4, {})


# -- what it draws and leaves --------------------------------------------------------------------------------


def dropped(module, x):
    return F.dropout(x + torch.rand(4) + torch.randn_like(x), 0.5, module.training)


def test_what_torch_draws_for_tensors_is_drawn_by_the_graph():
    module, generators = Net(dropped), rng.collect_host()
    graph = follow(module)().graph
    assert not drawn_between(generators, rng.collect_host()), "nor has what a layer draws for its shapes moved one"
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert any("bernoulli" in name or "dropout" in name for name in targets) and any("rand" in name for name in targets)
    assert module.layers[0].calls == 0


@pytest.mark.parametrize(
    "draw, word",
    [
        (lambda module, x: x if random.random() < 2 else -x, "(python)"),
        (lambda module, x: x * float(numpy.random.rand()), "(numpy)"),
        (lambda module, x: x * float(torch.manual_seed(1).initial_seed()), "(torch)"),
        (lambda module, x: x * module.draws.random(), "'draws'"),
        (lambda module, x: x if torch.rand(()).item() < 2 else -x, "branch on their values"),
    ],
    ids=["python", "numpy", "seed", "own", "item"],
)
def test_random_numbers_of_the_host_are_refused(draw, word):
    module, generators = Net(draw), rng.collect_host()
    with pytest.raises(ModelError) as error:
        follow(module)()
    assert word in str(error.value) and "Net" in str(error.value)
    assert not drawn_between(generators, rng.collect_host())


def assign(name, value):
    def act(module, x):
        setattr(module, name, value(module, x))
        return x

    return act


@pytest.mark.parametrize(
    "act, name",
    [
        (lambda module, x: module.seen.append(x) or x, "seen"),
        (lambda module, x: module.options.update(last=3) or x, "options"),
        (assign("count", lambda module, x: module.count + 1), "count"),
        (assign("last", lambda module, x: x), "last"),
        (assign("new", lambda module, x: x), "new"),
        (assign("mean", lambda module, x: 0.9 * module.mean + x.mean(0)), "mean"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attributes_that_it_changes_are_refused_and_put_back(act, name):
    module = Net(act)
    mean = module.mean
    with pytest.raises(ModelError, match=f"the forward of Net changes '{name}'"):
        follow(module)()
    assert module.seen == [] and module.options == {"shift": 0} and module.count == 0 and module.last is None
    assert "new" not in vars(module) and module.mean is mean


def test_what_it_sets_to_the_same_or_writes_in_place_is_not():
    def act(module, x):
        module.count, module.temporary = 0, 1
        del module.temporary
        module.mean.mul_(0.9).add_(x.mean(0).detach())
        return x

    follow(Net(act))()


# -- what it reads -------------------------------------------------------------------------------------------


def test_another_value_of_what_it_reads_is_noticed():
    trainer = Run()
    module = Net(lambda module, x: x * (1 + trainer.current_epoch) if module.training else x)
    again = follow(module, trainer)
    for change, name in (
        (lambda: setattr(module, "beta", 0.25), "beta"),
        (lambda: setattr(module.config, "depth", 3), "config"),
        (lambda: module.options.update(shift=1), "options"),
        (lambda: setattr(module, "_half", 0.5), "doubled"),
        (lambda: setattr(module, "table", torch.zeros(4)), "table"),
        (lambda: setattr(module, "scale", True), "scale"),
        (lambda: setattr(trainer, "current_epoch", 1), "trainer.current_epoch"),
        (module.eval, "training"),
        (module.layers[1].linear.train, None),
    ):
        reads = again().reads
        assert reads.differing() is None
        change()
        assert reads.differing() in ((name, "_half") if name == "doubled" else (name,))
    module.unread = 7
    module.layers[0].calls = 5
    module.table.mul_(2)
    assert reads.differing() is None, "of these the graph has no value"


def test_the_mode_of_a_layer_that_reads_it_is_noticed_and_followed():
    module = Net()
    module.layers[1] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    capture = Capture(module, around(["layers.2"]), torch.device("cpu"))
    one = {"x": torch.ones(1, 4)}
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        capture(one, 1, {})
    module.eval()
    reads = capture(one, 1, {}).reads
    assert reads.differing() is None
    module.layers[1].train()
    assert reads.differing() == "layers.1.1.training"


def test_tensors_that_a_forward_makes_are_no_part_of_the_model():
    module = Net(lambda module, x: x + torch.full((4,), 0.5))
    attributes = set(vars(module))
    stages = cut(module, ["layers.2"])
    assert set(vars(module)) == attributes
    assert [name for stage in stages for name in stage.modules if "constant" in name] == []


def test_a_tied_weight_is_known_by_each_of_its_names():
    module = nn.Sequential(Net(), Net())
    module[1].layers[3].linear.weight = module[0].layers[0].linear.weight
    stages = cut(module, ["1"])
    assert untrainable(module, stages[::-1]).keys() >= {"0.layers.0.linear.weight", "1.layers.3.linear.weight"}
    with pytest.raises(ModelError, match="is used in the stages 0, 1"):
        check_trained(module, untrainable(module, stages[::-1]))


# -- in stages -----------------------------------------------------------------------------------------------


def test_what_changes_by_epochs_is_trained_as_in_a_plain_loop(world2):
    expected, val_loss = changing.warmed_in_a_plain_loop()
    results = world2.run(changing.warmed, timeout=60)
    assert results[0][0].keys() == expected.keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    for _, ours in results:
        assert ours == pytest.approx(val_loss, rel=1e-4)


def test_ranks_that_would_follow_other_numbers_are_refused(world2):
    for kind, message, steps in world2.run(changing.noted, "WarmsInTheStep", timeout=60):
        assert (kind, steps) == ("ModelError", 0), message
        assert "'beta', which is 0.0 on one rank" in message and "on_train_batch_start" in message


def test_what_changes_in_each_batch_is_told_of_once(world2):
    first, last = world2.run(changing.noted, "ReadsTheStep", timeout=60)
    assert len(first) == 1 and "global_step', which is another in each batch" in first[0] and last == []


def test_dropout_and_batch_norm_follow_the_mode_of_evaluation(world2):
    expected = changing.validated_in_a_plain_loop()
    for ours in world2.run(changing.validated, timeout=60):
        assert ours == pytest.approx(expected, rel=1e-5)
