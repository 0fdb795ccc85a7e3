"""What is said where Colossal-AI is missing, of another version or without what it imports, and of its options."""

import pickle
import subprocess
import sys
from importlib import metadata

import pytest

from torchhal import Trainer
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal_colossalai import ColossalAIDDPStrategy, ColossalAIStrategy, ColossalAIZeroStrategy


@pytest.fixture
def versions(monkeypatch):
    """Sets the versions that are found: None for none."""
    real, found = metadata.version, {}

    def version(name):
        if name not in found:
            return real(name)
        if found[name] is None:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    return found


@pytest.fixture
def installed(versions):
    from torchhal_colossalai import _sdk as sdk

    versions |= {"colossalai": "0.5.0", **dict.fromkeys(sdk.IMPORTED, "1.0")}
    return versions


def test_missing(versions):
    versions["colossalai"] = None
    answer = ColossalAIStrategy.availability()
    assert not answer and "strategy 'colossalai' needs the package colossalai, which is not installed" in answer.reason
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps colossalai==0\.5\.0"):
        ColossalAIStrategy()


@pytest.mark.parametrize("number", ["0.4.9", "0.6.0"])
def test_another_version(versions, number):
    versions["colossalai"] = number
    with pytest.raises(ConfigurationError, match=rf"works with colossalai ==0\.5\.0 \(found colossalai {number}\)"):
        ColossalAIStrategy()


def test_what_it_imports_is_missing(installed):
    assert ColossalAIStrategy.availability()
    installed |= {"galore_torch": None, "peft": None}
    with pytest.raises(ConfigurationError, match="needs peft, galore_torch, which colossalai imports and are missing"):
        ColossalAIZeroStrategy()


def test_an_import_that_fails_says_with_which_torch(installed, monkeypatch):
    import torch

    from torchhal_colossalai import _sdk as sdk

    monkeypatch.setattr(sdk.COLOSSALAI, "_import_failure", "")
    monkeypatch.setitem(sys.modules, "colossalai", None)
    monkeypatch.setattr(sdk.COLOSSALAI, "_is_missing", lambda error: False)
    with pytest.raises(ConfigurationError) as error:
        sdk.load()
    assert "colossalai" in str(error.value)
    assert torch.__version__ in str(error.value) or "halted" in str(error.value)


def test_the_plugin_is_chosen_by_its_name(installed):
    assert type(ColossalAIStrategy()) is ColossalAIDDPStrategy
    chosen = ColossalAIStrategy(plugin="low_level_zero", options={"stage": 2})
    assert type(chosen) is ColossalAIZeroStrategy and chosen.stage == 2
    assert type(pickle.loads(pickle.dumps(chosen))) is ColossalAIZeroStrategy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plugin": "lowlevel_zero"}, "did you mean 'low_level_zero'"),
        ({"plugin": 3}, "'plugin' must be 'torch_ddp', 'low_level_zero', 'gemini' or 'hybrid_parallel'"),
        ({"options": [1]}, "must be a dict of arguments of TorchDDPPlugin"),
        ({"options": {"bucket_cap": 5}}, "did you mean 'bucket_cap_mb'"),
        ({"options": {"bucket_cap_mb": "5"}}, "must be a positive number"),
        ({"options": {"static_graph": 1}}, "must be a bool"),
        ({"options": {"fp8_communication": True}}, "isn't handed on: it rounds what is sent to 8 bits"),
        ({"plugin": "low_level_zero", "options": {"stage": 3}}, "must be 1 or 2"),
        ({"plugin": "low_level_zero", "options": {"precision": "bf16"}}, r"Trainer\(precision=...\)"),
        ({"plugin": "low_level_zero", "options": {"max_norm": 1.0}}, r"Trainer\(gradient_clip_val=...\)"),
        ({"plugin": "low_level_zero", "options": {"overlap_communication": True}}, "there is no overlap"),
        ({"plugin": "gemini", "options": {"chunks": 1}}, "GeminiPlugin has no option 'chunks'"),
        ({"plugin": "hybrid_parallel", "options": {"tp": 1}}, "HybridParallelPlugin has no option 'tp'"),
    ],
)
def test_arguments(installed, arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        ColossalAIStrategy(**arguments)


def test_an_option_that_is_no_argument(installed):
    with pytest.raises(TypeError, match=r"takes no argument 'bucket_cap_mb': those .* go into options=\{...\}"):
        ColossalAIStrategy(bucket_cap_mb=5)
    with pytest.raises(ConfigurationError, match="is the booster's plugin 'low_level_zero'"):
        ColossalAIZeroStrategy(plugin="torch_ddp")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plugin": "gemini"}, "it moves chunks of parameters by streams and memory statistics of CUDA or NPU"),
        ({"plugin": "hybrid_parallel", "options": {"tp_size": 2, "pp_size": 1}}, "only models of transformers"),
    ],
)
def test_what_a_cpu_cannot_run_is_refused_before_launch(installed, arguments, said):
    with pytest.raises(UnsupportedCombinationError, match=f"can't work on a CPU: .*{said}"):
        Trainer(accelerator="cpu", devices=2, strategy=ColossalAIStrategy(**arguments), logger=False)


def test_the_alias_of_gemini_is_refused_before_launch(installed):
    with pytest.raises(UnsupportedCombinationError, match=r"strategy 'colossalai_gemini'.*Use 'zero3'"):
        Trainer(accelerator="cpu", devices=2, strategy="colossalai_gemini", logger=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_is_estimated(installed, stage):
    import torch

    from torchhal.memory_estimate import model_memory

    model, size = torch.nn.Linear(1024, 1024, bias=False, device="meta"), 4 * 1024 * 1024
    strategy = ColossalAIStrategy(plugin="low_level_zero", options={"stage": stage})
    estimate = strategy.memory_per_rank(model_memory(model, [torch.optim.Adam(model.parameters())]), 4)
    assert (estimate.optimizer, estimate.gradients, estimate.parameters) == (2 * size // 4, size, size)
    assert ("whole gradients until backward has ended" in estimate.note) is (stage == 2)


def test_importing_the_package_imports_neither_torch_nor_colossalai():
    code = (
        "import sys; before = set(sys.modules)\n"
        "from torchhal_colossalai import _plugin\n_plugin.torchhal_strategies()\n"
        "print(sorted({'torch', 'colossalai'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
