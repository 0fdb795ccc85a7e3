"""Test that models of transformers train and generate under each strategy as in one process."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import transformers_models as language
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from torchhal.errors import ConfigurationError
from torchhal_parallel._tensor_parallel import plan_of
from torchhal_parallel._transformers_plan import transformers_plan

pytestmark = pytest.mark.timeout(240)

slow = pytest.mark.slow
DIVIDED = [
    ("bert", "ddp"),
    ("bert", "zero3"),
    ("llama", "ddp"),
    ("llama", "zero3"),
    ("gpt2", "zero3"),
    ("llama", "tensor_parallel"),
    ("tied llama", "tensor_parallel"),
    ("qwen3", "tensor_parallel"),
]
STAGED = [("bert with problem type", "pipeline"), ("llama without cache", "pipeline"), ("gpt2 untied", "pipeline")]


@functools.lru_cache
def plain(name):
    return language.plain(name)


def check(ranks, name, tolerance=2e-5):
    losses, found, state = plain(name)
    ours = [rank["losses"] for rank in ranks if rank["leads"]]
    mean = [sum(values) / len(values) for values in zip(*ours, strict=True)]
    assert not any(map(math.isnan, mean))
    torch.testing.assert_close(torch.tensor(mean), torch.tensor(losses), rtol=tolerance, atol=tolerance)
    for key, value in state.items():
        torch.testing.assert_close(ranks[0]["state"][key], value, rtol=0, atol=10 * tolerance, msg=key)
    for number, rank in enumerate(ranks):
        if rank["found"] is not None:  # of two batches one each, or both
            share = found.chunk(2)[number] if rank["replicas"] > 1 else found
            torch.testing.assert_close(rank["found"], share, rtol=0, atol=10 * tolerance)
    assert found.dtype == (torch.int64 if language.generates(name) else torch.float32)


@slow
@pytest.mark.parametrize(("name", "strategy"), DIVIDED)
def test_trainer_trains_and_generates_as_one_process(world2, name, strategy):
    pytest.importorskip("transformers")
    ranks = world2.run(language.by_trainer, name, strategy, timeout=120)
    check(ranks, name)
    assert all(rank["found"] is not None for rank in ranks)


@slow
@pytest.mark.parametrize(("name", "strategy"), DIVIDED)
def test_loop_trains_and_generates_as_one_process(world2, name, strategy):
    pytest.importorskip("transformers")
    ranks = world2.run(language.by_run, name, strategy, timeout=120)
    check(ranks, name)
    assert all(rank["found"] is not None for rank in ranks)


@slow
@pytest.mark.parametrize(("name", "strategy"), STAGED)
def test_trainer_trains_stages_as_one_process(world2, name, strategy):
    pytest.importorskip("transformers")
    check(world2.run(language.by_trainer, name, strategy, False, timeout=120), name)


@slow
@pytest.mark.parametrize(("name", "strategy"), STAGED)
def test_loop_trains_stages_and_generates_as_one_process(world2, name, strategy):
    pytest.importorskip("transformers")
    ranks = world2.run(language.by_run, name, strategy, "function", timeout=120)
    check(ranks, name)
    assert all(rank["found"] is not None for rank in ranks)


@slow
def test_texts_of_different_lengths_are_written_by_divided_models(world2):
    pytest.importorskip("transformers")
    prompts, end, expected = language.uneven_texts()
    assert len({text.shape[1] for text in expected}) == 2
    ranks = world2.run(language.written_unevenly, "zero3", prompts, end, timeout=120)
    for found, text in zip(ranks, expected, strict=True):
        assert torch.equal(found, text)


@slow
@pytest.mark.parametrize(
    ("name", "strategy", "expected"),
    [
        ("bert", "pipeline", "config"),
        ("llama", "pipeline", "use_cache=False"),
        ("gpt2", "pipeline", "'transformer.wte.weight' is used in the stages 0, 1 .* untie it"),
        ("bert", "tensor_parallel", "needs a plan"),
        ("mixtral", "tensor_parallel", "MixtralForCausalLM gives .*experts.* the style 'packed_colwise'.*zero3"),
    ],
)
def test_refused_with_the_way_out(world2, name, strategy, expected):
    pytest.importorskip("transformers")
    how = "function" if strategy == "pipeline" else "calls"
    for outcome in world2.outcomes(language.by_run, name, strategy, how, timeout=120):
        assert outcome.error in ("ModelError", "ConfigurationError"), outcome.traceback
        assert re.search(expected, outcome.message), outcome.message


# -- the plan of a model ---------------------------------------------------------------------------------------------


class Inner(nn.Module):
    _tp_plan = {
        "embed": "embedding_rowwise",
        "layers.*.up": "colwise",
        "layers.*.norm": "replicated_with_grad_allreduce",
        "layers.*.down": "rowwise_split_input",
        "layers.*.scale": "replicate",
        "layers.*.experts.up": "packed_colwise",
        "head": "colwise_gather_output",
    }

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        parts = {name: nn.Linear(4, 4) for name in ("up", "down", "scale")}
        self.layers = nn.ModuleList([nn.ModuleDict({**parts, "norm": nn.RMSNorm(4)})])


class Outer(nn.Module):
    """With such a model in it."""

    def __init__(self):
        super().__init__()
        self.language = Inner()


def test_plan_of_transformers_translated():
    plan = transformers_plan(Inner())
    assert isinstance(plan.pop("layers.*.norm"), SequenceParallel)
    assert plan == {
        "embed": "rowwise_rep", "layers.*.up": "colwise", "layers.*.down": "rowwise_rep", "head": "colwise_rep",
    }  # fmt: skip


def test_plan_of_model_inside_has_its_name():
    assert set(plan_of(Outer(), None)) == {f"language.{name}" for name in transformers_plan(Inner())}


def test_own_plan_comes_before_that_of_transformers():
    module = Outer()
    module.tensor_parallel_plan = {"language.head": "colwise_rep"}
    assert plan_of(module, None) == {"language.head": "colwise_rep"}
    assert plan_of(module, {"language.embed": "rowwise_rep"}) == {"language.embed": "rowwise_rep"}


def test_unknown_style_refused_where_its_layer_is():
    module = Inner()
    module.layers[0]["experts"] = nn.ParameterDict({"up": nn.Parameter(torch.zeros(2))})
    with pytest.raises(ConfigurationError, match=r"Inner gives 'layers\.\*\.experts\.up' the style 'packed_colwise'"):
        transformers_plan(module)


def test_module_without_plan_asked_for_one():
    with pytest.raises(ConfigurationError, match="needs a plan"):
        plan_of(nn.Linear(2, 2), None)
