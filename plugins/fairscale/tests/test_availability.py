"""What is said where fairscale is missing, of another version, or broken."""

import sys
from importlib import metadata

import pytest
from torch import nn

from torchhal.accelerators import CPUAccelerator
from torchhal.errors import ConfigurationError
from torchhal_fairscale import (
    FairscaleFSDPStrategy,
    FairscaleOSSStrategy,
    FairscalePipeStrategy,
    FairscaleSDPStrategy,
    _sdk,
)

ALL = pytest.mark.parametrize("strategy", [FairscaleOSSStrategy, FairscaleSDPStrategy, FairscalePipeStrategy])


@pytest.fixture
def version(monkeypatch):
    """Sets the version of fairscale that is found: None for none."""
    real = metadata.version

    def found(name):
        if name != "fairscale":
            return real(name)
        if found.version is None:
            raise metadata.PackageNotFoundError(name)
        return found.version

    monkeypatch.setattr(metadata, "version", found)
    return lambda number: setattr(found, "version", number)


@ALL
def test_missing(version, strategy):
    version(None)
    answer = strategy.availability()
    assert not answer and "torchhal-fairscale needs the package fairscale, which is not installed" in answer.reason
    with pytest.raises(ConfigurationError, match=r"pip install 'torchhal-fairscale\[vendor\]'"):
        strategy()


@ALL
@pytest.mark.parametrize("number", ["0.4.12", "0.4.14"])
def test_another_version(version, strategy, number):
    version(number)
    with pytest.raises(ConfigurationError, match=rf"works with fairscale ==0.4.13 \(found fairscale {number}\)"):
        strategy()


def test_a_package_that_does_not_import(version, monkeypatch, tmp_path):
    (tmp_path / "fairscale.py").write_text("import torch._a_name_of_another_release")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairscale"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_sdk.FAIRSCALE, "_import_failure", "")
    version("0.4.13")
    strategy = FairscaleOSSStrategy(accelerator=CPUAccelerator())
    with pytest.raises(
        ConfigurationError, match=r"fairscale can't be imported with torch .*_a_name_of_another_release"
    ):
        strategy.setup_environment()
    monkeypatch.delitem(sys.modules, "fairscale", raising=False)


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (FairscaleSDPStrategy, {"find_unused_parameters": 1}, "must be a bool"),
        (FairscaleOSSStrategy, {"activation_checkpointing": "Linear"}, "must be a class of layers"),
        (FairscaleOSSStrategy, {"activation_checkpointing": nn.Linear(1, 1)}, "must be a class of layers"),
        (FairscaleOSSStrategy, {"activation_checkpointing": nn.Sequential(nn.Linear(1, 1))}, "must be a class of"),
        (FairscalePipeStrategy, {"checkpoint": "sometimes"}, "must be one of always"),
        (FairscalePipeStrategy, {"chunks": 0}, "at least 1"),
        (FairscalePipeStrategy, {"balance": [1, 0]}, "at least 1 each"),
    ],
)
def test_arguments(version, strategy, options, said):
    version("0.4.13")
    with pytest.raises(ConfigurationError, match=said):
        strategy(**options)


def test_fully_sharded_data_parallel_is_refused_by_name():
    assert "Use strategy='fsdp' or 'zero3'" in FairscaleFSDPStrategy.availability().reason
    with pytest.raises(ConfigurationError, match="KeyError: 'all_gather'"):
        FairscaleFSDPStrategy()
