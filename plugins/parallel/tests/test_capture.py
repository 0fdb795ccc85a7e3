"""A forward that a pipeline follows once stays the user's: what it reads may change, what it does once is refused."""

import random
import re
from types import SimpleNamespace

import changing
import numpy
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchhal import rng
from torchhal.errors import ModelError
from torchhal_parallel._fake_modules import modules_around
from torchhal_parallel._graph_capture import GraphCapture
from torchhal_parallel._pipeline_split import check_trained, shared_or_unused_parameters, split_into_stages

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
    capture = GraphCapture(module, modules_around(["layers.2"]), torch.device("cpu"), trainer)
    return lambda: capture({"x": torch.ones(4, 4)}, 4, {})


# -- what it draws and leaves --------------------------------------------------------------------------------


def dropped(module, x):
    return F.dropout(x + torch.rand(4) + torch.randn_like(x), 0.5, module.training)


def test_graph_draws_random_tensors():
    """What torch draws for tensors is drawn by the graph."""
    module, generators = Net(dropped), rng.collect_host()
    graph = follow(module)().graph
    assert not rng.drawn_between(generators, rng.collect_host()), "nor has what a layer draws for its shapes moved one"
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
    assert not rng.drawn_between(generators, rng.collect_host())


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


def test_unchanged_attributes_are_allowed():
    """What it sets to the same or writes in place is not."""

    def act(module, x):
        module.count, module.temporary = 0, 1
        del module.temporary
        module.mean.mul_(0.9).add_(x.mean(0).detach())
        return x

    follow(Net(act))()


# -- what it tells autograd ----------------------------------------------------------------------------------


class Signs(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.sign() * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


class Doubled(torch.autograd.Function):
    """In place, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def gradient_of_a_sum(module, x):
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return gradient + torch.func.vmap(lambda row: row * row.sum())(x)


def with_parts_without_gradients(module, x):
    with torch.no_grad():
        aside = Signs.apply(x * 3, 2.0)
        with torch.enable_grad():
            more = x * 2
    return aside + more + module.layers[0](x.detach().requires_grad_()).detach()


def checkpointed(use_reentrant):
    def act(module, x):
        again = checkpoint(module.layers[3], x, use_reentrant=use_reentrant)
        return checkpoint(lambda value: module.layers[3](value).sin(), again, use_reentrant=use_reentrant)

    return act


def out_of_autocast(module, x):
    with torch.autocast("cpu", enabled=False):
        return x.float() @ torch.full((4, 4), 1 / 3)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "act",
    [
        lambda module, x: Signs.apply(x, 0.5) * x,
        lambda module, x: Doubled.apply(x * 1),
        checkpointed(True),
        checkpointed(False),
        gradient_of_a_sum,
        with_parts_without_gradients,
        out_of_autocast,
    ],
    ids=["function", "in_place", "reentrant", "checkpoint", "grad", "no_grad", "out_of_autocast"],
)
def test_the_graph_gives_the_gradients_of_the_forward(act, autocast):
    torch.manual_seed(0)
    module, x = Net(act), torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        captured = GraphCapture(module, modules_around(["layers.2"]), torch.device("cpu"))({"x": x}, 4, {})
        for name, tensor in captured.constants.items():
            setattr(module, name, tensor)
        results = module(x), fx.GraphModule(module, captured.graph)(x)[0]
    gradients = []
    for result in results:
        module.zero_grad()
        (result * x).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(results[1], results[0])
    rounding = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}  # of a weight that is used several times
    torch.testing.assert_close(gradients[1], gradients[0], **rounding)
    assert captured.recomputes == (act.__name__ == "act")


def with_a_hook_on_a_node(module, x):
    (x * 2).grad_fn.register_hook(lambda inputs, outputs: None)
    return x


def with_data_assigned(module, x):
    x = x.clone()
    x.data = x.data * 2
    return x


def with_rounded_activations(module, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.round(), lambda tensor: tensor):
        return x.tanh()


def with_its_weight_changed(module, x):
    with torch.no_grad():
        module.layers[0].linear.weight.data.mul_(1 - x.mean())
    return x


def detached_in_place(module, x):
    aside = x * 2
    aside.detach_()
    return x * aside


def logged(module, x):
    module.log("mean", x.mean())
    return x


def optimized(x):
    function = torch.jit.script(scripted)
    for _ in range(3):  # afterwards it computes gradients by a graph of its own
        function(torch.ones(4, 4, requires_grad=True))
    return function(x)


def scripted(x):
    return x * torch.sigmoid(x)


class Logging(Net):
    def log(self, name, value):
        raise AssertionError


@pytest.mark.parametrize(
    "act, words",
    [
        (lambda module, x: x.register_hook(lambda gradient: gradient / 2) and x, "registers a hook on a tensor"),
        (lambda module, x: x.retain_grad() or x, "retain_grad"),
        (with_a_hook_on_a_node, "looks at the grad_fn"),
        (with_data_assigned, "assigns to .data"),
        (with_rounded_activations, "saved_tensors_hooks"),
        (with_its_weight_changed, "changes the parameter 'layers.0.linear.weight' in place"),
        (detached_in_place, "a gradient of its own"),
        (lambda module, x: optimized(x), "a gradient of its own"),
        (lambda module, x: Signs.apply(x, object()), "calls Signs, which has a backward of its own"),
        (logged, "logs 'mean'"),
    ],
    ids=["hook", "retain", "node", "data", "saved", "weight", "detach_", "script", "object", "log"],
)
def test_what_it_tells_autograd_or_the_trainer_is_refused(act, words):
    with pytest.raises(ModelError, match=f"the forward of Logging .*{re.escape(words)}"):
        follow(Logging(act))()


def test_an_argument_that_is_changed_in_place_is_refused():
    class First(Net):
        def forward(self, x):
            x[:, 0].mul_(2)
            return super().forward(x)

    with pytest.raises(ModelError, match="changes its argument 'x' in place"):
        follow(First())()


def test_weights_may_be_kept_in_bounds():
    def act(module, x):
        with torch.no_grad():
            module.layers[0].linear.weight.clamp_(-1, 1)
        return x

    follow(Net(act))()


def test_backward_hook_on_split_module_refused():
    """A hook on the backward of what is cut is refused."""
    module = nn.Sequential(Net(), nn.Linear(4, 4))
    module[0].register_full_backward_hook(lambda *given: None)
    with pytest.raises(ModelError, match="'0' is cut into stages"):
        GraphCapture(module, modules_around(["0.layers.2"]), torch.device("cpu"))({"input": torch.ones(4, 4)}, 4, {})


def test_layers_may_do_all_of_these():
    class Hooked(Layer):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
            return Signs.apply(super().forward(x), object() and 1.0)

    module = Net()
    module.layers[1] = Hooked()
    follow(module)()


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


def test_training_mode_of_a_layer_recorded():
    """The mode of a layer that reads it is noticed and followed."""
    module = Net()
    module.layers[1] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    capture = GraphCapture(module, modules_around(["layers.2"]), torch.device("cpu"))
    one = {"x": torch.ones(1, 4)}
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        capture(one, 1, {})
    module.eval()
    reads = capture(one, 1, {}).reads
    assert reads.differing() is None
    module.layers[1].train()
    assert reads.differing() == "layers.1.1.training"


def test_forward_tensors_are_not_attributes():
    """Tensors that a forward makes are no part of the model."""
    module = Net(lambda module, x: x + torch.full((4,), 0.5))
    attributes = set(vars(module))
    stages = split_into_stages(module, ["layers.2"])
    assert set(vars(module)) == attributes
    assert [name for stage in stages for name in stage.modules if "constant" in name] == []


def test_tied_weight_has_several_names():
    """A tied weight is known by each of its names."""
    module = nn.Sequential(Net(), Net())
    module[1].layers[3].linear.weight = module[0].layers[0].linear.weight
    stages = split_into_stages(module, ["1"])
    assert shared_or_unused_parameters(module, stages[::-1]).keys() >= {
        "0.layers.0.linear.weight",
        "1.layers.3.linear.weight",
    }
    with pytest.raises(ModelError, match="is used in the stages 0, 1"):
        check_trained(module, shared_or_unused_parameters(module, stages[::-1]))


# -- in stages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["Warming", "Replaced"])
def test_changes_by_epoch_match_plain_loop(world2, model):
    """What changes by epochs is trained as in a plain loop."""
    expected, val_loss = changing.warmed_in_a_plain_loop(model)
    results = world2.run(changing.warmed, model, timeout=60)
    assert results[0][0].keys() == expected.keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    for _, ours in results:
        assert ours == pytest.approx(val_loss, rel=1e-4)


def test_ranks_that_would_follow_other_numbers_are_refused(world2):
    for kind, message, steps in world2.run(changing.noted, "WarmsInTheStep", timeout=60):
        assert (kind, steps) == ("ModelError", 0), message
        assert "'beta', which is 0.0 on one rank" in message and "on_train_batch_start" in message


REPLACED = [
    ("WithNewWeights", ["'head', a Linear with parameters", "before the fit", "'zero1'"]),
    ("CutElsewhere", ["'layers.2' of CutElsewhere was a Linear", "of Identity", "split_points=[...]"]),
]


@pytest.mark.parametrize("model, words", REPLACED, ids=lambda value: value if isinstance(value, str) else "")
def test_modules_that_come_too_late_are_refused(world2, model, words):
    for kind, message, steps in world2.run(changing.noted, model, timeout=60):
        assert (kind, steps) == ("ModelError", 2), message
        for word in words:
            assert word in message


def test_what_changes_in_each_batch_is_told_of_once(world2):
    first, last = world2.run(changing.noted, "ReadsTheStep", timeout=60)
    assert len(first) == 1 and "global_step', which is another in each batch" in first[0] and last == []


def test_dropout_and_batch_norm_follow_the_mode_of_evaluation(world2):
    expected = changing.validated_in_a_plain_loop()
    for ours in world2.run(changing.validated, timeout=60):
        assert ours == pytest.approx(expected, rel=1e-5)
