"""The bytes that strategies predict for each phase of a step, against the peak of real runs on simulated devices."""

import json

import memory_models
import pytest
import torch
from held_out_models import HELD_OUT
from memory_models import MODELS, measured_peak, predicted

from torchhal import cli, registry
from torchhal.memory_estimate import build_model, model_memory
from torchhal.step_memory import unknown_step
from torchhal.trainer._fake_step import FakeStep

pytestmark = [pytest.mark.timeout(170)]

EVERY = MODELS | HELD_OUT

ALL = tuple(MODELS)
IN_STAGES = ("Deep", "Wide", "Conv", "Transformer", "Embedding")
"""Models that a pipeline can divide: a tied weight would be in two stages."""

IN_PARTS = ("Deep", "Wide", "Transformer", "Embedding", "Tied")
"""Models with a tensor_parallel_plan."""

SHARDED_DATA = {"zero1": ALL, "zero2": ALL, "zero3": ALL}

MESHES = [
    ({"data": 1, "shard": 2, "tensor": 2}, ("Deep", "Wide", "Transformer")),
    ({"data": 1, "shard": 2, "pipeline": 2}, ("Deep", "Conv", "Transformer")),
    ({"data": 1, "tensor": 2, "pipeline": 2}, ("Deep", "Transformer")),
    ({"data": 2, "pipeline": 2}, ("Wide", "Conv", "Transformer")),
    ({"data": 2, "shard": 2}, ("Wide", "Transformer")),
]

HELD_OUT_IN_STAGES = (
    "Gru", "Mixer", "MixedMixer", "Gpt", "HalfGpt", "MixedGpt", "RecomputingGpt", "Experts", "Vit", "Frozen", "ResNet",
    "Wave", "LargeBatch", "LargeHead", "Fourier",
)  # fmt: skip

HELD_OUT_IN_PARTS = (
    "Mixer", "MixedMixer", "Gpt", "HalfGpt", "MixedGpt", "RecomputingGpt", "Experts", "Vit", "Translation", "Repeating",
    "LargeHead",
)  # fmt: skip

HELD_OUT_MESHES = [
    ({"data": 1, "shard": 2, "tensor": 2}, ("Mixer", "Gpt", "Translation")),
    ({"data": 1, "shard": 2, "pipeline": 2}, ("Experts", "Gpt", "Frozen", "Wave")),
    ({"data": 1, "tensor": 2, "pipeline": 2}, ("MixedMixer", "Vit")),
    ({"data": 2, "pipeline": 2}, ("Gru", "ResNet")),
    ({"data": 2, "shard": 2}, ("UNet", "Lstm")),
]


@pytest.fixture(autouse=True)
def sim():
    pytest.importorskip("torchhal_simulator").load()


def create(alias, options):
    return registry.find("strategy", alias).create(**options)


def measured(name, alias, options, devices):
    return measured_peak(EVERY[name], create(alias, options) if options else alias, devices)


def predict(name, alias, options, world_size):
    return predicted(EVERY[name], create(alias, options), world_size)


def compare(world, name, alias, options, tolerance):
    peak = max(world.run(measured, name, alias, options, world.size, timeout=120))
    found = predict(name, alias, options, world.size)
    assert found.peak == pytest.approx(peak, rel=tolerance), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("alias", "tolerance"), [("ddp", 0.02), *((alias, 0.15) for alias in SHARDED_DATA)])
def test_data_parallel_on_two_ranks(world2, alias, tolerance, name):
    compare(world2, name, alias, {}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("alias", "tolerance"), [("ddp", 0.02), *((alias, 0.15) for alias in SHARDED_DATA)])
def test_data_parallel_on_four_ranks(world4, alias, tolerance, name):
    compare(world4, name, alias, {}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "name"), [*(("tensor_parallel", name) for name in IN_PARTS), *(("pipeline", name) for name in IN_STAGES)]
)
def test_model_parallel_on_two_ranks(world2, alias, name):
    compare(world2, name, alias, {}, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("tensor_parallel", name) for name in IN_PARTS),
        *(("pipeline", name) for name in ("Deep", "Conv", "Transformer")),
    ],
)
def test_model_parallel_on_four_ranks(world4, alias, name):
    compare(world4, name, alias, {}, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "name"), [(axes, name) for axes, names in MESHES for name in names])
def test_hybrid_on_four_ranks(world4, axes, name):
    compare(world4, name, "hybrid", axes, 0.2)


@pytest.mark.parametrize(
    ("alias", "name", "tolerance"),
    [("ddp", "Buffers", 0.02), ("zero1", "UNet", 0.15), ("zero3", "Gpt", 0.15), ("pipeline", "HalfGpt", 0.2)],
)
def test_some_models_that_nothing_was_fitted_to(world2, alias, name, tolerance):
    """Adagrad's state, which begins before the steps; outputs in 16 bits, compared in 64; large buffers."""
    compare(world2, name, alias, {}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize(("alias", "tolerance"), [("ddp", 0.02), *((alias, 0.15) for alias in SHARDED_DATA)])
def test_data_parallel_held_out_on_two_ranks(world2, alias, tolerance, name):
    compare(world2, name, alias, {}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lstm", "UNet", "MixedGpt", "Experts", "Frozen", "ResNet"])
@pytest.mark.parametrize(("alias", "tolerance"), [("ddp", 0.02), *((alias, 0.15) for alias in SHARDED_DATA)])
def test_data_parallel_held_out_on_four_ranks(world4, alias, tolerance, name):
    compare(world4, name, alias, {}, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("tensor_parallel", name) for name in HELD_OUT_IN_PARTS),
        *(("pipeline", name) for name in HELD_OUT_IN_STAGES),
    ],
)
def test_model_parallel_held_out_on_two_ranks(world2, alias, name):
    compare(world2, name, alias, {}, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("tensor_parallel", name) for name in ("MixedGpt", "Vit", "Translation")),
        *(("pipeline", name) for name in ("Mixer", "Experts", "ResNet")),
    ],
)
def test_model_parallel_held_out_on_four_ranks(world4, alias, name):
    compare(world4, name, alias, {}, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "name"), [(axes, name) for axes, names in HELD_OUT_MESHES for name in names])
def test_hybrid_held_out_on_four_ranks(world4, axes, name):
    compare(world4, name, "hybrid", axes, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "options", "name", "tolerance"),
    [
        ("zero3", {"activation_checkpointing": "blocks"}, "Transformer", 0.15),
        ("zero3", {"activation_checkpointing": "blocks"}, "Conv", 0.15),
        ("zero3", {"wrap_policy": "none"}, "Wide", 0.15),
        ("zero3", {"cpu_offload": True}, "Transformer", 0.15),
        ("ddp", {"gradient_as_bucket_view": True}, "Deep", 0.02),
        ("ddp", {"gradient_as_bucket_view": True}, "Transformer", 0.02),
        ("zero1", {"gradient_as_bucket_view": True}, "Embedding", 0.15),
        ("pipeline", {"schedule": "gpipe"}, "Transformer", 0.2),
        ("pipeline", {"microbatches": 4}, "Conv", 0.2),
    ],
)
def test_options_on_two_ranks(world2, alias, options, name, tolerance):
    compare(world2, name, alias, options, tolerance)


def test_what_decides_is_named():
    """Of zero3: the block whose parameters are gathered; of zero1: the parameter that is sent."""
    found = predict("Wide", "zero3", {}, 2)
    assert (found.phase, found.unit) == ("backward", "blocks.1")
    found = predict("Deep", "zero1", {}, 2)
    assert found.phase == "optimizer" and found.unit.startswith("layers.") and "sent by rank" in found.unit
    assert predict("Deep", "zero3", {}, 4).phase == "setup", "the whole model, and the message with its weights"


def test_a_model_of_configure_model_is_never_whole():
    class Made(memory_models.Deep):
        def configure_model(self):
            """Would build the layers here."""

    module = build_model(Made)
    model = model_memory(module, [module.configure_optimizers()])
    step = FakeStep(module, model.optimizers, Made.batch(4), device_type="sim").measure()
    assert create("zero3", {}).memory_by_phase(step, model, 4).setup is None


def test_more_ranks_take_less_and_other_options_what_they_say():
    peaks = {}
    for alias, options in (("zero1", {}), ("zero2", {}), ("zero3", {}), ("pipeline", {}), ("tensor_parallel", {})):
        peaks[alias] = [predict("Transformer", alias, options, size).peak for size in (2, 4)]
        assert peaks[alias][0] > peaks[alias][1], alias
    assert peaks["zero1"] > peaks["zero2"] > peaks["zero3"]
    plain = predict("Transformer", "zero3", {}, 2)
    assert predict("Transformer", "zero3", {"activation_checkpointing": "blocks"}, 2).peak < 0.8 * plain.peak
    offloaded = predict("Transformer", "zero3", {"cpu_offload": True}, 2)
    assert plain.optimizer.bytes > 10 * offloaded.optimizer.bytes
    held = 3 * 4 * 2547840 / 2  # parameters and two states, on two ranks
    assert plain.backward.bytes - offloaded.backward.bytes == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("alias", ["ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline", "hybrid", "dp"])
def test_of_an_unknown_step_the_note_says_so(alias):
    module = build_model(memory_models.Transformer)
    model = model_memory(module, [module.configure_optimizers()])
    strategy = create(alias, {})
    found = strategy.memory_by_phase(unknown_step(model, "it reads values"), model, 2)
    assert "unknown" in found.note
    assert found.peak >= strategy.memory_per_rank(model, 2).total


def test_dp_divides_the_batch_among_its_devices():
    module = build_model(memory_models.Conv)
    model = model_memory(module, [module.configure_optimizers()])
    strategy = create("dp", {})
    step = FakeStep(module, model.optimizers, memory_models.Conv.batch(16), device_type="sim").measure()
    whole = strategy.memory_by_phase(step, model, 1)
    strategy.devices = [torch.device("sim", index) for index in range(2)]
    half = strategy.memory_by_phase(step, model, 1)
    assert half.backward.bytes < 0.6 * whole.backward.bytes and "of the first of 2 devices" in half.note
    assert half.optimizer.bytes == pytest.approx(whole.optimizer.bytes, rel=0.05)


def test_explain_has_phases_of_every_strategy(capfd, monkeypatch, tmp_path):
    (tmp_path / "phases_file.py").write_text("from memory_models import Transformer\nbatch = Transformer.batch(8)\n")
    monkeypatch.chdir(tmp_path)
    command = ["explain", "--accelerator", "cpu", "--devices", "4", "--model", "phases_file:Transformer"]
    assert cli.main([*command, "--batch", "phases_file:batch", "--memory", "48MiB", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["memory"]["strategies"]
    peaks = {row["strategy"]: row["by_phase"]["peak"] for row in rows if "by_phase" in row}
    assert {"single_device", "ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline", "dp"} <= set(peaks)
    assert peaks["ddp"] > peaks["zero1"] > peaks["zero3"] > peaks["pipeline"]
    fits = {row["strategy"]: row["fits"] for row in rows if "by_phase" in row}
    assert fits["pipeline"] and not fits["ddp"]
