"""What stands between column- and row-wise layers, in one process, whose layers give and take one rank's parts."""

import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal_parallel import _divided_regions as divided_regions
from torchhal_parallel import _region_runs as region_runs
from torchhal_parallel._divided_gradients import ranks_of
from torchhal_parallel._divided_regions import DividedRegions
from torchhal_parallel._module_restore import ForwardOverride
from torchhal_parallel._tensor_parallel_check import PartialOutputCheck

WIDTH, SIZE = 8, 2
STYLES = {
    f"blocks.{index}.{name}": style for index in range(6) for name, style in (("up", "colwise"), ("down", "rowwise"))
}


class Block(nn.Module):
    forwards = 0

    def __init__(self, index=0):
        super().__init__()
        self.layer_idx = index
        self.between = F.gelu
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        Block.forwards += 1
        return x + self.down(self.between(self.up(x)))


class Model(nn.Module):
    def __init__(self, kind=Block):
        super().__init__()
        self.blocks = nn.ModuleList(map(kind, range(6)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


class TakesPart(ForwardOverride):
    def __init__(self, layer):
        super().__init__(layer)
        self.layer = layer

    def __call__(self, given):
        with _disable_current_modes():  # nobody sees how a DTensor computes
            parts = [given if each == self.rank else torch.zeros_like(given) for each in range(SIZE)]
            return F.linear(torch.cat(parts, -1), self.layer.weight, self.layer.bias)


def divided(model, styles=STYLES, rank=0, accelerator=None, device="cpu"):
    """PartialOutputCheck of ``model``, whose layers give and take the parts of one rank."""

    def part(layer, args, output):
        return output.chunk(SIZE, -1)[rank]

    part.__module__ = "torchhal_parallel.tests"  # a hook of a style, not of the user's
    for name, style in styles.items():
        if style == "colwise":
            model.get_submodule(name).register_forward_hook(part)
        elif style == "rowwise":
            TakesPart(model.get_submodule(name)).rank = rank
    strategy = SimpleNamespace(
        trainer=None, accelerator=accelerator or CPUAccelerator(), root_device=torch.device(device)
    )
    regions = DividedRegions(model, styles, rank, SIZE, strategy=strategy)
    return PartialOutputCheck(model, styles, SIZE, regions)


def first_step(model, *args, layers=None, what="what training_step returns", **options):
    step = (layers or divided(model, **options)).watched(model, what)
    return step(*(args or (torch.randn(3, WIDTH),)))


def forwards(call):
    before = Block.forwards
    call()
    return Block.forwards - before


def noted(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found]


# -- how often -----------------------------------------------------------------------------------------------


def test_one_of_equal_blocks_compared():
    """Of equal blocks one is compared in each call that is a power of two."""
    model = Model()
    layers = divided(model)
    call = lambda: first_step(model, layers=layers)  # noqa: E731
    assert [forwards(call) - 6 for _ in range(9)] == [2, 2, 0, 2, 0, 0, 0, 2, 0]
    with torch.no_grad():  # each validation asks for its step anew, and has batches of its own
        call = lambda: first_step(model, torch.randn(5, WIDTH), layers=layers, what="what validation_step returns")  # noqa: E731
        assert [forwards(call) - 6 for _ in range(3)] == [2, 2, 0]
    model.eval()
    assert forwards(lambda: first_step(model, layers=layers)) == 6 + 2, "another mode has calls of its own"


@pytest.mark.parametrize("change", ["function", "attribute", "shape", "class"])
def test_a_block_that_differs_is_compared_by_itself(change):
    model = Model()
    other = model.blocks[3]
    if change == "function":
        other.between = torch.tanh
    elif change == "attribute":
        other.scale = 2.0
    elif change == "shape":
        other.up, other.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    else:
        other.__class__ = type("Other", (Block,), {})
    assert forwards(lambda: first_step(model)) == 6 + 4


def test_the_only_wrong_one_of_many_blocks_is_found():
    model = Model()
    model.blocks[4].between = lambda parts: parts.softmax(-1)
    with pytest.raises(ConfigurationError, match=r"between 'blocks.4.up' .* 'blocks.4.down' .*softmax"):
        first_step(model)


class OnlyTraining(Block):
    def forward(self, x):
        parts = self.up(x)
        return x + self.down(parts.softmax(-1) if self.training else parts)


def test_what_only_the_mode_that_trains_computes_is_found():
    first_step(Model(OnlyTraining).eval())
    with pytest.raises(ConfigurationError, match="softmax"):
        first_step(Model(OnlyTraining))


class Later(Block):
    steps = 0

    def forward(self, x):
        self.steps += 1
        parts = self.up(x)
        return x + self.down(parts.softmax(-1) if self.steps > 6 else parts)


def test_what_begins_later_is_found_later():
    model = Model(Later)
    layers = divided(model)
    for _ in range(7):
        first_step(model, layers=layers)
    with pytest.raises(ConfigurationError, match="softmax"):
        first_step(model, layers=layers)


class NowAndThen(Block):
    """Right, whatever is drawn and counted: another path in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if random.random() < 0.5 or torch.rand(()) < 0.3:
            return x
        return x + self.down(self.up(x) * (1 + self.calls % 2))


def test_both_forwards_begin_with_the_same_numbers_and_attributes():
    random.seed(0)
    assert not noted(lambda: [first_step(Model(NowAndThen)) for _ in range(6)])


# -- what it leaves ------------------------------------------------------------------------------------------


class Remembering(Block):
    def __init__(self, index):
        super().__init__(index)
        self.seen, self.count, self.state = [], 0, {"sums": []}
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.seen.append(len(x))
        self.count += 1
        self.state["sums"].append(float(x.detach().sum()))
        self.total += 1
        return super().forward(x)


def test_comparison_leaves_no_traces():
    """It leaves no traces in what a forward writes to."""
    model = Model(Remembering)
    first_step(model)
    for block in model.blocks:
        assert (block.seen, block.count, len(block.state["sums"]), float(block.total)) == ([3], 1, 1, 1.0)
        assert block.training and block.up.training


class Drawing(Block):
    def forward(self, x):
        random.random(), torch.rand(3)
        device.advance()
        return super().forward(x)


class Device(CPUAccelerator):
    """Another device's generator."""

    state = 0

    def advance(self):
        self.state += 1

    def get_rng_state(self, device):
        return torch.tensor(self.state)

    def set_rng_state(self, state, device):
        self.state = int(state)


device = Device()


def test_generators_are_those_of_a_step_that_nobody_compared():
    device.state = 0
    torch.manual_seed(1)
    random.seed(1)
    x, model = torch.randn(3, WIDTH), Model(Drawing)
    before = torch.get_rng_state(), random.getstate()
    model(x)
    expected = torch.rand(1), random.random(), device.state
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    device.state = 0
    first_step(model, x, accelerator=device, device="cuda")
    assert (torch.rand(1), random.random(), device.state) == expected


# -- what it can't compare -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "function"),
    [(region_runs, "_random_weights"), (divided_regions, "_copies"), (divided_regions, "in_full_precision")],
    ids=["_random_weights", "_copies", "_in_full_precision"],
)
def test_out_of_memory_is_a_warning(monkeypatch, module, function):
    """Where memory is short the run goes on with a note."""

    def no_memory(*args):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    model = Model()
    x = torch.randn(3, WIDTH)
    layers = divided(model)
    expected = model(x)
    monkeypatch.setattr(module, function, no_memory)
    found = []
    (note,) = noted(lambda: found.append(first_step(model, x, layers=layers)))
    assert "Block, a part of the model, computes" in note and "was not compared" in note and "2 GiB" in note
    assert found[0] == expected


def test_what_fails_with_whole_outputs_is_a_note():
    model = Model()
    for block in model.blocks:
        block.between = count_on_parts
    (note,) = noted(lambda: first_step(model))
    assert "Block, a part of the model," in note and "(RuntimeError: shape" in note


def count_on_parts(parts):
    return parts.view(3, 2 * WIDTH)


def test_a_style_that_is_an_object_is_a_note():
    model = Model()
    model.blocks[0].extra = model.blocks[0].between = nn.Identity()
    notes = noted(lambda: first_step(model, styles={**STYLES, "blocks.0.extra": object()}))
    assert notes and "was not compared" in notes[0] and "the style of 'blocks.0.extra' is an object" in notes[0]


class Dropping(Block):
    def __init__(self, index):
        super().__init__(index)
        self.dropout = nn.Dropout(0.5)
        self.between = self.dropout


class DroppingAround(Dropping):
    def forward(self, x):
        return self.dropout(x + self.down(F.gelu(self.up(x))))


def attend(parts):
    heads = parts.unflatten(-1, (-1, 4)).transpose(0, 1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).transpose(0, 1).flatten(1)


def test_dropout_warns_on_the_first_rank():
    """Dropout of parts is a note on the first rank."""
    (note,) = noted(lambda: first_step(Model(Dropping)))
    assert note.startswith("Dropping drops out of what is divided")
    assert not noted(lambda: first_step(Model(Dropping).eval()))
    assert not noted(lambda: first_step(Model(DroppingAround)))
    assert not noted(lambda: first_step(Model(Dropping), rank=1))
    model = Model()
    for block in model.blocks:
        block.between = attend
    (note,) = noted(lambda: first_step(model))
    assert note.startswith("Block drops out")


# -- gradients -----------------------------------------------------------------------------------------------


class Scaled(Block):
    """One weight for each element of a head, which all heads share."""

    def __init__(self, index):
        super().__init__(index)
        self.scale = nn.Parameter(torch.ones(4))
        self.between = lambda parts: (parts.unflatten(-1, (-1, 4)) * self.scale).flatten(-2)


class Gated(Block):
    """A gate that every rank has whole."""

    def __init__(self, index):
        super().__init__(index)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return x + self.down(self.up(x) * self.gate(x))


class TimesInput(Block):
    def forward(self, x):
        return x + self.down(self.up(x) * x.mean(-1, keepdim=True))


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_whole_parameter_between_divided_refused():
    """What is trained and whole between divided layers is refused."""
    with pytest.raises(ConfigurationError, match=r"'blocks.0.down' is called with is made of 'blocks.0.scale' beside"):
        first_step(Model(Scaled))
    with pytest.raises(ConfigurationError, match=r"'blocks.0.down' .* made of 'blocks.0.gate.(weight|bias)' beside"):
        first_step(Model(Gated))
    with pytest.raises(ConfigurationError, match=r"'blocks.1.down' .* made of 'blocks.0.down' beside"):
        first_step(Model(TimesInput))
    with torch.no_grad():
        first_step(Model(Gated))
    first_step(Model(Scaled).requires_grad_(False), torch.randn(3, WIDTH))
    assert not noted(lambda: first_step(Model()))


def test_custom_function_gradients_warn():
    """Gradients through a function of one's own are a note."""
    model = Model()
    for block in model.blocks:
        block.between = Own.apply
    (note,) = [each for each in noted(lambda: first_step(model)) if "autograd Function" in each][:1]
    assert "'blocks.0.down'" in note and "OwnBackward" in note


# -- heads ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """``heads`` of queries and fewer of keys, counted by their size."""

    def __init__(self, keys, heads=4, head_dim=4, fixed=False):
        super().__init__()
        self.head_dim, self.fixed, self.keys, self.heads = head_dim, fixed, keys, heads
        self.q, self.o = nn.Linear(WIDTH, heads * head_dim), nn.Linear(heads * head_dim, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * head_dim), nn.Linear(WIDTH, keys * head_dim)

    def forward(self, x):
        counts = (self.heads, self.keys, self.keys) if self.fixed else (-1, -1, -1)
        size = -1 if self.fixed else self.head_dim
        q, k, v = (
            projection(x).unflatten(-1, (count, size)).transpose(1, 2)
            for projection, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


HEADS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


@pytest.mark.parametrize("rank", range(SIZE))
def test_key_value_heads_stay_whole(rank):
    """Heads of keys are divided whole or not at all."""
    x = torch.randn(2, 5, WIDTH)
    first_step(Attention(keys=2), x, styles=HEADS, rank=rank)
    with pytest.raises(ConfigurationError, match=r"Attention fails so .* 'k', 'q' .*num_key_value_heads"):
        first_step(Attention(keys=1), x, styles=HEADS, rank=rank)
    with pytest.raises(ConfigurationError, match=r"'q'.* differs by"):
        first_step(Attention(keys=1, fixed=True), x, styles=HEADS, rank=rank)


@pytest.mark.parametrize("keys", [1, 2])
def test_keys_that_every_rank_has_whole_are_refused(keys):
    """With one head of keys the outputs are right, and the gradients of the keys are not."""
    x, styles = torch.randn(2, 5, WIDTH), {"q": "colwise", "o": "rowwise"}
    with pytest.raises(ConfigurationError, match=r"made of '(k|v).(weight|bias)' beside"):
        first_step(Attention(keys), x, styles=styles)
    with pytest.raises(ConfigurationError, match=r"made of '(k|v)' beside"):
        first_step(Attention(keys), x, styles={**styles, "k": "colwise_rep", "v": "colwise_rep"})
    with torch.no_grad():
        if keys == 2:
            with pytest.raises(ConfigurationError, match=r"'q'.* differs by"):
                first_step(Attention(keys), x, styles=styles, rank=1)
        else:
            first_step(Attention(keys), x, styles=styles, rank=1)


def test_an_error_of_sizes_elsewhere_stays_what_it_is():
    model = Model()
    head = nn.Linear(3, 3)
    step = divided(model).watched(lambda x: head(x * model(x)), "what training_step returns")
    with pytest.raises(RuntimeError, match=r"size|shape") as found:
        step(torch.randn(3, WIDTH))
    assert not isinstance(found.value, ConfigurationError)


def test_group_of_an_earlier_call():
    """torch.distributed.nn keeps the default group of its import, which torch itself has forgotten by then."""

    class Gone:
        def size(self):
            return 3

    assert ranks_of(Gone()) == {0, 1, 2}
