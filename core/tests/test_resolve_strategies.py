"""Test the choice of a strategy for devices, precisions, start methods and notebooks."""

from __future__ import annotations

from typing import ClassVar

import pytest
from plans import RANK_VARIABLES, Fake, fake, plan

from torchhal.errors import (
    ConfigurationError,
    UnsupportedCombinationError,
)
from torchhal.precision import Precision
from torchhal.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]


def test_more_devices_than_there_are(registry):
    registry.register("accelerator", "fake", fake("fake", count=1))
    with pytest.raises(ConfigurationError, match=r"'devices' must be at most 1 for accelerator 'fake' \(got 3\)"):
        plan(accelerator="fake", devices=3)
    registry.register("accelerator", "gone", fake("gone", count=0))
    with pytest.raises(ConfigurationError, match=r"'devices' .*'auto', of which accelerator 'gone' has none"):
        plan(accelerator="gone")


@pytest.mark.parametrize("request_", [{"devices": 2}, {"num_nodes": 2}, {"devices": [0, 1], "num_nodes": 2}])
@pytest.mark.parametrize("strategy", ["single_device", "none", SingleDeviceStrategy()], ids=str)
def test_one_device_strategies_refuse_several(strategy, request_):
    with pytest.raises(UnsupportedCombinationError) as caught:
        plan(strategy=strategy, **request_)
    devices, nodes = (1 if "devices" not in request_ else 2), request_.get("num_nodes", 1)
    assert f"{devices} device(s) on {nodes} node(s)" in str(caught.value) and "'ddp'" in str(caught.value)
    assert "'single_device'" in str(caught.value) or "'SingleDeviceStrategy'" in str(caught.value)


with pytest.warns(FutureWarning, match=r"Restricted\.precisions is replaced.*'lacks'.*until torchhal 1\.0"):

    class Restricted(DDPStrategy):
        accelerators = frozenset({"fake", "other"})
        precisions = frozenset({"32-true", "own-16"})


def test_a_strategy_may_refuse_accelerators_and_precisions(registry):
    registry.register("accelerator", "fake", Fake)
    with pytest.raises(
        UnsupportedCombinationError, match=r"'Restricted' works on accelerator 'fake', 'other' \(got 'cpu'\)"
    ):
        plan(strategy=Restricted(), accelerator="cpu")
    with pytest.raises(
        UnsupportedCombinationError,
        match="'Restricted' does not compute in precision 'bf16-mixed': it knows '32-true', 'own-16'",
    ):
        plan(strategy=Restricted(), accelerator="fake", precision="bf16")
    assert plan(strategy=Restricted(), accelerator="fake").precision.alias == "32-true"


class InPairs(DDPStrategy):
    def check_fit(self, composition):
        super().check_fit(composition)
        world_size, precision = composition.world_size, composition.precision
        if world_size % 2 or "scales_loss" in precision.features:
            raise ConfigurationError(f"pairs that scale nothing (got {world_size}, {precision.alias})")


class InPairsOfBefore(DDPStrategy):
    def check_fit(self, *, precision, world_size):
        super().check_fit(precision=precision, world_size=world_size)
        if world_size % 2 or "scales_loss" in precision.features:
            raise ConfigurationError(f"pairs that scale nothing (got {world_size}, {precision.alias})")


@pytest.mark.filterwarnings("ignore:.*check_fit.*goes with torchhal 1.0:FutureWarning")
@pytest.mark.parametrize("in_pairs", [InPairs, InPairsOfBefore])
def test_strategy_check_fit(torchrun, in_pairs):
    """A strategy may refuse a number of processes and a feature of a precision."""
    assert plan(strategy=in_pairs(), devices=2, num_nodes=3, precision="bf16-mixed").world_size == 6
    with pytest.raises(ConfigurationError, match=r"got 3, 32-true"):
        plan(strategy=in_pairs(), devices=3)
    with pytest.raises(ConfigurationError, match=r"got 2, 16-mixed"):
        plan(strategy=in_pairs(), devices=2, precision="16-mixed")
    torchrun(3)
    with pytest.raises(ConfigurationError, match=r"got 3, 32-true"):
        plan(strategy=in_pairs())


def test_accelerator_with_own_strategies(registry):
    """An accelerator may refuse all strategies that are not made for it."""
    picky = fake("picky", own_strategies=True, default_strategy="restricted", default_parallel_strategy="restricted")
    registry.register("accelerator", "picky", picky)
    registry.register("strategy", "restricted", type("OnPicky", (DDPStrategy,), {"accelerators": {"picky"}}))
    assert plan(accelerator="picky", devices=2).strategy.alias == "restricted"
    for asked in ("ddp", "single_device", SingleDeviceStrategy()):
        with pytest.raises(UnsupportedCombinationError, match=r"is not made for accelerator 'picky'.*'restricted'"):
            plan(accelerator="picky", devices=1, strategy=asked)


def test_an_accelerator_lists_its_precisions(registry):
    """As before capabilities."""
    with pytest.warns(FutureWarning, match=r"\.precisions is replaced: declare 'capabilities'"):
        listing = fake("fake", device_type="cpu", precisions=frozenset({"32-true", "bf16-mixed"}))
    registry.register("accelerator", "fake", listing)
    assert plan(accelerator="fake", precision="bf16").precision.alias == "bf16-mixed"
    with pytest.raises(
        UnsupportedCombinationError, match=r"'fake' does not compute in .*'64-true': it knows '32-true', 'bf16-mixed'"
    ):  # fmt: skip
        plan(accelerator="fake", precision=64)


class MyFP8(Precision):
    alias = "my-fp8"


with pytest.warns(FutureWarning, match=r"FakeOnly\.accelerators is replaced: declare 'needs'"):

    class FakeOnly(Precision):
        alias = "fake-only"
        accelerators = frozenset({"fake"})


def test_a_precision_of_the_users_own(registry):
    registry.register("accelerator", "fake", Fake)
    for value in (MyFP8(), MyFP8):
        assert plan(precision=value).precision.alias == "my-fp8"
        assert plan(precision=value, accelerator="fake").precision.alias == "my-fp8"
    registry.register("precision", "my-fp8", MyFP8)
    assert plan(precision="my-fp8").precision.alias == "my-fp8"
    with pytest.raises(UnsupportedCombinationError, match="'Restricted' does not compute in precision 'my-fp8'"):
        plan(precision=MyFP8(), strategy=Restricted(), accelerator="fake")


def test_a_precision_may_declare_its_accelerators(registry):
    registry.register("accelerator", "fake", Fake)
    assert plan(precision=FakeOnly(), accelerator="fake").precision.alias == "fake-only"
    with pytest.raises(UnsupportedCombinationError, match=r"'fake-only' works on accelerator 'fake' \(got 'cpu'\)"):
        plan(precision=FakeOnly(), accelerator="cpu")


def test_start_method_unsupported_by_device(registry):
    """A start method that the device does not survive is refused."""
    registry.register("accelerator", "fake", fake("fake", start_methods=frozenset({"spawn"})))
    assert plan(accelerator="fake", strategy="ddp_spawn").launcher == "spawn"
    assert plan(accelerator="fake", strategy="ddp").launcher == "subprocess"
    assert plan(accelerator="fake", strategy="ddp_fork", devices=1).launcher == "none"
    with pytest.raises(UnsupportedCombinationError, match=r"'ddp_fork' .* by 'fork', but accelerator 'fake' .*'spawn'"):
        plan(accelerator="fake", strategy="ddp_fork", devices=2)


class NoForkHere(Fake):
    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "forkserver"})


def test_a_start_method_that_the_system_lacks(monkeypatch):
    """As on Windows."""
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for alias in ("ddp_fork", "ddp_notebook", "ddp_fork_find_unused_parameters_true", DDPStrategy(start_method="fork")):
        with pytest.raises(UnsupportedCombinationError, match=r"'fork', which this system doesn't have.*'ddp_spawn'"):
            plan(accelerator="cpu", strategy=alias, devices=2)
    assert plan(accelerator="cpu", strategy="ddp_spawn", devices=2).launcher == "spawn"
    assert plan(accelerator="cpu", strategy="ddp_fork", devices=1).launcher == "none"


@pytest.mark.parametrize("alias", ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_find_unused_parameters_true"])
@pytest.mark.parametrize("devices", [1, 2])
def test_accelerator_without_backend(registry, alias, devices):
    """An accelerator without a backend refuses strategies that join a process group."""
    registry.register("accelerator", "fake", fake("fake", backend=""))
    with pytest.raises(UnsupportedCombinationError, match=rf"'{alias}' joins .* no backend .* 'fake'.*'single_device'"):
        plan(accelerator="fake", strategy=alias, devices=devices)
    own = DDPStrategy(process_group_backend="mine")
    assert plan(accelerator="fake", strategy=own, devices=devices).strategy.value is own
    assert plan(accelerator="fake", devices=1).strategy.alias == "single_device"


class TestWithoutAScript:
    """A notebook, as IPython's kernel makes one: nothing can be run again."""

    @pytest.fixture(autouse=True)
    def notebook(self, monkeypatch):
        monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)

    def test_auto_plans_workers_that_can_start_there(self, monkeypatch):
        found = plan(accelerator="cpu", devices=2)
        assert (found.strategy.alias, found.launcher) == ("ddp_notebook", "fork")
        assert "without a script" in found.strategy.reason
        monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
        assert plan(accelerator="cpu", devices=2).launcher == "spawn"

    def test_auto_goes_by_what_the_device_survives(self, registry):
        registry.register("accelerator", "fake", NoForkHere)
        assert plan(accelerator="fake", devices=2).launcher == "spawn"
        assert plan(accelerator="fake", devices=1).strategy.alias == "single_device"

    def test_script_strategies_refused_in_notebook(self):
        """A strategy that runs the script again is refused in a notebook."""
        for strategy in ("ddp", "ddp_find_unused_parameters_true", DDPStrategy()):
            with pytest.raises(UnsupportedCombinationError, match=r"no script to run again.*ddp_notebook"):
                plan(accelerator="cpu", strategy=strategy, devices=2)
        assert plan(accelerator="cpu", strategy="ddp", devices=1).launcher == "none"
        assert plan(accelerator="cpu", strategy="ddp_spawn", devices=2).launcher == "spawn"

    def test_processes_that_were_started_need_no_script(self, torchrun, monkeypatch):
        torchrun(2)
        assert plan(accelerator="cpu", devices="auto").strategy.alias == "ddp"
        for name in RANK_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TORCHHAL_LAUNCH_ID", "x")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert plan(accelerator="cpu", strategy="ddp", devices=2).launcher == "subprocess"


class OneProcessPerNode(ParallelStrategy):
    def num_local_processes(self, num_devices: int) -> int:
        return 1


def test_a_process_may_drive_several_devices(registry):
    registry.register("accelerator", "fake", Fake)
    found = plan(accelerator="fake", strategy=OneProcessPerNode(), devices=4)
    assert found.world_size == 1 and len(found.devices) == 4 and found.launcher == "none"
    assert plan(accelerator="fake", strategy=OneProcessPerNode(), devices=4, num_nodes=2).world_size == 2
