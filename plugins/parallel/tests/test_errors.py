"""What can't work is said before training, by name, and the same on every rank."""

import pytest
import torch
import training
from torch.distributed.fsdp import FSDPModule

from torchhal import Trainer
from torchhal.accelerators import CPUAccelerator
from torchhal.composition import Composition
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.precision import SinglePrecision, TruePrecision
from torchhal_parallel import _pipeline_schedule
from torchhal_parallel._pipeline_split import even_cuts
from torchhal_parallel._wrap_policy import check_policy, find_blocks
from torchhal_parallel.fsdp import FSDPStrategy
from torchhal_parallel.hybrid import HybridStrategy

pytestmark = pytest.mark.timeout(120)

CUT = {"pipeline": 2}
BACK = {"pipeline": 2, "schedule": "interleaved_1f1b", "split_points": ["layers.3", "layers.1", "layers.2"]}
CASES = [
    ("zero1", "Newton", None, "ConfigurationError", ["'zero1'", "LBFGS", "strategy='ddp'"]),
    ("zero3", "SparseEmbedding", None, "ModelError", ["'embed'", "sparse=True"]),
    ("zero2", "ConvNet", None, "ModelError", ["'scale'", "16-mixed", "(1,)"], {"precision": "16-mixed"}),
    ("zero3", "NewHead", None, "ModelError", ["'head.weight'", "configure_model"]),
    ("tensor_parallel", "NewHead", None, "ModelError", ["'head.weight'", "configure_model"]),
    ("hybrid", "SparseEmbedding", {"shard": 2}, "ModelError", ["'embed'", "sparse=True"]),
    ("zero3", "OpenBesideOne", None, "ModelError", ["only while its own forward runs", "wrap_policy"]),
    ("zero3", "Early", None, "ModelError", ["AdamW", "configure_optimizers"]),
    ("zero3", "Newton", None, "ConfigurationError", ["LBFGS", "strategy='ddp'"]),
    ("zero3", "Factored", None, "ConfigurationError", ["Adafactor", "strategy='zero1'"]),
    ("tensor_parallel", "Factored", None, "ConfigurationError", ["Adafactor", "strategy='zero1'"]),
    ("zero3", "Resilient", None, "ConfigurationError", ["Rprop", "strategy='zero1'"]),
    ("tensor_parallel", "Resilient", None, "ConfigurationError", ["Rprop", "strategy='zero1'"]),
    ("zero3", "GradientByWeights", None, "ModelError", ["GradientByWeights asks for a gradient", "'zero3'"]),
    ("zero3", "Transformed", None, "ModelError", ["torch.func", "'zero3'"]),
    ("tensor_parallel", "Transformed", None, "ModelError", ["torch.func", "torch.autograd.grad"]),
    ("zero3", "Triangular", None, "ModelError", ["aten.tril_", "'zero3'", "full_tensor()"]),
    ("zero2", "ZeroedRow", None, "ModelError", ["zero_", "(32,)", "would be lost"]),
    ("tensor_parallel", "ZeroedRow", None, "ModelError", ["zero_", "would be lost"]),
    ("tensor_parallel", "WrittenByOut", None, "ModelError", ["aten::mul.out", "would be lost"]),
    ("zero3", "WritesToGlobal", None, "ModelError", ["'layers.0.up.weight' by a reference from before", "'zero3'"]),
    ("pipeline", "WritesToGlobal", None, "ModelError", [".weight' by a reference from before", "'pipeline'"]),
    ("tensor_parallel", "DividedBatchNorm", None, "ModelError", ["'norm' is a BatchNorm1d of 12", "'colwise_rep'"]),
    ("pipeline", "BranchingOnLoss", None, "ModelError", ["branches on the value", "schedule='gpipe'"]),
    ("zero3", "SetElement", None, "ModelError", ["aten::copy_", "would be lost"]),
    ("zero3", "Masked", None, "ModelError", ["aten.mul_", "on_train_batch_end", "weight.full_tensor() * mask"]),
    ("tensor_parallel", "Masked", None, "ModelError", ["on_train_batch_end", "weight.full_tensor() * mask"]),
    ("zero3", "WithPlain", None, "ModelError", ["Plain computes with plain tensors", "zeros_like(parameter)"]),
    ("tensor_parallel", "WithPlain", None, "ModelError", ["Plain computes with plain tensors", "'tensor_parallel'"]),
    ("zero3", "WithPlainNumber", None, "ModelError", ["PlainNumber writes what is made of", "tensor.item()"]),
    ("zero2", "Fused", None, "ModelError", ["leave out fused=True", "'zero2'"]),
    ("zero1", "WithBuffers", None, "ConfigurationError", ["Buffers failed in its step", "self.state[parameter]"]),
    ("zero3", "Transposed", None, "ModelError", ["'layers.0.up.weight' is not contiguous", "'zero1'"]),
    ("tensor_parallel", "NoPlan", None, "ConfigurationError", ["needs a plan", "tensor_parallel_plan", "NoPlan"]),
    ("tensor_parallel", "Misspelt", None, "ConfigurationError", ["'layers.*.attn.q_proj'", "attention.q_proj'?"]),
    ("tensor_parallel", "Open", None, "ConfigurationError", ["closes", "'head'", "'colwise_rep'"]),
    ("tensor_parallel", "HeadLeftOpen", None, "ConfigurationError", ["closes", "'head'"]),
    ("tensor_parallel", "OpenBesideOne", None, "ConfigurationError", ["closes", "'layers.0.side'", "called with"]),
    ("tensor_parallel", "SummedWithGradients", None, "ConfigurationError", ["'layers.", ".side'", "multiplied"]),
    ("tensor_parallel", "OverwrittenInPart", None, "ConfigurationError", ["closes", "'layers.0.side'"]),
    ("tensor_parallel", "OpenInTheLoss", None, "ConfigurationError", ["closes", "'layers.0.side'", "training_step"]),
    ("hybrid", "OpenBesideOne", {"tensor": 2, "shard": 1}, "ConfigurationError", ["closes", "'layers.0.side'"]),
    ("tensor_parallel", "RowwiseOnly", None, "ConfigurationError", ["'rowwise' layer 'layers.0.down'", "rowwise_rep"]),
    ("tensor_parallel", "RowwiseOfAWhole", None, "ConfigurationError", ["'layers.0.last'", "32 inputs", "with 32"]),
    ("tensor_parallel", "Early", None, "ConfigurationError", ["AdamW", "configure_optimizers"]),
    ("tensor_parallel", "SoftmaxBetween", None, "ConfigurationError", ["'layers.0.up'", "'layers.0.down'", "softmax"]),
    ("tensor_parallel", "MeanBetween", None, "ConfigurationError", ["'layers.0.up'", "'layers.0.down'", "Block"]),
    ("tensor_parallel", "NormBetween", None, "ConfigurationError", ["'layers.0.up'", "'layers.0.down'"]),
    ("tensor_parallel", "FixedHeads", None, "ConfigurationError", ["'layers.0.attention.o_proj'", "unflatten"]),
    ("tensor_parallel", "OneKeyHead", None, "ConfigurationError", ["'layers.0.attention.k_proj'", "_heads"]),
    ("tensor_parallel", "WholeKeys", None, "ConfigurationError", ["made of 'layers.0.attention.", "o_proj", "colwise"]),
    ("tensor_parallel", "HeadNorms", None, "ConfigurationError", ["of 'layers.0.attention.norm.weight'", "each head"]),
    ("tensor_parallel", "JoinedGate", None, "ConfigurationError", ["closes", "'layers.0.up'"]),
    ("tensor_parallel", "Objects", None, "ConfigurationError", ["'layers.0.up'", "'layers.0.down'"]),
    ("tensor_parallel", "InTheStep", None, "ConfigurationError", ["'down'", "let one forward"]),
    ("hybrid", "SoftmaxBetween", {"tensor": 2, "shard": 1}, "ConfigurationError", ["'layers.0.down'", "softmax"]),
    ("tensor_parallel", "PenaltyOverAll", None, "ModelError", ["PenaltyOverAll computes with one outside", "'ddp'"]),
    ("pipeline", "LoggedPenalty", None, "ModelError", ["in another stage of the pipeline", "penalty", "'zero1'"]),
    ("tensor_parallel", "ClippedByTorch", None, "ModelError", ["torch.nn.utils can't clip", "gradient_clip_val="]),
    ("pipeline", "ClippedByTorch", None, "ModelError", ["in another stage of the pipeline", "gradient_clip_val="]),
    ("pipeline", "Unused", None, "ModelError", ["'aside.weight'", "requires_grad_(False)"]),
    ("tensor_parallel", "Uneven", None, "ConfigurationError", ["'layers.0.up'", "33 outputs", "2 ranks"]),
    ("tensor_parallel", "NormInPlan", None, "ConfigurationError", ["'norm'", "LayerNorm"]),
    ("tensor_parallel", "DropoutInPlan", None, "ConfigurationError", ["'layers.0.noise'", "Dropout", "LayerNorm"]),
    ("tensor_parallel", "BadStyle", None, "ConfigurationError", ["'columns'", "'rowwise'"]),
    ("tensor_parallel", "Foreach", None, "ConfigurationError", ["foreach=True"]),
    ("pipeline", "OldWeightNorm", None, "ModelError", ["'layers.0' can't be copied", "parametrizations.weight_norm"]),
    ("pipeline", "Pruned", None, "ModelError", ["'layers.0' can't be copied", "prune.remove", "parametrization"]),
    ("pipeline", "CalledWithATuple", None, "ModelError", ["pair=(<Tensor of shape (16, 8)>, 0.5): give it tensors"]),
    ("zero3", "CopiedInAHook", None, "ModelError", ["copy.deepcopy", "parameter.detach().clone()", "before the fit"]),
    ("pipeline", "Tied", None, "ModelError", ["'embed.weight'", "stages 0, 1", "untie"]),
    ("pipeline", "ByHand", None, "ConfigurationError", ["manual optimization", "pipeline"]),
    ("pipeline", "Never", None, "ModelError", ["self(...)", "its part of the model"]),
    ("pipeline", "Branching", None, "ModelError", ["can't be cut", "branch"]),
    ("pipeline", "Newton", None, "ConfigurationError", ["LBFGS", "pipeline"]),
    ("hybrid", "Transformer", CUT | {"split_points": ["layer.2"]}, "ConfigurationError", ["'layer.2'", "'layers.2'?"]),
    ("hybrid", "Transformer", CUT | {"split_points": ["layers"]}, "ConfigurationError", ["'layers'", "cuts nothing"]),
    ("hybrid", "Transformer", CUT | {"split_points": ["embed"]}, "ConfigurationError", ["stage 0", "no module"]),
    ("hybrid", "Transformer", BACK, "ConfigurationError", ["order", "'layers.1'"]),
    ("hybrid", "Transformer", CUT | {"microbatches": 3}, "ModelError", ["16 samples", "3 microbatches"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[4][0]}")
def test_refused_on_every_rank(world2, case):
    alias, model, arguments, kind, words, *options = case
    for outcome in world2.run(training.attempt, alias, 2, model, arguments, *options, timeout=60):
        found, message = outcome
        assert found == kind, message
        for word in words:
            assert word in message


@pytest.mark.parametrize("model", ["HeadNormsInPlan", "SummedByHand", "WithHandWrittenNorm"])
def test_custom_joining_matches_one_device(world2, model):
    """What is joined by other means trains as on one device."""
    expected = training.losses_of("single_device", 1, model)[0]
    found = world2.run(training.losses_of, "tensor_parallel", 2, model, timeout=100)
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=2e-5)
    first, second = ([each for each in warned if "calls a collective of its own" in each] for _, warned in found)
    assert len(first) == (model == "WithHandWrittenNorm") and not second


REFUSED_IN_SETUP = [
    ("tensor_parallel", "Early", None),
    ("tensor_parallel", "Foreach", None),
    ("tensor_parallel", "Remembers", None),
    ("tensor_parallel", "TiedOutside", None),
    ("hybrid", "Transformer", {"tensor": 2, "shard": 1, "activation_checkpointing": 10**9}),
    ("pipeline", "Early", None),
    ("zero3", "Early", None),
]


@pytest.mark.parametrize("case", REFUSED_IN_SETUP, ids=lambda case: f"{case[0]}-{case[1]}")
def test_refused_model_is_whole(world2, case):
    """A model that is refused in the set up is whole."""
    alias, model, arguments = case
    for kind, whole, nothing_left in world2.run(training.refused, alias, 2, model, arguments, timeout=60):
        assert kind in ("ConfigurationError", "ModelError", "RankFailedError") and whole and nothing_left


def test_a_layer_may_be_closed_by_hand(world2):
    assert world2.run(training.attempt, "tensor_parallel", 2, "ClosedByHand", timeout=60) == [("nothing", "")] * 2


@pytest.mark.parametrize("model", ["GroupedHeads", "DropsBetween", "WithHandWrittenNorm"])
def test_what_treats_each_part_by_itself_is_left_alone(world2, model):
    assert world2.run(training.attempt, "tensor_parallel", 2, model, timeout=60) == [("nothing", "")] * 2


def test_activation_writes_in_validation_allowed(world2):
    """A write to a view of an activation in a validation is no lost one."""
    assert world2.run(training.attempt_validation, "WrittenActivation", timeout=60) == [("nothing", "")] * 2


def test_the_comparison_with_one_device_leaves_nothing_behind(world2):
    """Neither random numbers nor buffers nor gradients: the losses are those of one device."""
    expected = training.watched("single_device", 1)
    for found in world2.run(training.watched, "tensor_parallel", 2, timeout=60):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert found["count"] == expected["count"]


def test_tied_weights_may_be_sharded_alike(world2):
    assert world2.run(training.attempt, "tensor_parallel", 2, "TiedPlan", timeout=60) == [("nothing", "")] * 2
    assert world2.run(training.attempt, "zero3", 2, "Tied", timeout=60) == [("nothing", "")] * 2


def test_the_axes_must_make_the_world():
    strategy = HybridStrategy(data=2, tensor=2, pipeline=2)
    assert strategy.sizes_for(8) == {"pipeline": 2, "data": 2, "shard": 1, "tensor": 2}
    with pytest.raises(ConfigurationError, match=r"pipeline=2 x data=2 x shard=1 x tensor=2 needs 8 processes.*are 4"):
        strategy.sizes_for(4)
    assert HybridStrategy(data=None, tensor=2).sizes_for(6)["data"] == 3
    with pytest.raises(ConfigurationError, match="a multiple of 4"):
        HybridStrategy(data=None, tensor=2, pipeline=2).sizes_for(6)


def test_torch_without_scale_grads_refused(monkeypatch):
    """A torch whose schedules scale gradients is refused before the set up."""

    class OfBefore:
        def __init__(self, stage, n_microbatches, loss_fn=None):
            """As without ``scale_grads``."""

    monkeypatch.setitem(_pipeline_schedule.SCHEDULES, "gpipe", OfBefore)

    def check(strategy):
        parts = {"checkpoint_io": None, "cluster_environment": None, "devices": (), "num_nodes": 1, "world_size": 2}
        strategy.check_fit(
            Composition(accelerator=CPUAccelerator(), precision=SinglePrecision(), strategy=strategy, **parts)
        )

    check(HybridStrategy(data=2, schedule="gpipe"))
    with pytest.raises(UnsupportedCombinationError, match=r"OfBefore of torch .* has no argument 'scale_grads'"):
        check(HybridStrategy(pipeline=2, schedule="gpipe"))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_an_axis_is_a_count(value):
    with pytest.raises(ConfigurationError, match="'tensor' must be an int of at least 1"):
        HybridStrategy(tensor=value)


def test_arguments_are_checked_at_once():
    with pytest.raises(ConfigurationError, match="at most one"):
        HybridStrategy(data=None, tensor=None)
    with pytest.raises(ConfigurationError, match="'split_points' must be a list"):
        HybridStrategy(pipeline=2, split_points="layers.2")
    for made in (FSDPStrategy, HybridStrategy):
        with pytest.raises(TypeError, match="'cpu_offload' must be a bool"):
            made(cpu_offload=1)
    with pytest.raises(ConfigurationError, match=r"'cpu_offload' concerns .* 'shard' divides, and shard=1"):
        HybridStrategy(data=2, cpu_offload=True)
    with pytest.raises(TypeError, match="MixedPrecisionPolicy"):
        FSDPStrategy(mixed_precision="bf16")
    with pytest.raises(ConfigurationError, match="'wrap_policy' must be"):
        find_blocks(torch.nn.Linear(1, 1), "everything")


class Layers(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        two = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)) for _ in range(2))
        self.layers = kind(*two) if kind is torch.nn.Sequential else kind(two)


def test_units_are_the_elements_of_lists_of_layers():
    for kind in (torch.nn.ModuleList, torch.nn.Sequential):
        assert [name for name, _ in find_blocks(Layers(kind), "blocks")] == ["layers.0", "layers.1"]
    sequence = Layers(torch.nn.Sequential).layers
    assert [name for name, _ in find_blocks(sequence[0], "blocks")] == ["0", "2"]
    sequence[1].insert(0, torch.nn.ReLU(inplace=True))  # what a unit is called with, or returns, is not overwritten
    sequence.append(torch.nn.Linear(2, 2))
    assert [name for name, _ in find_blocks(sequence, "blocks")] == ["2"]


class Deep(torch.nn.Module):
    """Blocks whose inner sequences are longer than the list of blocks, between a wide embedding and a head."""

    def __init__(self, blocks, words=2):
        super().__init__()
        self.embed = torch.nn.Embedding(words, 4)
        inner = (torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6))) for _ in range(blocks))
        self.blocks = torch.nn.ModuleList(inner)
        self.head = torch.nn.Linear(4, 2)


def test_even_cuts_balance_parameters():
    """A pipeline is cut between blocks of about equal weight."""
    assert even_cuts(Deep(4), 2) == ["blocks.2"]
    assert even_cuts(Deep(3), 2) == ["blocks.2"], "in the midst of a block the halves would be equal"
    assert even_cuts(Deep(8), 4) == ["blocks.2", "blocks.4", "blocks.6"]
    assert even_cuts(Deep(4, words=60), 2) == ["blocks.1"], "the embedding weighs as two blocks"
    wrapped = torch.nn.Sequential(torch.nn.Linear(4, 4), Deep(6).blocks, torch.nn.Linear(4, 4))
    assert even_cuts(wrapped, 2) == ["1.3"], "one element of the outermost list has nearly everything"
    pairs = (layer for _ in range(4) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU()))
    assert even_cuts(torch.nn.Sequential(*pairs), 2) == ["4"]
    with pytest.raises(ConfigurationError, match=r"Layers has no .* of at least 5 layers"):
        even_cuts(Layers(torch.nn.ModuleList), 5)


def test_a_policy_that_chooses_nothing():
    layers, lstm = Layers(torch.nn.ModuleList), torch.nn.Module()
    lstm.embed, lstm.recurrent = torch.nn.Embedding(2, 2), torch.nn.LSTM(2, 2)
    assert check_policy(layers, "blocks", "wrap_policy") is check_policy(lstm, "none", "wrap_policy") is None
    assert check_policy(torch.nn.Linear(2, 2), "blocks", "wrap_policy") is None, "there is nothing to choose"
    assert "has no nn.ModuleList or nn.Sequential" in check_policy(lstm, "blocks", "wrap_policy")
    for policy in (1000, torch.nn.Conv2d, lambda name, module: False, torch.nn.ModuleList):
        with pytest.raises(ConfigurationError, match="'wrap_policy' chooses no submodule of Layers"):
            check_policy(layers, policy, "wrap_policy")
    with pytest.raises(ConfigurationError, match="'activation_checkpointing' chooses no submodule of Module"):
        check_policy(lstm, "blocks", "activation_checkpointing")


@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline", HybridStrategy(data=None, tensor=2)], ids=str)
def test_a_scaled_loss_is_refused_before_anything_starts(strategy):
    with pytest.raises(UnsupportedCombinationError, match=r"16-mixed.*scales the loss.*'tensor' and 'pipeline'"):
        Trainer(accelerator="cpu", strategy=strategy, devices=4, precision="16-mixed")


class Narrow(TruePrecision):
    """A precision of the user's own."""

    def __init__(self):
        super().__init__("bfloat16")
        self.alias = "narrow"


@pytest.mark.parametrize("alias", ["zero1", "zero3", "tensor_parallel", "pipeline", "hybrid"])
def test_a_precision_that_nobody_knows_is_welcome(alias):
    assert Trainer(accelerator="cpu", strategy=alias, devices=2, precision=Narrow()).plan.precision.alias == "narrow"


@pytest.mark.parametrize(
    ("arguments", "devices", "words"),
    [
        ({"data": 2, "tensor": 2}, 2, "data=2 x shard=1 x tensor=2 needs 4 processes, and there are 2"),
        ({"pipeline": 2, "microbatches": 1}, 2, "'1f1b' needs .* microbatches as stages: 1 and 2"),
        ({"pipeline": 2, "split_points": ["a", "b"]}, 2, "one stage per process: 3 stages .* and 2 processes"),
        ({"pipeline": None, "schedule": "interleaved_1f1b", "split_points": ["a"]}, 2, "several stages per process"),
    ],
)
def test_impossible_sizes_refused_early(arguments, devices, words):
    """Numbers that do not fit are refused before anything starts."""
    with pytest.raises(ConfigurationError, match=words):
        Trainer(accelerator="cpu", strategy=HybridStrategy(**arguments), devices=devices)


ALIASES = [
    ("zero1", 2, None),
    ("zero3", 2, None),
    ("tensor_parallel", 2, None),
    ("pipeline", 2, None),
    ("hybrid", 2, {"pipeline": 2, "schedule": "interleaved_1f1b"}),
    ("hybrid", 4, {"data": 2, "pipeline": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("alias, size, arguments", ALIASES, ids=str)
def test_every_function_of_the_trainer(request, alias, size, arguments):
    world = request.getfixturevalue(f"world{size}")
    fitted, validated, predictions = training.everything("single_device", 1, "Transformer")
    for ours in world.run(training.everything, alias, size, "Transformer", arguments, timeout=100):
        assert ours[0]["val_loss"] == pytest.approx(fitted["val_loss"], abs=1e-5)
        assert ours[1]["val_loss"] == pytest.approx(validated["val_loss"], abs=1e-5)
        assert ours[2].shape == predictions.shape
        assert (ours[2] - predictions).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FSDPStrategy(wrap_policy="block"), "'wrap_policy'.*'block'"),
        (lambda: FSDPStrategy(wrap_policy=0), "'wrap_policy'.*0"),
        (lambda: FSDPStrategy(wrap_policy=[int]), "'wrap_policy'.*int"),
        (lambda: FSDPStrategy(activation_checkpointing="nope"), "'activation_checkpointing'.*'nope'"),
        (lambda: HybridStrategy(pipeline=2, schedule="zigzag"), "'zigzag'|'gpipe'"),
        (lambda: HybridStrategy(pipeline=2, split_points=[3]), r"'split_points'.*\[3\]"),
        (lambda: HybridStrategy(tensor=2, plan=["x"]), r"\['x'\]"),
        (lambda: HybridStrategy(tensor=2, plan={"x": "colwize"}), "'colwize'"),
    ],
)
def test_nonsense_is_refused_before_there_is_a_model(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("strategy", ["zero2", "zero3", HybridStrategy(shard=2, data=None)], ids=str)
def test_torch_without_fsdp_setters_refused(monkeypatch, strategy):
    """A torch without the setters of ``fully_shard`` is refused before anything starts."""
    monkeypatch.delattr(FSDPModule, "set_reshard_after_forward")
    with pytest.raises(UnsupportedCombinationError, match=r"needs torch 2\.8 .*FSDPModule\.set_reshard_after_forward"):
        Trainer(accelerator="cpu", strategy=strategy, devices=2, logger=False)
    for other in ("zero1", "tensor_parallel", "pipeline"):
        Trainer(accelerator="cpu", strategy=other, devices=2, logger=False)
