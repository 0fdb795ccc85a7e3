"""What a peer is told, without any peer: arguments, environment, the package that is or isn't there."""

import json
import subprocess
import sys

import pytest
import torch

from torchhal import Trainer, registry
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal_hivemind._config import PEERS, RUN_ID, TARGET_BATCH_SIZE
from torchhal_hivemind.strategy import HivemindStrategy

PEER = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (PEERS, RUN_ID, TARGET_BATCH_SIZE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_batch_size": None}, "'target_batch_size' must be given.*TORCHHAL_HIVEMIND_TARGET_BATCH_SIZE"),
        ({"target_batch_size": 0}, r"'target_batch_size' must be an int of at least 1 \(got 0\)"),
        ({"target_batch_size": True}, "'target_batch_size' must be an int"),
        ({"target_batch_size": 2.0}, "'target_batch_size' must be an int"),
        ({"batch_size": 0}, "'batch_size' must be an int of at least 1"),
        ({"average_state_every": 0}, "'average_state_every' must be an int"),
        ({"run_id": "a.b"}, "'run_id' must be letters, digits"),
        ({"initial_peers": "10.0.0.1:4000"}, "'initial_peers' must be multiaddresses such as"),
        ({"initial_peers": "/ip4/10.0.0.1/tcp/4000"}, "'initial_peers' must be addresses that end with the peer's"),
        ({"initial_peers": 3}, "'initial_peers' must be addresses, several"),
        ({"host_addresses": ["0.0.0.0"]}, "'host_addresses' must be multiaddresses"),
        ({"averaging": "weights"}, "'averaging' must be one of 'gradients', 'state'"),
        ({"compression": "zip"}, "'compression' must be one of 'none', 'float16'"),
        ({"compression": "float16", "averaging": "state"}, "'compression' is for gradients.*'state_compression'"),
        ({"matchmaking_time": 0}, "'matchmaking_time' must be a number of seconds above 0"),
        ({"matchmaking_time": float("nan")}, "'matchmaking_time' must be a number of seconds"),
        ({"request_timeout": 20.0}, "'request_timeout' must be less than 'matchmaking_time' .*20 s and 15 s"),
        ({"matchmaking_time": 90.0}, "'matchmaking_time' must be less than 'averaging_timeout'"),
        ({"client_mode": "yes"}, "'client_mode' must be a bool"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ConfigurationError, match=message):
        HivemindStrategy(**{"target_batch_size": 64, **options})


def test_the_environment_speaks_where_no_argument_does(monkeypatch):
    monkeypatch.setenv(PEERS, f" {PEER},{PEER.replace('/tcp/9/', '/tcp/10/')} ,")
    monkeypatch.setenv(TARGET_BATCH_SIZE, "128")
    monkeypatch.setenv(RUN_ID, "from_env")
    found = Trainer(strategy="collaborative", accelerator="cpu", devices=1, logger=False).strategy.settings
    assert found.initial_peers == (PEER, PEER.replace("/tcp/9/", "/tcp/10/"))
    assert (found.target_batch_size, found.run_id, found.request_timeout) == (128, "from_env", 3.0)
    given = HivemindStrategy(target_batch_size=8, run_id="mine", initial_peers=[PEER], matchmaking_time=2.0).settings
    assert (given.target_batch_size, given.run_id, given.initial_peers) == (8, "mine", (PEER,))
    assert given.request_timeout == 1.0
    monkeypatch.setenv(TARGET_BATCH_SIZE, "many")
    with pytest.raises(ConfigurationError, match=f"'{TARGET_BATCH_SIZE}' must be an int of at least 1 .got 'many'"):
        HivemindStrategy()


@pytest.mark.parametrize("precision", ["16-mixed", "64-true"])
def test_precisions_that_averages_would_spoil_are_refused(precision):
    rule = f"'{precision}' needs .*, which strategy 'HivemindStrategy' can't carry"
    with pytest.raises(UnsupportedCombinationError, match=rule):
        Trainer(accelerator="cpu", strategy=HivemindStrategy(target_batch_size=8), precision=precision, logger=False)


def test_more_than_one_device_is_refused():
    with pytest.raises(UnsupportedCombinationError, match="uses one device"):
        Trainer(accelerator="cpu", strategy=HivemindStrategy(target_batch_size=8), devices=2, logger=False)


def test_another_version_is_named_before_anything_is_used(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.1")
    with pytest.raises(ConfigurationError, match=r"works with hivemind <1.2,>=1.1.12 \(found hivemind 1.0.1\): pip"):
        HivemindStrategy(target_batch_size=8)


@pytest.mark.cold_start
def test_the_plugin_loads_without_hivemind_and_says_so(monkeypatch):
    """In a process that can't import hivemind: it is listed with the reason, and refused with it."""
    script = """
import importlib.util, json, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "hivemind" else found(name, *rest)
from torchhal import registry
(record,) = [each for each in registry.plugins() if each.name == "hivemind"]
listed = [entry.to_dict() for entry in record.components]
before = "torch" in sys.modules
from torchhal import Trainer
try:
    Trainer(strategy="hivemind", accelerator="cpu", devices=1, logger=False)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([record.status, listed, before, said, "hivemind" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    status, (listed,), torch_imported, said, imported = json.loads(done.stdout)
    assert (status, listed["alias"], listed["aliases"]) == ("loaded", "hivemind", ["collaborative"])
    assert (listed["available"], listed["reason"]) == (False, "the Python module 'hivemind' is not installed")
    assert said == (
        "ConfigurationError: strategy 'hivemind' can't be used here: the Python module 'hivemind' is not installed"
    )
    assert not torch_imported and not imported


def test_neither_discovery_nor_construction_imports_hivemind():
    script = """
import sys
from torchhal import Trainer, registry
registry.plugins()
from torchhal_hivemind.strategy import HivemindStrategy
Trainer(strategy=HivemindStrategy(target_batch_size=8), accelerator="cpu", devices=1, logger=False)
print("hivemind" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
    assert registry.find("strategy", "hivemind").load() is HivemindStrategy


class Line(torch.nn.Linear):
    """A model whose optimizers a test chooses."""

    def __init__(self, make, automatic=True):
        super().__init__(2, 1)
        self.make, self.automatic_optimization = make, automatic

    def training_step(self, batch, batch_idx):
        return self(batch).sum()

    def configure_optimizers(self):
        return self.make(self)


class Clips(Line):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class Sparse(Line):
    def __init__(self, make):
        super().__init__(make)
        self.embed = torch.nn.Embedding(3, 2, sparse=True)


class Bounded(Line):
    def __init__(self, make):
        super().__init__(make)
        self.embed = torch.nn.Embedding(3, 2, max_norm=1.0)


def sgd(module, **options):
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def scheduled(interval, kind=torch.optim.lr_scheduler.StepLR, *arguments, **config):
    def make(module):
        optimizer = sgd(module)
        scheduler = {"scheduler": kind(optimizer, *arguments), "interval": interval, **config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return make


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Line(sgd, automatic=False), "automatic_optimization=False"),
        (Line(lambda m: [torch.optim.SGD([p], lr=0.1) for p in m.parameters()]), "one optimizer.* returned 2"),
        (Line(lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS evaluates the model within a step"),
        (Line(lambda m: None), "one optimizer.* returned 0"),
        (Clips(sgd), "Clips.configure_gradient_clipping .*gradient_clip_val"),
        (Sparse(sgd), "'embed' has sparse=True"),
        (Line(sgd).double(), "holds a parameter of torch.float64"),
        (
            Line(scheduled("epoch", torch.optim.lr_scheduler.StepLR, 1)),
            "StepLR has interval='epoch'.*'interval': 'step'",
        ),
        (
            Line(scheduled("step", torch.optim.lr_scheduler.ReduceLROnPlateau, monitor="loss")),
            "ReduceLROnPlateau goes by a metric",
        ),
    ],
)
def test_models_that_can_not_be_trained_together_are_refused_before_a_process_starts(model, message):
    trainer = Trainer(
        accelerator="cpu", strategy=HivemindStrategy(target_batch_size=8), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedCombinationError, match=f"strategy 'hivemind' .*{message}"):
        trainer.fit(model, [torch.ones(4, 2)])
    assert "hivemind.dht" not in sys.modules


def test_rows_that_a_lookup_would_scale_on_each_peer_by_itself_are_refused():
    trainer = Trainer(
        accelerator="cpu", strategy=HivemindStrategy(target_batch_size=8), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"'embed' is an Embedding with max_norm=1.0.* each peer would look up"):
        trainer.fit(Bounded(sgd), [torch.ones(4, 2)])
    assert "hivemind.dht" not in sys.modules


@pytest.mark.parametrize("averaging", ["gradients", "state"])
def test_a_hook_can_not_clip_what_is_not_averaged_yet(averaging):
    """With averaging="state" each step is a peer's own, whose gradients a hook sees as they are."""
    strategy = HivemindStrategy(target_batch_size=8, averaging=averaging)
    Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    optimizer = sgd(line := torch.nn.Linear(2, 1))
    line.weight.grad = torch.tensor([[3.0, 4.0]])
    strategy.trainer = object()
    if averaging == "gradients":
        with pytest.raises(UnsupportedCombinationError, match=r"clip_gradients\(0.5\).*Trainer\(gradient_clip_val"):
            strategy.clip_gradients(optimizer, 0.5)
        assert line.weight.grad.norm() == 5.0
    else:
        assert strategy.clip_gradients(optimizer, 0.5) == 5.0
        torch.testing.assert_close(line.weight.grad, torch.tensor([[0.3, 0.4]]))
