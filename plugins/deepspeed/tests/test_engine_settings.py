"""What DeepSpeed would refuse, ignore or do otherwise is said before a process starts, with what to do."""

import json
from importlib.metadata import PackageNotFoundError

import engine_training as training
import pytest
import torch
from torch import nn

from torchhal import Trainer
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.memory_estimate import model_memory
from torchhal_deepspeed import _sdk as sdk
from torchhal_deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.timeout(300)


def make(strategy, **options):
    options = {"accelerator": "cpu", "devices": 2, "logger": False, **options}
    return Trainer(strategy=DeepSpeedStrategy(**strategy) if isinstance(strategy, dict) else strategy, **options)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"stage": 4}, "'stage' must be 0, 1, 2 or 3 (got 4)"),
        ({"stage": True}, "'stage' must be 0, 1, 2 or 3 (got True)"),
        ({"stage": 3, "config": {"zero_optimization": {"stage": 2}}}, "'stage' is given twice: 3 as a keyword"),
        ({"config": {"zero_optimisation": {}}}, "did you mean 'zero_optimization'"),
        ({"config": {"zero_optimization": True}}, "must be a dict with a 'stage'"),
        ({"config": 3}, "'config' must be a dict or the path of a JSON file (got 3)"),
        ({"config": "nowhere.json"}, "'nowhere.json' can't be read"),
        ({"config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}}, "can't both be enabled"),
        ({"config": {"pipeline": {"stages": 2}}}, "'pipeline' can't be in the configuration"),
        ({"config": {"activation_checkpointing": {"partition_activations": True}}}, "(activation_checkpointing=Block)"),
        ({"config": {3: 4}}, "have names (got 3)"),
        ({"config": {"optimizer": "Adam"}}, "'optimizer' must be a dict with the name of a class"),
        ({"config": {"scheduler": {}}}, "'scheduler' must be a dict with the name of a class"),
        ({"config": {"gradient_clipping": -1}}, "'gradient_clipping' must be a number, at least 0 (got -1)"),
        ({"config": {"train_batch_size": "8"}}, "'train_batch_size' must be a number, at least 1 (got '8')"),
        ({"stage": 3.0}, "'stage' must be 0, 1, 2 or 3 (got 3.0)"),
        ({"stage": 3, "nvme_path": "/no/such"}, "nothing is (got '/no/such')"),
        ({"activation_checkpointing": "Linear"}, "must be classes of submodules"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, "strategy='tensor_parallel'"),
        ({"config": {"elasticity": {"enabled": True}}}, "it chooses batch sizes"),
        ({"stage": 2, "offload_parameters": "cpu"}, "'offload_param' needs ZeRO stage 3 (got stage 2)"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "'offload_optimizer' needs ZeRO stage 1 or higher"),
        ({"stage": 2, "offload_optimizer": "nvme"}, "'nvme' needs ZeRO stage 3"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "nvme_path='/local_nvme'"),
        ({"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/no/such"}, "must be a folder that exists"),
        ({"stage": 3, "offload_optimizer": "disk"}, "must be 'cpu', 'nvme' or a dict"),
    ],
)
def test_before_deepspeed_is_asked(arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedStrategy(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        (
            {"reduce_buckets": 1},
            {},
            "no option of DeepSpeed's ZeRO; did you mean 'reduce_bucket_size'",
        ),
        ({"stage": 2, "reduce_bucket_size": -1}, {}, "DeepSpeed refuses 'zero_optimization': reduce_bucket_size"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {}, "Partial offloading only supported"),
        ({"config": {"scheduler": {"type": "StepLR"}}}, {}, "must be one of LRRangeTest"),
        ({"config": {"optimizer": {"type": "AdamX"}}}, {}, "or of torch.optim (got 'AdamX'; did you mean 'Adam"),
        ({"config": {"bf16": {"enabled": True}}}, {}, "use precision='bf16-mixed'"),
        (
            {"config": {"bf16": {"enabled": False}}},
            {"precision": "bf16-mixed"},
            "which the DeepSpeed configuration disables",
        ),
        ({"stage": 0}, {"precision": "bf16-mixed"}, "use stage 1, or strategy='ddp'"),
        (
            "deepspeed",
            {"precision": "64-true"},
            "precision '64-true' needs store:float64, which strategy 'deepspeed' can't carry",
        ),
        ("deepspeed_stage_3_offload_nvme", {}, "nvme_path='/local_nvme'"),
    ],
)
def test_before_a_process_starts(arguments, options, words):
    with pytest.raises((ConfigurationError, UnsupportedCombinationError)) as caught:
        make(arguments, **options)
    assert words in str(caught.value)


def test_nvme_needs_its_operator(tmp_path, monkeypatch):
    import deepspeed

    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "async_io", False)
    with pytest.raises(ConfigurationError, match="libaio"):
        make({"stage": 3, "offload_optimizer": "nvme", "nvme_path": tmp_path})


@pytest.mark.parametrize(
    "config, options, words",
    [
        ({"gradient_accumulation_steps": 4}, {}, "give it to the Trainer alone"),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, "by Trainer(gradient_clip_val=0.5)"),
        ({}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "must be 'norm' under DeepSpeed"),
        ({"train_batch_size": 7}, {}, "must be divisible by 1 batch(es) per step times 2 rank(s)"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {}, "must be 4, which is"),
        ({"optimizer": {"type": "Adam"}}, {}, "configure_optimizers returns an optimizer"),
    ],
)
def test_before_anything_is_trained(world2, config, options, words):
    outcomes = world2.outcomes(training.fit_options, {"config": config}, options, "Net", timeout=200)
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}
    assert words in outcomes[0].message


@pytest.mark.parametrize(
    "stage, model, error, words",
    [
        (2, "TwoOptimizers", "ConfigurationError", "one optimizer"),
        (2, "Closure", "ModelError", "LBFGS"),
        (2, "OwnClipping", "ModelError", "configure_gradient_clipping"),
        (2, "SparseGradients", "ModelError", "sparse=True"),
        (2, "BoundedRows", "ModelError", "'words' is an Embedding with max_norm=1.0"),
        (2, "Double", "ModelError", "'head.weight' of Double is torch.float64"),
        (2, "Torn", "ModelError", "rank 0 computes its loss with 'own.0.bias' of Torn, and rank 1 without it"),
        (2, "ClippingByHand", "ConfigurationError", "config={'gradient_clipping': 0.5}"),
        (2, "Unfrozen", "ModelError", "in Unfrozen 'frozen.bias' and 1 other(s) were unfrozen in the midst of a run"),
        (3, "Shaped", "ModelError", "'scalar' of Shaped has the shape ()"),
        (3, "Nothing", "ModelError", "'nothing' of Nothing has the shape (0,)"),
    ],
)
def test_models_that_the_engine_cannot_train(world2, stage, model, error, words):
    outcomes = world2.outcomes(training.fit_options, {"stage": stage}, {"max_epochs": 2}, model, timeout=200)
    assert {outcome.error for outcome in outcomes} == {error}
    assert words in outcomes[0].message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_statistics_that_the_device_cannot_mix_with_the_weights(world2, stage):
    for said, steps in world2.run(training.refused_and_mended, stage, timeout=200):
        assert said[0] == ("ConfigurationError", "'buffer_dtype' must be 'bf16', 'fp16' or 'fp32' (got 'half a byte')")
        kind, words = said[1]
        assert kind == "ModelError"
        assert "'norm' of Net would have statistics in torch.float32 and weights in torch.bfloat16" in words
        assert 'config={"data_types": {"buffer_dtype": "bf16"}}' in words
        assert len(said) == 2 and steps == 2


def test_a_file_and_a_dict_say_the_same(tmp_path):
    config = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "train_batch_size": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    from_file, from_dict = DeepSpeedStrategy(config=path), DeepSpeedStrategy(config=config)
    assert from_file.config == from_dict.config == {"zero_optimization": {"stage": 3, "overlap_comm": False}}
    assert config["train_batch_size"] == "auto"
    assert DeepSpeedStrategy().stage == 2
    idle = {"amp": {"enabled": False}, "pipeline": {}, "activation_checkpointing": {"cpu_checkpointing": False}}
    assert DeepSpeedStrategy(config=idle).config == DeepSpeedStrategy().config
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="is no JSON"):
        DeepSpeedStrategy(config=path)


@pytest.mark.parametrize("found, words", [("0.18.2", "works with deepspeed"), (None, "is not installed")])
def test_another_version_or_none_is_named_before_use(monkeypatch, found, words):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(ConfigurationError, match=words) as caught:
        DeepSpeedStrategy()
    assert "torchhal-deepspeed[vendor]" in str(caught.value)


def test_a_device_that_deepspeed_does_not_know():
    with pytest.raises(ConfigurationError, match="no support for devices of type 'meta'"):
        sdk.load("meta")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_is_estimated(stage):
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    size = 4 * 1024 * 1024
    estimate = DeepSpeedStrategy(stage=stage).memory_per_rank(
        model_memory(model, [torch.optim.Adam(model.parameters())]), 4
    )
    assert estimate.optimizer == 2 * size // 4
    assert estimate.gradients == (size // 4 if stage > 1 else size)
    assert estimate.parameters == (size // 4 if stage == 3 else size) + size // 4  # the optimizer's own fp32 values
