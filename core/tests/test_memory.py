"""Memory by the meta device: what an optimizer keeps, and the command that says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from torchhal import cli
from torchhal.memory_estimate import STATE_FACTORS, build_model, bytes_of, model_memory
from torchhal.strategies import DDPStrategy
from torchhal.testing import isolated_registry

OPTIMIZERS = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "Rprop"]
OPTIONS = {"SGD": {"momentum": 0.9}}

MODEL = """
import torch
import torchhal
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8, frozen=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.up.requires_grad_(not frozen)

    def training_step(self, batch, batch_idx):
        return self.down(self.up(batch)).mean()

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad])

def large():
    return Net(40000)

class Bare(nn.Linear):
    pass

class Needs(Net):
    def __init__(self, width):
        super().__init__(width)

class Steps(Net):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1 / self.trainer.max_steps)

class Decays(torchhal.Module):  # as docs/how-to/train.md has it, and what else a model may read there
    def configure_model(self):
        self.net = nn.Linear(8, 8 * self.trainer.world_size)

    def configure_optimizers(self):
        trainer = self.trainer
        optimizer = torch.optim.SGD(self.parameters(), lr=1 / trainer.max_steps, momentum=0.9)
        counts = (trainer.num_training_batches, trainer.max_epochs, len(trainer.train_dataloader))
        assert trainer.num_training_batches * trainer.max_epochs == trainer.estimated_stepping_batches, counts
        assert trainer.training is False and trainer.state.fn == "fit" and trainer.accumulate_grad_batches == 1
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

class Reads(Decays):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / len(self.trainer.datamodule.train))

class Values(Net):
    def __init__(self):
        super().__init__()
        self.scale = float(torch.ones(3).sum())

three = 3
"""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [None, False])
def test_state_is_what_a_real_step_makes(name: str, foreach: bool | None) -> None:
    def measure(device: str) -> int:
        with torch.device(device):
            model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach, **OPTIONS.get(name, {}))
        if device == "meta":
            memory = model_memory(model, [optimizer])
            assert memory.note == "" and all(parameter.grad is None for parameter in model.parameters())
            return memory.estimate().optimizer
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        values = [value for entry in optimizer.state.values() for value in entry.values()]
        return sum(bytes_of(value) for value in values if isinstance(value, torch.Tensor) and value.dim())

    assert measure("meta") == measure("cpu")


def test_an_optimizer_that_can_not_step_without_data() -> None:
    model = build_model(nn.Linear, [100, 100])
    memory = model_memory(model, [torch.optim.LBFGS(model.parameters())])
    assert memory.estimate().optimizer == int(STATE_FACTORS["LBFGS"]) * (10000 + 100) * 4
    assert "LBFGS can't step without data" in memory.estimate().note


def test_tied_and_frozen_parameters_and_ddp() -> None:
    model = build_model(lambda: nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)}))
    model["b"].weight = model["a"].weight
    memory = model_memory(model, [])
    assert (memory.estimate().parameters, memory.estimate().gradients) == (64, 64)
    model["a"].weight.requires_grad_(False)
    assert model_memory(model, []).estimate().gradients == 0
    model["a"].weight.requires_grad_(True)
    assert DDPStrategy().memory_per_rank(memory, 1).peak == 128
    assert DDPStrategy().memory_per_rank(memory, 2).peak == 192
    assert DDPStrategy(gradient_as_bucket_view=True).memory_per_rank(memory, 2).peak == 128


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets_of_test_memory.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explain(*arguments: str) -> int:
    return cli.main(["explain", "--accelerator", "cpu", "--devices", "2", *arguments])


def test_as_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--strategy", "ddp", "--model", "nets_of_test_memory:Net", "--model-args", '{"width": 16}', "--json")
    assert explain(*arguments) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["strategy"]["choice"] == "ddp"
    own = 4 * (16 * 64 + 64 + 64 * 16 + 16 + 32)
    (row,) = found["memory"].pop("strategies")
    assert found["memory"] == {
        "model": "nets_of_test_memory:Net", "world_size": 2, "parameters": own // 4, "bytes": own,
    }  # fmt: skip
    assert row.pop("note")
    assert row == {
        "strategy": "ddp", "parameters": own, "buffers": 4 * 32 + 8, "gradients": own, "optimizer": 2 * own,
        "temporary": own, "total": 4 * own + 136, "peak": 5 * own + 136,
    }  # fmt: skip


def test_nothing_is_allocated(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert explain("--strategy", "ddp", "--model", "nets_of_test_memory:large") == 0
    assert "12800280000 parameters" in capfd.readouterr().out


def test_precision_counts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for precision in ("32-true", "bf16-true"):
        command = ("--strategy", "ddp", "--model", "nets_of_test_memory:Net", "--precision", precision, "--json")
        assert explain(*command) == 0
        sizes.append(json.loads(capfd.readouterr().out)["memory"]["strategies"][0]["optimizer"])
    assert sizes[0] == 2 * sizes[1]


def test_a_model_that_asks_how_long_it_trains(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert explain("--strategy", "ddp", "--model", "nets_of_test_memory:Decays", "--json") == 0
    (row,) = json.loads(capfd.readouterr().out)["memory"]["strategies"]
    assert row["parameters"] == row["optimizer"] == 4 * (8 * 16 + 16)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no_such_module_here:Net"], "can't be imported"),
        (["nets_of_test_memory:Nat"], "did you mean 'Net'"),
        (["nets_of_test_memory"], "must be 'package.module:Class'"),
        (["nets_of_test_memory:three"], "must name a class or a function"),
        (["nets_of_test_memory:Bare"], "--model-args"),
        (["nets_of_test_memory:Bare", "--model-args", "[3, 3]"], "has no configure_optimizers()"),
        (["nets_of_test_memory:Needs"], "--model-args"),
        (["nets_of_test_memory:Steps"], "without a Trainer"),
        (["nets_of_test_memory:Reads"], "A torchhal.Module finds one with 10 epochs of 1000 batches"),
        (["nets_of_test_memory:Net", "--model-args", '{"widht": 3}'], "can't be called with {'widht': 3}"),
        (["nets_of_test_memory:Values"], "can't be built on the meta device"),
        (["nets_of_test_memory:Net", "--model-args", "{"], "must be JSON"),
        (["nets_of_test_memory:Net", "--model-args", "3"], "must be a JSON object or array"),
        (["torch:ones", "--model-args", "[3]"], "must be, or return, an nn.Module"),
    ],
)
def test_errors(folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert explain("--model", *arguments) == 2
    out, err = capfd.readouterr()
    assert words in err and err.startswith("error: ") and out == ""
    assert "memory_estimate.py" not in err, "no place in torchhal"


def test_arguments_without_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert explain("--model-args", "{}") == 2
    assert "'--model-args' are the arguments of a '--model'" in capfd.readouterr().err


class Moody(DDPStrategy):
    def __init__(self) -> None:
        raise RuntimeError("no driver")


def test_broken_strategy_costs_one_row(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A strategy that can't be made costs only its own row."""
    with isolated_registry() as registry:
        registry.register("strategy", "moody", Moody)
        assert explain("--model", "nets_of_test_memory:Net", "--json") == 0
    rows = {row["strategy"]: row for row in json.loads(capfd.readouterr().out)["memory"]["strategies"]}
    assert rows["moody"]["reason"].startswith("RuntimeError: no driver (")
    assert rows["ddp"]["total"] > 0
