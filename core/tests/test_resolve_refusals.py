"""Test that components of any kind refuse this machine, or each other, before anything starts."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from plans import Fake, plan

from torchhal import Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import LocalEnvironment
from torchhal.composition import Composition
from torchhal.errors import ConfigurationError, UnknownAliasError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.precision import MixedPrecision, SinglePrecision
from torchhal.strategies import DDPStrategy

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]

KINDS = {
    "precision": SinglePrecision,
    "checkpoint_io": TorchCheckpointIO,
    "cluster_environment": LocalEnvironment,
    "strategy": DDPStrategy,
}


def made(kind, **members):
    """A class of that kind, with an alias of its own."""
    name = {"name": "acme"} if kind == "cluster_environment" else {"alias": "acme"} if kind == "precision" else {}
    return type("Acme", (KINDS[kind],), {**name, **members})


def planned(kind, value, **request):
    argument = {kind: value} if kind in ("precision", "strategy") else {"plugins": [value]}
    return plan(accelerator="cpu", devices=2, **{"strategy": "ddp", **argument, **request})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unavailable_is_refused_for_its_reason(registry, kind):
    cls = made(kind, availability=classmethod(lambda cls: Availability(False, "acme_sdk 1.0 is too old")))
    registry.register(kind, "acme", cls)
    for value in ("acme", cls, cls()):
        with pytest.raises(ConfigurationError, match=r"can't be used here: acme_sdk 1\.0 is too old"):
            planned(kind, value)


@pytest.mark.parametrize("kind", KINDS)
def test_availability_that_fails_is_unavailable(registry, kind):
    def fails(cls):
        raise OSError("libacme.so: no such file")

    def exits(cls):
        raise SystemExit(1)

    for body, reason in (
        (fails, "OSError: libacme.so"),
        (exits, "SystemExit: 1"),
        (lambda cls: True, "returned True, and not an Availability"),
    ):
        with pytest.raises(ConfigurationError, match=f"can't be used here: .*{reason}"):
            planned(kind, made(kind, availability=classmethod(body)))


def test_auto_passes_an_accelerator_that_can_not_answer(registry):
    def exits(cls):
        raise SystemExit("acme_sdk found no driver")

    registry.register(
        "accelerator", "acme", type("Acme", (Fake,), {"name": "acme", "availability": classmethod(exits)})
    )
    found = plan(accelerator="auto")
    assert found.accelerator.alias == "cpu"
    assert any("acme: SystemExit: acme_sdk found no driver" in note for note in found.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_may_refuse_the_others(kind):
    seen = []

    def check_fit(self, composition):
        seen.append(composition)
        raise UnsupportedCombinationError("acme and ddp don't go together: use 'acme_ddp'")

    with pytest.raises(UnsupportedCombinationError, match="don't go together: use 'acme_ddp'"):
        planned(kind, made(kind, check_fit=check_fit))
    (composition,) = seen
    assert isinstance(composition, Composition)
    assert (composition.accelerator.name, composition.world_size, composition.num_nodes) == ("cpu", 2, 1)
    assert len(composition.devices) == 2 and isinstance(composition.strategy, DDPStrategy)


def test_an_accelerator_may_refuse_the_others(registry):
    def check_fit(self, composition):
        if composition.world_size > 1:
            raise ConfigurationError("one process for all of Acme's devices")

    registry.register("accelerator", "acme", type("Acme", (Fake,), {"name": "acme", "check_fit": check_fit}))
    assert plan(accelerator="acme", devices=1).world_size == 1
    with pytest.raises(ConfigurationError, match="one process for all"):
        plan(accelerator="acme", devices=2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_check_fit_is_the_components(kind):
    def check_fit(self, composition):
        return composition.speed

    with pytest.raises(ConfigurationError, match=r"Acme could not say whether it fits the others: AttributeError: "):
        planned(kind, made(kind, check_fit=check_fit))


def test_a_refusal_comes_before_any_worker(tmp_path):
    """Neither spawned workers nor a script's copies are started, and it is said once."""
    script = tmp_path / "refused.py"
    script.write_text(
        "import os, sys\n"
        "from torchhal import Trainer\n"
        "from torchhal.errors import ConfigurationError\n"
        "from torchhal.precision import SinglePrecision\n"
        "open(f'{os.path.dirname(__file__)}/pid{os.getpid()}', 'w').close()\n"
        "class Refuses(SinglePrecision):\n"
        "    def check_fit(self, composition):\n"
        "        raise ConfigurationError('never')\n"
        "if __name__ == '__main__':\n"
        "    Trainer(accelerator='cpu', devices=2, strategy=sys.argv[1], precision=Refuses(), logger=False)\n"
    )
    for strategy in ("ddp", "ddp_spawn"):
        done = subprocess.run(
            [sys.executable, script, strategy], capture_output=True, text=True, check=False, env={**os.environ}
        )
        assert done.returncode == 1 and done.stderr.count("ConfigurationError: never") == 1
        assert len(list(tmp_path.glob("pid*"))) == 1
        for file in tmp_path.glob("pid*"):
            file.unlink()


def test_autocast_that_torch_has_not_is_refused_before_a_launch(registry):
    registry.register("accelerator", "fake", Fake)  # of device type meta
    with pytest.raises(UnsupportedCombinationError, match=r"torch has no autocast to torch\.bfloat16 for"):
        plan(accelerator="fake", precision=MixedPrecision("bfloat16"))


# -- aliases with options ------------------------------------------------------------------------------------


class Sized(DDPStrategy):
    def __init__(self, size=1, **options):
        super().__init__(**options)
        self.size = size


def test_an_alias_with_options(registry):
    registry.register("strategy", "sized", Sized)
    found = plan(accelerator="cpu", devices=2, strategy={"Sized": {"size": 3}})
    assert found.strategy.value.size == 3 and found.strategy.alias == "sized"
    assert "{'Sized': {'size': 3}}" in found.strategy.reason
    assert plan(accelerator="cpu", devices=2, strategy={"user/sized": {}}).strategy.value.size == 1
    assert plan(accelerator="cpu", strategy={"ddp": {"find_unused_parameters": True}}, devices=2).strategy.value
    assert Trainer(accelerator={"cpu": {}}, strategy={"sized": {"size": 2}}, devices=2, logger=False).strategy.size == 2


def test_options_reach_the_component_that_the_hardware_has_in_its_place(registry):
    registry.register("strategy", "sized", Sized)
    mine = {"name": "mine", "substitutes": {"strategy": {"ddp": "sized"}}}
    registry.register("accelerator", "mine", type("Mine", (Fake,), mine))
    assert plan(accelerator="mine", devices=2, strategy={"ddp": {"size": 4}}).strategy.value.size == 4


def test_options_in_plugins_and_precision(registry):
    class Scaled(SinglePrecision):
        alias = "scaled"

        def __init__(self, factor=1):
            self.factor = factor

    registry.register("precision", "scaled", Scaled)
    assert plan(accelerator="cpu", precision={"scaled": {"factor": 2}}).precision.value.factor == 2
    assert plan(accelerator="cpu", plugins=[{"scaled": {"factor": 3}}]).precision.value.factor == 3
    with pytest.raises(ConfigurationError, match="is given more than once"):
        plan(accelerator="cpu", precision={"scaled": {"factor": 2}}, plugins=["scaled"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"ddp": {"speed": 1}}, r"strategy {'ddp': {'speed': 1}}: DDPStrategy takes no argument 'speed'"),
        ({}, "must be one alias and a dict of them"),
        ({"ddp": {}, "none": {}}, "must be one alias and a dict of them"),
        ({"ddp": None}, "must be one alias and a dict of them"),
        ({"ddp": {1: 2}}, "must be one alias and a dict of them"),
        ({3: {}}, "and no 3"),
        ({"auto": {}}, "and no 'auto'"),
    ],
)
def test_options_of_another_form_are_refused(value, said):
    with pytest.raises(ConfigurationError, match=said):
        plan(accelerator="cpu", devices=2, strategy=value)


def test_an_unknown_alias_with_options_is_named():
    with pytest.raises(UnknownAliasError, match="no strategy is called 'dpd'"):
        plan(accelerator="cpu", strategy={"dpd": {}})


def test_options_travel_to_other_processes():
    from torchhal.resolve._alias_options import AliasWithOptions, options_of

    again = pickle.loads(pickle.dumps(AliasWithOptions("ddp", {"size": 2})))
    assert again == "ddp" and options_of(again) == {"size": 2}
