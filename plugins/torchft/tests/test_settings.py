"""Arguments and what stands in for them; models that are refused; a process without TorchFT."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from torchhal import Trainer
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal_torchft.strategy import TorchFTStrategy

ADDRESS = "http://127.0.0.1:9"
VARIABLES = ("TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lighthouse_addr": "nowhere"}, "'lighthouse_addr' must be the lighthouse's address, such as 'http://host:29510'"),
        ({"lighthouse_addr": 29510}, "'lighthouse_addr' must be .*got 29510"),
        ({"replica_rank": 1}, "'num_replica_groups' must be given with 'replica_rank'"),
        ({"num_replica_groups": 2}, "'replica_rank' must be given with 'num_replica_groups'"),
        ({"replica_rank": 2, "num_replica_groups": 2}, "'replica_rank' must be .* at least 0 and at most 1 .got 2"),
        ({"replica_rank": 1, "num_replica_groups": 1}, "at least 0 and at most 0 .got 1"),
        ({"replica_rank": 0, "num_replica_groups": 0}, "'num_replica_groups' must be an int of at least 1"),
        ({"replica_id": "a:b"}, "'replica_id' must be letters, digits, dots, dashes and underscores .got 'a:b'"),
        ({"min_replica_size": True}, "'min_replica_size' must be an int of at least 1 .got True"),
        ({"timeout": 60}, "'timeout' must be a positive datetime.timedelta .got 60"),
        ({"heartbeat_interval": timedelta(0)}, "'heartbeat_interval' must be a positive datetime.timedelta"),
        ({"quorum_timeout": timedelta(seconds=60)}, "'quorum_timeout' must be more than 'timeout'.*got 60 s and 60 s"),
        ({"quorum_retries": -1}, "'quorum_retries' must be an int of at least 0 .got -1"),
        ({"max_retries": 0.5}, "'max_retries' must be an int of at least 0 .got 0.5"),
        ({"init_sync": 1}, "'init_sync' must be a bool .got 1"),
        ({"hostname": ""}, "'hostname' must be this host's name or address"),
        ({"port": 70000}, "'port' must be an int of at least 0 and at most 65535 .got 70000"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        TorchFTStrategy(**{"lighthouse_addr": ADDRESS, **options})


def test_the_environment_stands_in_for_arguments(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"needs a lighthouse.*`torchft_lighthouse --min_replicas 1"):
        Trainer(strategy="torchft", accelerator="cpu", devices=1, logger=False)
    for name, value in zip(VARIABLES, ("host:29510", "1", "3"), strict=True):
        monkeypatch.setenv(name, value)
    found = Trainer(strategy="torchft", accelerator="cpu", devices=1, logger=False).strategy.settings
    assert (found.lighthouse_addr, found.share) == ("http://host:29510", {"num_replicas": 3, "rank": 1})
    assert found.replica_id == "replica_1"
    given = TorchFTStrategy(lighthouse_addr="http://[fd00::1]:1", replica_rank=0, num_replica_groups=2).settings
    assert (given.lighthouse_addr, given.share) == ("http://[fd00::1]:1", {"num_replicas": 2, "rank": 0})
    monkeypatch.setenv("REPLICA_GROUP_ID", "first")
    with pytest.raises(ConfigurationError, match=r"'REPLICA_GROUP_ID' must be a number .got 'first'"):
        TorchFTStrategy()
    monkeypatch.delenv("REPLICA_GROUP_ID")
    with pytest.raises(ConfigurationError, match="'REPLICA_GROUP_ID' must be given with 'NUM_REPLICA_GROUPS'"):
        TorchFTStrategy()


def test_more_than_one_device_is_refused():
    with pytest.raises(UnsupportedCombinationError, match="uses one device"):
        Trainer(accelerator="cpu", strategy=TorchFTStrategy(lighthouse_addr=ADDRESS), devices=2, logger=False)


def test_another_version_is_named_before_anything_is_used(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.1")
    with pytest.raises(ConfigurationError, match=r"works with torchft <0.3,>=0.2.0 \(found torchft 0.1.1\): pip"):
        TorchFTStrategy(lighthouse_addr=ADDRESS)


@pytest.mark.cold_start
def test_the_plugin_loads_without_torchft_and_imports_it_only_to_train():
    """In a process that can't find torchft: listed with the reason. In one that can: not imported by construction."""
    script = """
import importlib.util, json, sys
from torchhal import registry
(record,) = [each for each in registry.plugins() if each.name == "torchft"]
before = "torch" in sys.modules
from torchhal import Trainer
Trainer(strategy="torchft", accelerator="cpu", devices=1, logger=False)
imported = "torchft" in sys.modules
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torchft" else found(name, *rest)
try:
    Trainer(strategy="torchft", accelerator="cpu", devices=1, logger=False)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([record.status, before, imported, said]))
"""
    command = [sys.executable, "-c", script]
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": ADDRESS}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environ)
    assert json.loads(done.stdout) == [
        "loaded", False, False,
        "ConfigurationError: strategy 'torchft' can't be used here: the Python module 'torchft' is not installed",
    ]  # fmt: skip


class Line(torch.nn.Linear):
    """A model whose optimizers a test chooses."""

    def __init__(self, make, automatic=True):
        super().__init__(2, 1)
        self.make, self.automatic_optimization = make, automatic

    def training_step(self, batch, batch_idx):
        return self(batch).sum()

    def configure_optimizers(self):
        return self.make(self)


class Sparse(Line):
    def __init__(self, make):
        super().__init__(make)
        self.embed = torch.nn.Embedding(3, 2, sparse=True)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def plateau(module):
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Line(sgd, automatic=False), "automatic_optimization=False"),
        (Line(lambda m: [torch.optim.SGD([p], lr=0.1) for p in m.parameters()]), "one optimizer.* returned 2"),
        (Line(lambda m: None), "one optimizer.* returned 0"),
        (Line(lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS evaluates the model within a step"),
        (Sparse(sgd), "'embed' has sparse=True"),
        (Line(plateau), "ReduceLROnPlateau goes by a metric"),
    ],
)
def test_models_that_groups_can_not_train_together_are_refused_before_they_meet(model, message):
    trainer = Trainer(
        accelerator="cpu", strategy=TorchFTStrategy(lighthouse_addr=ADDRESS), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedCombinationError, match=f"strategy 'torchft' .*{message}"):
        trainer.fit(model, [torch.ones(4, 2)])
