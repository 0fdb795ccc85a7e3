"""The examples that this project was asked to run, verbatim but for their import lines.

core/tests/seeds holds the code blocks as they were given, by the number of the text that they stand in.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from torchhal import Trainer
from torchhal.errors import UnknownAliasError
from torchhal.resolve import Request, resolve
from torchhal.strategies import DDPStrategy
from torchhal.testing import isolated_registry

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parent
SEEDS = TESTS / "seeds"
JOB = TESTS / "scripts" / "seed_job.py"


@pytest.fixture(autouse=True)
def no_plugins():
    """Whatever is installed beside torchhal where these tests run."""
    with isolated_registry():
        yield


def trainer_lines():
    for number in ("001", "002", "003"):
        for line in (SEEDS / f"{number}_trainer_lines.txt").read_text().splitlines():
            if line.strip().startswith("trainer"):
                yield number, line.strip()


INSTALL = {"gpu": "torchhal-gpu", "tpu": "torchhal-xla", "ipu": "torchhal-ipu"}
RUNS = {
    'trainer = Trainer(strategy="ddp_spawn", accelerator="auto", devices=4)': ("ddp_spawn", 4, "spawn"),
    'trainer = Trainer(strategy="ddp", accelerator="cpu", devices=3)': ("ddp", 3, "subprocess"),
}


@pytest.fixture
def namespace():
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return {"Trainer": functools.partial(Trainer, **quiet), "DDPStrategy": DDPStrategy}


def test_there_are_as_many_lines_as_were_given():
    assert [sum(n == number for n, _ in trainer_lines()) for number in ("001", "002", "003")] == [7, 7, 7]


@pytest.mark.parametrize(("number", "line"), list(trainer_lines()))
def test_trainer_lines(namespace, number, line):
    """They choose what they name, or say what is missing and what to install."""
    if line in RUNS:
        exec(line, namespace)
        plan = namespace["trainer"].plan
        assert (plan.strategy.alias, plan.world_size, plan.launcher) == RUNS[line]
        assert plan.accelerator.alias == "cpu" and isinstance(namespace["trainer"].strategy, DDPStrategy)
        return
    if "DDPStrategy(...)" in line:
        # a placeholder for the reader's own arguments, which are keywords
        with pytest.raises(TypeError, match="positional argument"):
            exec(line, namespace)
        line = line.replace("(...)", "()")
    accelerator = re.search('accelerator="(.*?)"', line).group(1)
    with pytest.raises(UnknownAliasError, match=f"pip install {INSTALL[accelerator]}") as caught:
        exec(line, namespace)
    assert repr(accelerator) in str(caught.value)


NAMES = {  # of the tables and the enumeration in the texts
    "ddp": None, "ddp_spawn": None, "none": None, "DDP": None, "None": None,
    "fsdp": "torchhal-parallel", "deepspeed": "torchhal-deepspeed", "hpu_parallel": "torchhal-hpu",
    "hpu_single": "torchhal-hpu", "ipu_strategy": "torchhal-ipu", "xla": "torchhal-xla", "single_tpu": "torchhal-xla",
    "bagua": "torchhal-bagua", "hivemind": "torchhal-hivemind", "FSDP": "torchhal-parallel",
    "Hybrid": "torchhal-parallel", "ZeRO1": "torchhal-parallel", "ZeRO2": "torchhal-parallel",
    "ZeRO3": "torchhal-parallel", "pipeline": "torchhal-parallel", "tensor_parallel": "torchhal-parallel",
}  # fmt: skip


@pytest.mark.parametrize(("alias", "package"), NAMES.items())
def test_strategy_names_are_known(alias, package):
    """Every name of a strategy is known, or its error names the package."""
    request = Request(accelerator="cpu", strategy=alias)
    if package is None:
        assert resolve(request).strategy.alias in ("ddp", "ddp_spawn", "single_device")
    else:
        with pytest.raises(UnknownAliasError, match=f"pip install {package}"):
            resolve(request)


def test_the_truncated_block_begins_as_the_others_do():
    """Text 002 ends in the middle of the class: what is there is what 001 and 003 have."""

    def squeezed(name):
        return [line for line in textwrap.dedent((SEEDS / name).read_text()).splitlines() if line]

    start = squeezed("002_custom_strategy.txt")
    assert squeezed("001_custom_strategy.txt")[: len(start)] == start
    assert squeezed("003_custom_strategy.txt")[1 : len(start)] == start[1:]


# -- custom strategies that train --------------------------------------------------------------------------------

PLAIN = "trainer = Trainer(strategy='ddp')"


def load_job():
    """A fresh module: its classes count from zero."""
    spec = importlib.util.spec_from_file_location("seed_job", JOB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_rank(out, snippets):
    load_job().main(out, snippets)


def run(out, *snippets, world=None):
    """The job on two processes: those of ``world``, as torchrun starts them, or what the strategy launches itself."""
    out.mkdir()
    if world is not None:
        world.run(in_rank, str(out), snippets, timeout=60)
    else:
        command = [sys.executable, str(JOB), str(out), *snippets]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    results = [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)]
    for name, value in results[0]["state"].items():
        assert torch.equal(value, results[1]["state"][name]), f"{name} differs between ranks"
    assert [result["world_size"] for result in results] == [2, 2]
    return results


@functools.cache
def weights_of_plain_ddp(out, world2, accelerator):
    result = run(out, PLAIN, world=world2)[0]
    assert result["strategy"] == "DDPStrategy" and result["forwards"] == 0
    seed_job = load_job()
    net = seed_job.model(seed=0)
    optimizer = net.configure_optimizers()
    x, y = seed_job.dataset().tensors
    for _ in range(2):
        for start in range(0, 48, 8):
            F.cross_entropy(net.body(x[start : start + 8]), y[start : start + 8]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(result["state"][name], value, rtol=1e-5, atol=1e-6)
    return result["state"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture
def plain_ddp(folder, world2, accelerator):
    """The weights after the same training with strategy="ddp", which are those of a plain loop."""
    return weights_of_plain_ddp(folder / accelerator, world2, accelerator)


def same_weights(results, expected):
    for name, value in expected.items():
        assert torch.equal(results[0]["state"][name], value), name


@pytest.mark.parametrize("number", ["001", "003"])
def test_a_custom_strategy_trains(tmp_path, world2, plain_ddp, number):
    """``configure_ddp`` with a wrapper of its own, in 003 with a ``setup`` that calls no inherited one."""
    if number == "001":
        use = textwrap.dedent((SEEDS / "001_custom_parts.txt").read_text()).split("\n\n")[0]
    else:
        use = (SEEDS / "003_trainer_custom.txt").read_text()
    assert use.splitlines()[1:] == ["trainer = Trainer(strategy=CustomDDPStrategy())"]
    results = run(tmp_path / "out", f"{number}_custom_strategy.txt", use, world=world2)
    assert [result["forwards"] for result in results] == [12, 12]  # two epochs of six batches, all through it
    assert results[0]["strategy"] == "CustomDDPStrategy"
    same_weights(results, plain_ddp)


@pytest.mark.parametrize("number", ["001", "003"])
def test_a_custom_strategy_with_its_own_parts_trains(tmp_path, plain_ddp, number):
    """``CustomDDPStrategy(accelerator=..., precision_plugin=...)``, started by its own launcher."""
    results = run(tmp_path / "out", f"{number}_custom_strategy.txt", f"{number}_custom_parts.txt")
    for result in results:
        assert result["forwards"] == result["backwards"] == 12
        assert result["setups"] == (2 if number == "003" else 1)  # the Trainer's, and the one that 003 makes itself
        # connect(...), as 003 has it, and the strategy's own with the model
        assert result["connected"] == ([True, False] if number == "003" else [False])
    same_weights(results, plain_ddp)


def test_the_parts_of_002_are_those_of_001():
    one, two = (textwrap.dedent((SEEDS / f"{number}_custom_parts.txt").read_text()) for number in ("001", "002"))
    assert one == two


def test_ellipsis_is_what_the_examples_say():
    """The snippets are really the ones with the literal ``...``."""
    for number in ("001", "003"):
        assert "device_ids=...," in (SEEDS / f"{number}_custom_strategy.txt").read_text()
    assert "precision_plugin.connect(...)" in (SEEDS / "003_custom_strategy.txt").read_text()
