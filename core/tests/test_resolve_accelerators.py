"""Test accelerator='auto': priorities, accelerators that can't be used, broken plugins, devices that nothing drives."""

from __future__ import annotations

import warnings

import pytest
import torch
from plans import Package, fake, plan

from torchhal.errors import (
    AcceleratorUnavailableError,
    ConfigurationError,
    UnsupportedCombinationError,
)
from torchhal.precision import MixedPrecision, Precision
from torchhal.strategies import DDPStrategy
from torchhal.testing import isolated_registry

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]


def test_auto_takes_the_highest_priority(registry):
    registry.register("accelerator", "slow", fake("slow", auto_priority=10))
    registry.register("accelerator", "fast", fake("fast", auto_priority=60, device_type="meta"))
    found = plan()
    assert found.accelerator.alias == "fast" and found.notes == ()
    assert found.devices == tuple(torch.device("meta", index) for index in range(4))  # "auto" is all of them
    assert found.strategy.alias == "ddp"


def test_auto_refuses_a_tie(registry):
    registry.register("accelerator", "one", fake("one"))
    registry.register("accelerator", "two", fake("two"))
    with pytest.raises(ConfigurationError, match=r"equally good accelerators \('one', 'two'\): name one"):
        plan()
    assert plan(accelerator="two").accelerator.alias == "two"


def test_auto_never_takes_what_must_be_named(registry):
    registry.register("accelerator", "sim", fake("sim", auto_priority=None, reason="not today"))
    found = plan()
    assert found.accelerator.alias == "cpu" and found.notes == ()
    with pytest.raises(AcceleratorUnavailableError, match="'sim' can't be used here: not today"):
        plan(accelerator="sim")


def test_auto_notes_unavailable_accelerators(registry):
    """A note names the better accelerators that "auto" could not take."""
    registry.register("accelerator", "best", fake("best", reason="no driver"))
    registry.register("accelerator", "other", fake("other", reason="no licence"))
    registry.register("accelerator", "worst", fake("worst", auto_priority=-1, reason="switched off"))
    found = plan()
    assert found.accelerator.alias == "cpu"
    (note,) = found.notes
    assert "'cpu'" in note and "best: no driver" in note and "other: no licence" in note
    assert "worst" not in note  # worse than the CPU: no loss
    assert note in found.describe() and found.to_dict()["notes"] == [note]


def test_the_trainer_says_it_once(registry):
    from torchhal import Trainer

    registry.register("accelerator", "best", fake("best", reason="no driver"))
    with pytest.warns(UserWarning, match="best: no driver") as caught:
        Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert len([w for w in caught if "no driver" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_a_probe_that_raises_is_a_reason(registry):
    def explode(cls):
        raise OSError("driver went away")

    registry.register("accelerator", "odd", fake("odd", availability=classmethod(explode)))
    (note,) = plan().notes
    assert "odd: OSError: driver went away" in note


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ({"broken": "RuntimeError('libvendor.so is missing')"}, "libvendor.so is missing"),
        ({"accelerator": ("npu", "no_such_vendor.module:NPU")}, "npu"),
        ({"accelerator": ("n p u", "x:Y")}, "n p u"),
    ],
    ids=["manifest", "class", "record"],
)
def test_broken_plugin_is_noted(package, text):
    """A broken plugin never silently leads to the CPU: a note names it."""
    with isolated_registry(distributions=[Package("npu-dist", **package)]):
        found = plan()
        assert found.accelerator.alias == "cpu"
        (note,) = found.notes
        assert text in note and "npu-dist" in note


def test_disabled_plugin_is_not_missed():
    """No note names a plugin that the user has disabled."""
    package = Package("npu-dist", broken="RuntimeError('x')")
    with isolated_registry(distributions=[package], environ={"TORCHHAL_DISABLE_PLUGINS": "npu-dist"}):
        assert plan().notes == ()


def test_auto_with_contested_names():
    one, two = Package("one-dist", accelerator="fake"), Package("two-dist", accelerator="fake")
    with (
        isolated_registry(distributions=[one, two]),
        pytest.raises(ConfigurationError, match="'one-dist/fake', 'two-dist/fake'"),
    ):
        plan()


def test_auto_follows_the_strategy(registry):
    class OnlyFake(DDPStrategy):
        accelerators = frozenset({"fake"})

    registry.register("accelerator", "fake", fake("fake", auto_priority=-5))
    registry.register("strategy", "only_fake", OnlyFake)
    for strategy in ("only_fake", OnlyFake, OnlyFake()):
        assert plan(strategy=strategy).accelerator.alias == "fake"
    assert plan(strategy="ddp").accelerator.alias == "cpu"
    Fake_ = fake("fake", auto_priority=-5, reason="unplugged")
    with isolated_registry() as other:
        other.register("accelerator", "fake", Fake_)
        with pytest.raises(AcceleratorUnavailableError) as caught:
            plan(strategy=OnlyFake)
    assert "fake: unplugged" in str(caught.value) and "cpu: OnlyFake doesn't work on it" in str(caught.value)


def test_substitutes_apply_to_names_only(registry):
    class Own(DDPStrategy):
        pass

    class OwnPrecision(Precision):
        alias = "own-16"

    registry.register("strategy", "own_spawn", Own)
    registry.register("precision", "own-16", OwnPrecision)
    substitutes = {"strategy": {"ddp_spawn": "own_spawn"}, "precision": {"16-mixed": "own-16"}}
    registry.register("accelerator", "fake", fake("fake", substitutes=substitutes))
    found = plan(accelerator="fake", strategy="DDP_Spawn", precision="16-MIXED", devices=2)
    assert isinstance(found.strategy.value, Own)
    assert found.strategy.reason == "strategy='DDP_Spawn', which on fake means own_spawn"
    assert found.precision.reason == "precision='16-MIXED', which on fake means own-16"
    assert plan(accelerator="cpu", strategy="ddp_spawn").strategy.alias == "ddp_spawn"
    given = DDPStrategy(start_method="spawn")
    assert plan(accelerator="fake", strategy=given).strategy.value is given
    given = MixedPrecision("float16")
    with pytest.raises(UnsupportedCombinationError, match="16-mixed"):
        plan(accelerator="fake", precision=given)


class TestADeviceThatNothingDrives:
    """What ``torch.accelerator`` sees, with the core alone."""

    @pytest.fixture(params=["cuda", "xpu", "mps"])
    def kind(self, request, monkeypatch):
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *args: torch.device(request.param))
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        return request.param

    def test_auto_names_it_and_what_to_install(self, kind):
        (note,) = plan().notes
        assert (
            f"torch sees a device of type {kind!r}" in note and "pip install torchhal-gpu" in note and "'cpu'" in note
        )
        assert plan(accelerator="cpu").notes == (), "asked for"

    def test_plugin_note_replaces_install_hint(self, kind, registry):
        """Where a plugin drives the device, its reason stands in place of the install hint."""
        registry.register("accelerator", "fake", fake("fake", device_type=kind, reason="no driver"))
        (note,) = plan().notes
        assert "fake: no driver" in note and "pip install" not in note
        registry.register("accelerator", "named", fake("named", device_type=kind, auto_priority=None))
        assert "pip install" not in "".join(plan().notes)

    def test_disabled_driver_is_not_missed(self, kind):
        """No note names a plugin for the device that the user has disabled."""
        package = Package("torchhal-gpu", accelerator="gpu")
        with isolated_registry(distributions=[package], environ={"TORCHHAL_DISABLE_PLUGINS": "torchhal-gpu"}):
            assert plan().notes == ()

    def test_none_is_there(self, kind, monkeypatch):
        """A torch that was built for it, on a machine without."""
        monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
        assert plan().notes == ()
