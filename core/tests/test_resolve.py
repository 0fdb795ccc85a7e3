"""Test plans: a reason for each choice, refusals of nonsense, components by name and object, and nothing started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from plans import Package, choices, plan, reason

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import ClusterEnvironment, LocalEnvironment
from torchhal.errors import (
    AcceleratorUnavailableError,
    AmbiguousAliasError,
    ConfigurationError,
    TorchhalError,
    UnknownAliasError,
)
from torchhal.precision import MixedPrecision, SinglePrecision
from torchhal.resolve import Request, resolve
from torchhal.resolve._checkpoint_ios import usable_ios
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torchhal.testing import isolated_registry

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("registry", "no_leftovers")]


# -- purity --------------------------------------------------------------------------------------------------


def test_the_default_plan():
    found = plan()
    assert choices(found) == {
        "accelerator": "cpu", "devices": "cpu", "strategy": "single_device", "precision": "32-true",
        "checkpoint_io": "torch", "world_size": "1", "launcher": "none",
    }  # fmt: skip
    assert found.cluster_environment is None and found.notes == ()
    assert found.devices == (torch.device("cpu"),) and found.device_indices == (0,)


def test_every_choice_has_a_reason():
    for request in ({}, {"devices": 2}, {"strategy": "ddp_spawn", "devices": 3}, {"plugins": ["local", "torch", "16"]}):
        for what, choice, why in plan(**request).rows():
            assert choice and why, (request, what)


@pytest.mark.parametrize(
    ("request_", "of", "choice", "why"),
    [
        ({}, "accelerator", "cpu", "accelerator='auto': the best one available here"),
        ({"accelerator": "cpu"}, "accelerator", "cpu", "accelerator='cpu'"),
        ({"accelerator": CPUAccelerator}, "accelerator", "cpu", "given as an object"),
        ({}, "devices", "cpu", "devices='auto'"),
        ({"devices": "2"}, "devices", "cpu, cpu", "devices='2'"),
        ({}, "strategy", "single_device", "1 device(s) on 1 node(s) and no strategy named: cpu's default"),
        ({"devices": 2}, "strategy", "ddp", "2 device(s) on 1 node(s) and no strategy named: cpu's default"),
        ({"num_nodes": 2}, "strategy", "ddp", "1 device(s) on 2 node(s) and no strategy named: cpu's default"),
        ({"strategy": "DDP"}, "strategy", "ddp", "strategy='DDP'"),
        ({"strategy": DDPStrategy}, "strategy", "DDPStrategy", "given as an object"),
        ({}, "precision", "32-true", "the default"),
        ({"precision": 16}, "precision", "16-mixed", "precision='16'"),
        ({"plugins": "bf16"}, "precision", "bf16-mixed", "plugins='bf16'"),
        ({"plugins": [TorchCheckpointIO()]}, "checkpoint_io", "TorchCheckpointIO", "given as an object (plugins=)"),
        ({"strategy": "ddp"}, "cluster_environment", "local", "no cluster detected"),
        ({"plugins": "local"}, "cluster_environment", "local", "plugins='local'"),
        ({"devices": 2}, "launcher", "subprocess", "2 process(es) on this node, started by torchhal"),
        ({"strategy": "ddp_fork", "devices": 2}, "launcher", "fork", "2 process(es) on this node, started by torchhal"),
        ({"strategy": "ddp"}, "launcher", "none", "one process: this one"),
        ({"strategy": "ddp", "devices": 3, "num_nodes": 2}, "world_size", "6", "2 node(s)"),
    ],
)
def test_reasons(request_, of, choice, why):
    found = plan(**request_)
    assert choices(found)[of] == choice and reason(found, of) == why


def test_the_same_request_gives_the_same_plan():
    request = Request(strategy="ddp_spawn", devices=2, precision="bf16-mixed", plugins=["torch"])
    before = dict(os.environ)
    first, second = resolve(request), resolve(request)
    assert first.describe() == second.describe() and first.to_dict() == second.to_dict()
    assert first.strategy.value is not second.strategy.value  # no part is shared between two runs
    assert first.precision.value is not second.precision.value
    assert dict(os.environ) == before


def test_resolving_changes_no_object_of_the_user():
    strategy, precision = DDPStrategy(), MixedPrecision("bfloat16")
    before = (dict(vars(strategy)), dict(vars(precision)))
    found = plan(strategy=strategy, precision=precision, devices=2)
    assert found.strategy.value is strategy and found.precision.value is precision
    assert (vars(strategy), vars(precision)) == before


def test_resolving_starts_nothing():
    """In a process of its own, where an audit hook hears of every process, file opened for writing and socket."""
    code = """
import sys, threading
import torch
from torchhal.resolve import Request, resolve
resolve(Request(devices=2))  # imports and the scan for plugins are done
seen = []
def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    starts = event.startswith(("subprocess.", "os.fork", "os.posix_spawn", "socket."))
    if writes or starts or event in ("os.putenv", "os.unsetenv"):
        seen.append((event, args))
sys.addaudithook(hook)
state = torch.get_rng_state()
for strategy in ("auto", "single_device", "ddp", "ddp_spawn", "ddp_fork"):
    for devices in ("auto", 1, 2):
        if not (strategy == "single_device" and devices == 2):
            plan = resolve(Request(strategy=strategy, devices=devices, precision="bf16-mixed", num_nodes=1))
            plan.describe(); plan.to_dict()
assert not seen, seen
assert threading.active_count() == 1
assert not torch.distributed.is_initialized()
assert torch.equal(state, torch.get_rng_state())
open("/dev/null", "w").close()
assert seen  # the hook hears
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plan_as_text_and_data():
    found = plan(devices=2, precision="bf16")
    text = found.describe().splitlines()
    assert text[0].split(maxsplit=2) == ["accelerator", "cpu", "accelerator='auto': the best one available here"]
    assert len({line.index(row[2]) for line, row in zip(text, found.rows(), strict=True)}) == 1  # columns stand
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == 1 and data["notes"] == []
    assert data["strategy"] == {
        "choice": "ddp",
        "reason": "2 device(s) on 1 node(s) and no strategy named: cpu's default",
    }
    assert list(data)[1:-1] == [what for what, _, _ in found.rows()]


def test_build_puts_the_parts_in():
    found = plan(devices=2, precision="bf16")
    strategy = found.build()
    assert strategy is found.strategy.value
    assert strategy.accelerator is found.accelerator.value and strategy.precision is found.precision.value
    assert strategy.devices == [torch.device("cpu")] * 2
    assert isinstance(strategy.cluster_environment, LocalEnvironment)


def test_a_strategy_object_serves_two_plans():
    """What was chosen for the first is not taken for the user's wish in the second."""
    strategy = DDPStrategy()
    plan(strategy=strategy, devices=2, precision="bf16-mixed").build()
    second = plan(strategy=strategy, devices=2, precision="32-true", accelerator=CPUAccelerator())
    assert second.precision.alias == "32-true"
    second.build()
    assert strategy.precision is second.precision.value


# -- nonsense ------------------------------------------------------------------------------------------------

NONSENSE = [True, False, None, 1.5, -2, "", " ", "no such thing", [], {}, object(), object, int, b"cpu", ("cpu",), ...]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)))
@pytest.mark.parametrize("argument", ["accelerator", "strategy", "devices", "num_nodes", "precision", "plugins"])
def test_nonsense_is_refused_by_name(argument, value):
    """Nonsense is refused by the name of its argument.

    One kind of error for all of it, except that an unknown alias is a LookupError of its own.

    Checks: STR-37.
    """
    harmless = {"precision": (None,), "plugins": (None, [], ()), "num_nodes": (), "devices": ()}
    if any(value is ok or (value == ok and type(value) is type(ok)) for ok in harmless.get(argument, ())):
        plan(**{argument: value})
        return
    with pytest.raises((ConfigurationError, UnknownAliasError)) as caught:
        plan(**{argument: value})
    if isinstance(caught.value, UnknownAliasError):
        assert isinstance(value, str | int) and not isinstance(value, bool)
        assert repr(value) in str(caught.value) or repr(str(value)) in str(caught.value)
    else:
        assert f"'{argument}'" in str(caught.value)
        told = value[0] if argument == "plugins" and isinstance(value, tuple) else value
        assert repr(told) in str(caught.value)


class NeedsArguments(SingleDeviceStrategy):
    def __init__(self, size: int) -> None:
        super().__init__()


class Unfinished(Strategy):
    def reduce(self, value, op="mean", *, group=None):
        return value


@pytest.mark.parametrize(
    ("request_", "texts"),
    [
        ({"strategy": Strategy}, ["'strategy'", "Strategy", "all_gather", "barrier"]),
        ({"strategy": Unfinished}, ["'strategy'", "Unfinished", "all_gather, all_gather_object, barrier, broadcast"]),
        ({"strategy": NeedsArguments}, ["'strategy'", "NeedsArguments", "'size'", "instance"]),
        ({"strategy": CPUAccelerator()}, ["'strategy'", "CPUAccelerator()"]),
        ({"accelerator": DDPStrategy}, ["'accelerator'", "DDPStrategy"]),
        ({"accelerator": Accelerator}, ["'accelerator'", "sets no name, device_type"]),
        ({"precision": CPUAccelerator()}, ["'precision'", "CPUAccelerator()"]),
        ({"plugins": [ClusterEnvironment]}, ["'cluster_environment'", "creates_processes_externally"]),
        ({"plugins": [CPUAccelerator()]}, ["'plugins'", "CPUAccelerator()", "give it as accelerator="]),
        ({"plugins": [DDPStrategy]}, ["'plugins'", "DDPStrategy", "give it as strategy="]),
        ({"plugins": ["ddp"]}, ["'plugins'", "'ddp'", "give it as strategy="]),
        ({"plugins": ["nope"]}, ["'plugins'", "'nope'", "'bf16-mixed'", "'torchelastic'", "'torch'"]),
        ({"plugins": ["torch", TorchCheckpointIO()]}, ["'plugins'", "checkpoint io", "'torch'", "TorchCheckpointIO"]),
        ({"plugins": ["bf16", MixedPrecision("float16")]}, ["'plugins'", "precision", "'bf16'", "MixedPrecision"]),
        ({"plugins": [3]}, ["'plugins'", "got 3"]),
        ({"devices": 0}, ["'devices'", "0"]),
        ({"num_nodes": 0}, ["'num_nodes'", "0"]),
        ({"num_nodes": "2"}, ["'num_nodes'", "'2'"]),
    ],
)
def test_wrong_kinds_and_unfinished_classes(request_, texts):
    with pytest.raises((ConfigurationError, AcceleratorUnavailableError)) as caught:
        plan(**request_)
    for text in texts:
        assert text in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("kind", "alias", "package"),
    [
        ("accelerator", "gpu", "torchhal-gpu"), ("accelerator", "TPU", "torchhal-xla"),
        ("accelerator", "ipu", "torchhal-ipu"), ("strategy", "deepspeed", "torchhal-deepspeed"),
        ("strategy", "fsdp", "torchhal-parallel"),
    ],
)  # fmt: skip
def test_missing_plugin_names_package(kind, alias, package):
    """The error for an alias of a plugin that is not installed names the package to install."""
    with pytest.raises(UnknownAliasError, match=f"pip install {package}") as caught:
        plan(**{kind: alias})
    assert repr(alias) in str(caught.value)


# -- names and objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["cpu", "CPU", "Cpu", "torchhal/cpu", "TORCHHAL/cpu", CPUAccelerator, CPUAccelerator()]
)
def test_accelerators_by_name_class_and_object(value):
    found = plan(accelerator=value)
    assert found.accelerator.alias == "cpu" and isinstance(found.accelerator.value, CPUAccelerator)
    if isinstance(value, CPUAccelerator):
        assert found.accelerator.value is value


@pytest.mark.parametrize("value", ["ddp_SPAWN", "torchhal/ddp_spawn", DDPStrategy(start_method="spawn")])
def test_strategies_by_name_and_object(value):
    found = plan(strategy=value, devices=2)
    assert isinstance(found.strategy.value, DDPStrategy) and found.launcher == "spawn"


@pytest.mark.parametrize(
    ("value", "alias"),
    [
        (32, "32-true"), ("32", "32-true"), (16, "16-mixed"), ("bf16", "bf16-mixed"), ("BF16-Mixed", "bf16-mixed"),
        (64, "64-true"), ("torchhal/16-true", "16-true"), (SinglePrecision, "32-true"),
        (MixedPrecision("bfloat16"), "bf16-mixed"), (None, "32-true"),
    ],
)  # fmt: skip
def test_precisions_by_number_name_and_object(value, alias):
    assert plan(precision=value).precision.alias == alias
    assert (
        plan(plugins=[] if value is None else [str(value) if isinstance(value, int) else value]).precision.alias
        == alias
    )


def test_plugins_of_every_kind_in_any_form():
    environment, io = LocalEnvironment(), TorchCheckpointIO()
    found = plan(strategy="ddp", plugins=(environment, "bf16", io))
    assert found.cluster_environment.value is environment and found.checkpoint_io.value is io
    assert found.precision.alias == "bf16-mixed"
    found = plan(strategy="ddp", plugins=[LocalEnvironment, TorchCheckpointIO, SinglePrecision])
    assert isinstance(found.cluster_environment.value, LocalEnvironment)
    with pytest.raises(ConfigurationError, match="WORLD_SIZE must be set"):
        plan(plugins="torchhal/torchelastic")


def test_what_stands_inside_a_strategy_is_used():
    parts = {
        "accelerator": CPUAccelerator(), "precision": MixedPrecision("bfloat16"), "checkpoint_io": TorchCheckpointIO(),
        "cluster_environment": LocalEnvironment(),
    }  # fmt: skip
    strategy = DDPStrategy(**parts)
    found = plan(strategy=strategy, devices=2)
    for kind, part in parts.items():
        assert getattr(found, kind).value is part
        assert "inside DDPStrategy()" in getattr(found, kind).reason
    assert plan(strategy=strategy, accelerator=parts["accelerator"], precision=parts["precision"]).precision.value
    assert plan(strategy=strategy, accelerator="CPU").accelerator.value is parts["accelerator"]  # no contradiction
    found.strategy.value.checkpoint_io = other = TorchCheckpointIO()
    assert plan(strategy=strategy).checkpoint_io.value is other


def test_strategy_default_checkpoint_io(registry):
    """A strategy may name the CheckpointIO that is used when the request names none."""

    class Shelf(TorchCheckpointIO):
        pass

    class Engine(SingleDeviceStrategy):
        default_checkpoint_io = "shelf"

    registry.register("checkpoint_io", "shelf", Shelf)
    found = plan(strategy=Engine(), devices=1).checkpoint_io
    assert (found.alias, type(found.value), found.reason) == ("shelf", Shelf, "the default")
    assert plan(strategy=Engine(), devices=1, plugins=["torch"]).checkpoint_io.alias == "torch"


@pytest.mark.parametrize(
    ("inside", "request_", "texts"),
    [
        ({"accelerator": CPUAccelerator()}, {"accelerator": "sim"}, ["accelerator is given", "'sim'", "CPUAcc"]),
        ({"accelerator": CPUAccelerator()}, {"accelerator": CPUAccelerator()}, ["accelerator is given more"]),
        ({"precision": SinglePrecision()}, {"precision": "bf16"}, ["is given", "'bf16' (precision=)", "inside DDP"]),
        ({"precision": SinglePrecision()}, {"plugins": "bf16"}, ["precision is given more", "'bf16' (plugins=)"]),
        ({}, {"precision": "32", "plugins": "bf16"}, ["'32' (precision=)", "'bf16' (plugins=)"]),
        ({"checkpoint_io": TorchCheckpointIO()}, {"plugins": "torch"}, ["io is given more", "'torch' (plugins=)"]),
        ({"cluster_environment": LocalEnvironment()}, {"plugins": LocalEnvironment()}, ["environment is given"]),
    ],
)  # fmt: skip
def test_a_part_given_twice_is_refused(inside, request_, texts):
    with pytest.raises(ConfigurationError) as caught:
        plan(strategy=DDPStrategy(**inside), **request_)
    for text in texts:
        assert text in str(caught.value), caught.value


def test_a_strategy_checks_its_own_parts():
    with pytest.raises(TypeError, match=r"'accelerator' must be an instance of Accelerator \(got 'cpu'\)"):
        DDPStrategy(accelerator="cpu")
    with pytest.raises(TypeError, match="'precision' must be"):
        DDPStrategy(precision_plugin=32)
    with pytest.raises(ConfigurationError, match="'precision' and 'precision_plugin'"):
        DDPStrategy(precision=SinglePrecision(), precision_plugin=SinglePrecision())


def test_qualified_and_contested_names(registry):
    registry.register("strategy", "mine", type("Mine", (DDPStrategy,), {}))
    for name in ("mine", "user/mine", "USER/Mine"):
        assert plan(strategy=name).strategy.alias == "mine"
    one, two = Package("one-dist", strategy="both"), Package("two-dist", strategy="both")
    with isolated_registry(distributions=[one, two]):
        with pytest.raises(AmbiguousAliasError, match="'one-dist/both' and 'two-dist/both'"):
            plan(strategy="both")
        assert plan(strategy="two-dist/both").strategy.alias == "both"


# -- processes that exist already ----------------------------------------------------------------------------


def test_every_refusal_is_an_error_of_torchhal():
    for request in ({"accelerator": "gpu"}, {"strategy": 3}, {"devices": True}, {"plugins": [3]}, {"precision": []}):
        with pytest.raises(TorchhalError):
            plan(**request)


def test_broken_checkpoint_io_is_skipped(registry):
    """A CheckpointIO that can't be made costs no run that uses another."""

    class Moody(TorchCheckpointIO):
        def __init__(self):
            raise RuntimeError("no driver")

    registry.register("checkpoint_io", "moody", Moody)
    assert [entry.component.alias for entry, _ in usable_ios()] == ["torch"]


def test_ambiguous_and_broken_names_in_plugins():
    """The error for a name in plugins= tells whether two plugins have it or its plugin is broken."""
    packages = [
        Package("acme", checkpoint_io="rack"),
        Package("zenith", checkpoint_io="rack"),
        Package("mixed", strategy=("shelf", "no target"), checkpoint_io="shelf"),
        Package("sunk", broken="OSError('no driver')"),
    ]
    with isolated_registry(distributions=packages):
        with pytest.raises(AmbiguousAliasError, match="'acme/rack' and 'zenith/rack'"):
            plan(plugins="rack")
        # a wrong record of another kind, which plugins= doesn't take, is none of this one's business
        assert plan(plugins="shelf").checkpoint_io.alias == "shelf"
        with pytest.raises(ConfigurationError) as caught:
            plan(plugins="dcp")
    assert "'dcp' comes with torchhal-parallel: pip install torchhal-parallel" in str(caught.value)
    assert "plugin 'sunk' (sunk 1.0) is broken: OSError: no driver" in str(caught.value)
