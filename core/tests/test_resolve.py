"""From a request to a Plan: every choice has its reason, every refusal names both sides, and nothing is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from typing import Any, ClassVar

import pytest
import torch
from importlib_metadata import Distribution

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import ClusterEnvironment, LocalEnvironment
from torchhal.errors import (
    AcceleratorUnavailableError,
    AmbiguousAliasError,
    ConfigurationError,
    TorchhalError,
    UnknownAliasError,
    UnsupportedCombinationError,
)
from torchhal.launchers import MultiprocessingLauncher
from torchhal.plugin import HOOKS, Availability
from torchhal.precision import MixedPrecision, Precision, SinglePrecision
from torchhal.resolve import Plan, Request, resolve
from torchhal.resolve._checkpoint_ios import usable_ios
from torchhal.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torchhal.testing import isolated_registry

pytestmark = pytest.mark.timeout(60)

RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHHAL_LAUNCH_ID",
)  # fmt: skip

# Two nodes of two processes, as torchrun 2.13 sets them for the second process of the second node.
TORCHRUN = {
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "RANK": "3", "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "4",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """No plugins but those of a test, and no launcher's variables."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with isolated_registry() as fresh:
        yield fresh


@pytest.fixture
def torchrun(monkeypatch):
    """Be started by torchrun: one node of ``local`` processes unless told otherwise."""

    def start(local=2, nodes=1):
        values = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": local * nodes, "GROUP_WORLD_SIZE": nodes, "RANK": 0}
        for name, value in {**TORCHRUN, "LOCAL_RANK": 0, "GROUP_RANK": 0, **values}.items():
            monkeypatch.setenv(name, str(value))

    return start


class Fake(Accelerator):
    """Four devices that torch knows but this machine lacks; nothing in here touches one."""

    name: ClassVar[str] = "fake"
    device_type: ClassVar[str] = "meta"
    precisions: ClassVar[frozenset[str]] = frozenset({"32-true", "bf16-mixed"})
    count: ClassVar[int] = 4
    reason: ClassVar[str] = ""

    @classmethod
    def availability(cls) -> Availability:
        return Availability(not cls.reason, cls.reason)

    def device_count(self) -> int:
        return self.count


def fake(name: str, **attributes: Any) -> type[Fake]:
    return type(name.title(), (Fake,), {"name": name, **attributes})


def plan(**request: Any) -> Plan:
    return resolve(Request(**request))


def choices(found: Plan) -> dict[str, str]:
    return {what: choice for what, choice, _ in found.rows()}


def reason(found: Plan, of: str) -> str:
    return {what: why for what, _, why in found.rows()}[of]


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
    """STR-37: one kind of error for all of it, except that an unknown alias is a LookupError of its own."""
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
def test_what_is_not_installed_says_what_to_install(kind, alias, package):
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


def test_a_strategy_may_name_the_checkpoint_io_that_is_used_when_none_is(registry):
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


# -- accelerator="auto" --------------------------------------------------------------------------------------


class Package(Distribution):
    """A distribution in memory with one plugin; ``broken`` is what its manifest raises."""

    def __init__(self, name: str, *, broken: str = "", **components: Any) -> None:
        self.label = name
        self.module = name.replace("-", "_") + "_manifest"
        body = [f"raise {broken}"] if broken else []
        targets = {
            "accelerator": f"{__name__}:Fake",
            "strategy": "torchhal.strategies.ddp:DDPStrategy",
            "checkpoint_io": "torchhal.checkpoint:TorchCheckpointIO",
        }
        for kind, alias in components.items():
            alias, target = alias if isinstance(alias, tuple) else (alias, targets[kind])
            body += ["@hookimpl", f"def {HOOKS[kind]}():", f"    return [Component({alias!r}, {target!r})]"]
        module = type(sys)(self.module)
        source = "\n".join(["from torchhal.plugin import Component, hookimpl", *body])
        self.loader = _Source(self.module, source)
        del module

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self.label}\nVersion: 1.0\n"
        if filename == "entry_points.txt":
            return f"[torchhal]\n{self.label} = {self.module}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        return path


class _Source:
    """Finds and runs one module from a string."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        sys.modules.pop(name, None)
        sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "name", None) != name or not isinstance(f, _Source)]
        sys.meta_path.append(self)

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.source, module.__dict__)


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Source)]:
        sys.meta_path.remove(finder)
        sys.modules.pop(finder.name, None)  # other tests have plugins of the same names


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


def test_auto_tells_of_what_it_could_not_take(registry):
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
def test_a_broken_plugin_is_never_silently_the_cpu(package, text):
    with isolated_registry(distributions=[Package("npu-dist", **package)]):
        found = plan()
        assert found.accelerator.alias == "cpu"
        (note,) = found.notes
        assert text in note and "npu-dist" in note


def test_a_plugin_that_the_user_disabled_is_not_missed():
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


# -- devices and strategies ----------------------------------------------------------------------------------


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
    def check_fit(self, *, precision, world_size):
        if world_size % 2 or "scales_loss" in precision.features:
            raise ConfigurationError(f"pairs that scale nothing (got {world_size}, {precision.alias})")


def test_a_strategy_may_refuse_numbers_of_processes_and_what_a_precision_does(torchrun):
    assert plan(strategy=InPairs(), devices=2, num_nodes=3, precision="bf16-mixed").world_size == 6
    with pytest.raises(ConfigurationError, match=r"got 3, 32-true"):
        plan(strategy=InPairs(), devices=3)
    with pytest.raises(ConfigurationError, match=r"got 2, 16-mixed"):
        plan(strategy=InPairs(), devices=2, precision="16-mixed")
    torchrun(3)
    with pytest.raises(ConfigurationError, match=r"got 3, 32-true"):
        plan(strategy=InPairs())


def test_an_accelerator_may_want_strategies_of_its_own(registry):
    picky = fake("picky", own_strategies=True, default_strategy="restricted", default_parallel_strategy="restricted")
    registry.register("accelerator", "picky", picky)
    registry.register("strategy", "restricted", type("OnPicky", (DDPStrategy,), {"accelerators": {"picky"}}))
    assert plan(accelerator="picky", devices=2).strategy.alias == "restricted"
    for asked in ("ddp", "single_device", SingleDeviceStrategy()):
        with pytest.raises(UnsupportedCombinationError, match=r"is not made for accelerator 'picky'.*'restricted'"):
            plan(accelerator="picky", devices=1, strategy=asked)


def test_an_accelerator_lists_its_precisions(registry):
    registry.register("accelerator", "fake", Fake)
    assert plan(accelerator="fake", precision="bf16").precision.alias == "bf16-mixed"
    with pytest.raises(
        UnsupportedCombinationError, match=r"'fake' does not compute in .*'64-true': it knows '32-true', 'bf16-mixed'"
    ):  # fmt: skip
        plan(accelerator="fake", precision=64)


class MyFP8(Precision):
    alias = "my-fp8"


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


def test_a_start_method_that_the_device_does_not_survive(registry):
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
def test_an_accelerator_without_a_backend_refuses_process_groups(registry, alias, devices):
    registry.register("accelerator", "fake", fake("fake", backend=""))
    with pytest.raises(UnsupportedCombinationError, match=rf"'{alias}' joins .* no backend .* 'fake'.*'single_device'"):
        plan(accelerator="fake", strategy=alias, devices=devices)
    own = DDPStrategy(process_group_backend="mine")
    assert plan(accelerator="fake", strategy=own, devices=devices).strategy.value is own
    assert plan(accelerator="fake", devices=1).strategy.alias == "single_device"


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

    def test_a_plugin_that_drives_it_says_the_rest(self, kind, registry):
        registry.register("accelerator", "fake", fake("fake", device_type=kind, reason="no driver"))
        (note,) = plan().notes
        assert "fake: no driver" in note and "pip install" not in note
        registry.register("accelerator", "named", fake("named", device_type=kind, auto_priority=None))
        assert "pip install" not in "".join(plan().notes)

    def test_one_that_the_user_disabled_is_not_missed(self, kind):
        package = Package("torchhal-gpu", accelerator="gpu")
        with isolated_registry(distributions=[package], environ={"TORCHHAL_DISABLE_PLUGINS": "torchhal-gpu"}):
            assert plan().notes == ()

    def test_none_is_there(self, kind, monkeypatch):
        """A torch that was built for it, on a machine without."""
        monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
        assert plan().notes == ()


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

    def test_a_strategy_that_runs_the_script_is_refused(self):
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


# -- processes that exist already ----------------------------------------------------------------------------


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


def test_auto_nodes_are_one_where_nobody_has_started_processes():
    assert plan(num_nodes="auto", devices=2, strategy="ddp").num_nodes == 1


def test_torchrun_whose_nodes_may_change_wants_stores_of_its_own(torchrun, monkeypatch):
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


def test_an_environment_that_cannot_answer_is_a_note(registry):
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


def test_an_environment_may_start_the_processes_in_its_own_way():
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


def test_every_refusal_is_an_error_of_torchhal():
    for request in ({"accelerator": "gpu"}, {"strategy": 3}, {"devices": True}, {"plugins": [3]}, {"precision": []}):
        with pytest.raises(TorchhalError):
            plan(**request)


def test_an_io_that_cannot_be_made_costs_no_run_that_uses_another(registry):
    class Moody(TorchCheckpointIO):
        def __init__(self):
            raise RuntimeError("no driver")

    registry.register("checkpoint_io", "moody", Moody)
    assert [entry.component.alias for entry, _ in usable_ios()] == ["torch"]


def test_a_name_in_plugins_that_two_plugins_have_or_that_failed_says_so():
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
