"""Loading a flavour: what the process did before, and what it may still do. Each in a process of its own."""

import os
import subprocess
import sys

import pytest

from torchhal_simulator import _config as config


def python(code, **variables):
    """Run ``code`` in a process without settings but these; the process, ended."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(config.PREFIX)}
    if cache := os.environ.get(config.PREFIX + "CACHE"):
        environ[config.PREFIX + "CACHE"] = cache
    return subprocess.run(
        [sys.executable, "-c", "import torch, torchhal_simulator\n" + code],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def passes(code, **variables):
    done = python(code, **variables)
    assert done.returncode == 0, done.stderr
    return done


def test_a_seed_from_before_is_the_device_s(flavour):
    passes(f"""
torch.manual_seed(5)
module = torchhal_simulator.load({flavour!r})
assert not module.is_initialized()
assert module.initial_seed() == 5
first = torch.rand(3, device={flavour!r})
torch.manual_seed(5)
assert torch.equal(first, torch.rand(3, device={flavour!r}))
module.manual_seed(7)
torchhal_simulator.load({flavour!r})
assert module.initial_seed() == 7
""")


def test_a_trainer_leaves_a_seed_of_the_device_alone():
    passes("""
from torch.utils.data import DataLoader
from torchhal import Module, Trainer

class Draws(Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
    def training_step(self, batch, batch_idx):
        self.drawn = torch.rand(3, device=self.weight.device)
        return (self.weight * self.drawn).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
trainer = Trainer(accelerator="sim", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
torch.sim.manual_seed(123)
torch.rand(3, device="sim")
state = torch.sim.get_rng_state()
second = torch.rand(3, device="sim").cpu()
torch.sim.set_rng_state(state)
model = Draws()
trainer.fit(model, DataLoader(torch.zeros(1, 1)))
assert torch.equal(model.drawn.cpu(), second)
""")


def test_hpu_comes_before_the_first_question_for_the_accelerator():
    passes("""
assert not torch.accelerator.is_available()
for _ in range(2):
    try:
        torchhal_simulator.load("hpu")
    except RuntimeError as error:
        assert "Call torchhal_simulator.load('hpu') before the first question" in str(error), error
    else:
        raise AssertionError
""")
    passes("""
assert not torch.accelerator.is_available()
torchhal_simulator.load("sim")
x = torch.ones(2, device="sim", requires_grad=True)
x.sum().backward()
assert torch.accelerator.current_accelerator().type == "sim"
""")


@pytest.mark.parametrize("order", [("sim", "hpu"), ("hpu", "sim")])
def test_one_flavour_trains(order):
    done = passes(f"""
for flavour in {order!r}:
    torchhal_simulator.load(flavour)
x = torch.ones(2, device="sim", requires_grad=True)
x.sum().backward()
assert torch.equal(torch.ones(2, device="hpu").cpu() + 1, x.grad.cpu() + 1)
""")
    assert done.stderr.count("both simulated flavours are loaded") == 1


@pytest.mark.parametrize("name", ["privateuseone", "sim"])
def test_a_device_that_another_library_has_taken_is_refused(name):
    passes(f"""
if {name!r} == "sim":
    torch.utils.rename_privateuse1_backend("sim")
library = torch.library.Library("aten", "IMPL", "PrivateUse1")
library.impl("empty.memory_format", lambda *args, **kwargs: torch.empty(0))
try:
    torchhal_simulator.load("sim")
except RuntimeError as error:
    assert "another library has taken in this process (it is called {name!r})" in str(error), error
else:
    raise AssertionError
""")


def test_memory_is_told_alike_whichever_flavour_is_the_accelerator():
    passes("""
both = [torchhal_simulator.load("sim"), torchhal_simulator.load("hpu")]
kept = [torch.ones(3, device="sim"), torch.ones(3, device="hpu")]
sim, hpu = (module.memory_stats() for module in both)
assert sim == dict(torch.accelerator.memory_stats(0))
assert list(sim) == list(hpu)
assert {name for name in sim if sim[name] != hpu[name] and not name.startswith("requested")} == set()
""")


NAMED = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from torchhal import Module, Trainer
from torchhal.strategies.ddp import DDPStrategy

tell, told = dist.ProcessGroup._set_default_backend, []
dist.ProcessGroup._set_default_backend = lambda group, kind: (told.append(kind.name), tell(group, kind))


class Line(Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    accelerator="sim", devices=2, strategy=DDPStrategy(process_group_backend=BACKEND), max_steps=1, logger=False,
    enable_checkpointing=False,
)
trainer.fit(Line(), DataLoader(torch.ones(4, 1)))
assert not dist.is_initialized()
assert told[-1:] == ["CUSTOM"] and "GLOO" not in told, told
"""


@pytest.mark.parametrize("backend", [None, "cpu:gloo,sim:sim"])
def test_a_group_of_several_backends_is_told_which_is_the_device_s(backend, tmp_path):
    script = tmp_path / "named.py"
    script.write_text(NAMED.replace("BACKEND", repr(backend)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "No backend of type" not in done.stderr
