"""Test plans in processes that exist already: torchrun, other cluster environments, hosts without a launcher."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from plans import Fake, fake, plan

from torchhal.cluster import LocalEnvironment
from torchhal.errors import (
    ConfigurationError,
    UnsupportedCombinationError,
)
from torchhal.launchers import MultiprocessingLauncher
from torchhal.strategies import SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]


def test_torchrun_is_detected(torchrun):
    torchrun(2)
    found = plan(strategy="ddp", devices=2)
    assert found.cluster_environment.alias == "torchelastic" and found.world_size == 2
    assert found.cluster_environment.reason == "detected from the environment"
    assert (found.launcher, found.launcher_reason) == ("none", "torchelastic has started the processes")


def test_two_nodes_under_torchrun(torchrun):
    torchrun(2, nodes=2)
    assert plan(devices=2, num_nodes=2).world_size == 4
    with pytest.raises(ConfigurationError, match=r"2 node\(s\) .*1 node\(s\)"):
        plan(devices=2)


def test_auto_nodes_follow_torchrun(torchrun):
    torchrun(2, nodes=2)
    found = plan(num_nodes="auto", devices=2)
    assert (found.num_nodes, found.world_size) == (2, 4)
    torchrun(2, nodes=1)
    assert plan(num_nodes="auto", devices=2).num_nodes == 1


def test_auto_nodes_without_launcher():
    """num_nodes="auto" is one node where nobody has started processes."""
    assert plan(num_nodes="auto", devices=2, strategy="ddp").num_nodes == 1


def test_elastic_torchrun_store_note(torchrun, monkeypatch):
    """A note asks for separate stores where torchrun's number of nodes may change."""
    torchrun(2)
    assert not plan(devices=2).notes
    monkeypatch.setenv("PET_NNODES", "1:2")
    [note] = plan(devices=2).notes
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node" in note
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not plan(devices=2).notes


def test_auto_devices_follow_torchrun(torchrun, registry):
    """On the CPU "auto" is one device: two processes of one device each would train twice, unnoticed."""
    torchrun(2)
    found = plan()
    assert found.strategy.alias == "ddp" and found.world_size == 2 and len(found.devices) == 2
    assert found.devices_reason == "devices='auto': torchelastic started 2 process(es) on this node"
    registry.register("accelerator", "fake", Fake)
    assert len(plan(accelerator="fake").devices) == 2
    registry.register("accelerator", "small", fake("small", count=1))
    with pytest.raises(ConfigurationError, match=r"torchelastic started 2 process.* at most 1 for accelerator 'small'"):
        plan(accelerator="small", strategy="ddp")


def test_another_number_than_torchrun_started(torchrun):
    torchrun(2)
    with pytest.raises(ConfigurationError, match=r"started 2 process.*3 device"):
        plan(devices=3)
    with pytest.raises(ConfigurationError, match=r"started 2 process.*1 device"):
        plan(devices=1)


@pytest.mark.parametrize("strategy", ["single_device", SingleDeviceStrategy()], ids=str)
def test_one_process_strategies_refuse_torchrun(torchrun, strategy):
    torchrun(2)
    with pytest.raises(UnsupportedCombinationError) as caught:
        plan(strategy=strategy)
    assert "one process" in str(caught.value) and "torchelastic started 2" in str(caught.value)
    found = plan(strategy=strategy, plugins="local")  # said on purpose
    assert found.world_size == 1
    torchrun(1)
    assert plan(strategy=strategy).world_size == 1


def test_garbled_variables_are_named(torchrun, monkeypatch):
    torchrun(2)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE .*'two'"):
        plan(strategy="ddp", devices=2)


class Cloud(LocalEnvironment):
    name: ClassVar[str] = "cloud"
    priority: ClassVar[int] = 80

    @classmethod
    def detect(cls) -> bool:
        return True


def test_the_innermost_environment_wins(registry, torchrun):
    registry.register("cluster_environment", "cloud", type("Outer", (Cloud,), {"priority": 10}))
    assert plan(strategy="ddp").cluster_environment.alias == "cloud"
    torchrun(1)
    assert plan(strategy="ddp").cluster_environment.alias == "torchelastic"


def test_two_environments_of_one_priority(registry, torchrun):
    torchrun(1)
    registry.register("cluster_environment", "cloud", Cloud)
    with pytest.raises(ConfigurationError, match=r"'torchhal/torchelastic', 'user/cloud'.*plugins="):
        plan(strategy="ddp")
    assert plan(strategy="ddp", plugins="cloud").cluster_environment.alias == "cloud"


def test_failing_detection_is_noted(registry):
    """An environment whose detection fails is passed over with a note."""

    def explode(cls):
        raise KeyError("CLOUD_TASK")

    registry.register("cluster_environment", "cloud", type("Odd", (Cloud,), {"detect": classmethod(explode)}))
    found = plan(strategy="ddp")
    assert found.cluster_environment.alias == "local"
    (note,) = found.notes
    assert "cloud" in note and "CLOUD_TASK" in note


class Fleet(LocalEnvironment):
    """Starts the processes in a way of its own."""

    name: ClassVar[str] = "fleet"
    features: ClassVar[frozenset[str]] = frozenset({"owns_launch"})

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self.num_workers = num_workers

    def make_launcher(self, *, device_type, prepare):
        assert device_type == "cpu"
        return MultiprocessingLauncher(self, self.num_workers or 2, start_method="fork", prepare=prepare)


class InOneProcess(SingleDeviceStrategy):
    """Several devices, and this process for all of them."""

    multi_device: ClassVar[bool] = True


class TestHostsWithoutALauncher:
    """Each runs the script once; without a word about the others each would train by itself."""

    SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}

    @pytest.fixture
    def there(self, monkeypatch):
        def enter(variables):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)

        return enter

    def test_sagemaker(self, there):
        there(self.SAGEMAKER)
        assert plan(strategy="ddp", devices=2, num_nodes="auto").world_size == 4
        assert plan(num_nodes="auto").strategy.alias == "ddp"
        for asked in ({"devices": 1}, {"strategy": "ddp", "devices": 2}):
            with pytest.raises(ConfigurationError, match=r"2 hosts, but 1 node.*TORCHHAL_CLUSTER=none"):
                plan(**asked)

    def test_by_hand(self, there):
        there(self.BY_HAND)
        with pytest.raises(ConfigurationError, match=r"NNODES must be set.*NODE_RANK.*or say 'num_nodes'"):
            plan(strategy="ddp", num_nodes="auto")
        there({"NNODES": "3"})
        assert plan(strategy="ddp", num_nodes="auto").num_nodes == 3


def test_environment_owns_launch():
    """An environment with "owns_launch" starts the processes in its own way."""
    chosen = plan(devices=2, plugins=Fleet())
    assert (chosen.strategy.alias, chosen.launcher, chosen.world_size) == ("ddp", "fleet", 2)
    chosen = plan(plugins=Fleet(num_workers=1))
    assert (chosen.strategy.alias, chosen.launcher, chosen.world_size, len(chosen.devices)) == ("ddp", "fleet", 1, 1)
    chosen = plan(strategy="ddp_spawn", plugins=Fleet(num_workers=3))
    assert (chosen.launcher, chosen.world_size, chosen.devices_reason) == ("fleet", 3, "one for each of 3 workers")
    with pytest.raises(UnsupportedCombinationError, match=r"'single_device' trains in this process.*fleet.*'ddp'"):
        plan(strategy="single_device", plugins=Fleet())
    with pytest.raises(UnsupportedCombinationError, match=r"'InOneProcess' doesn't start one process per device, as"):
        plan(strategy=InOneProcess(), devices=2, plugins=Fleet())
    strategy = plan(plugins=Fleet(num_workers=2)).build()
    assert strategy.make_launcher().launch(_meet, strategy) == [(0, os.getpid()), (1, os.getpid())]
    with pytest.raises(ConfigurationError, match=r"Cloud starts no processes: .*'owns_launch'"):
        Cloud().make_launcher(device_type="cpu", prepare=print)


def _meet(strategy):
    strategy.setup_environment()
    try:
        return strategy.all_gather_object((strategy.global_rank, os.getppid()))
    finally:
        strategy.teardown()
