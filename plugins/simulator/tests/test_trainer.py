"""A Trainer on the simulated accelerator: every function, every launcher, and what a step makes the device do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hardware  # core's
import pytest
import torch
import whole_run

from torchhal_simulator import counting, load

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "whole_run.py"


@pytest.fixture(scope="module", autouse=True)
def sim() -> None:
    load()


def script(*arguments: object, timeout: float = 90, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def outcome(out: Path, *arguments: object) -> dict[str, Any]:
    done = script(SCRIPT, out, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No backend of type" not in done.stderr, "torch knows the default backend of the group"
    result: dict[str, Any] = torch.load(out, weights_only=True)
    return result


def check(result: dict[str, Any], devices: int) -> None:
    assert result["validate"][0]["accuracy"] == result["test"][0]["accuracy"] > 0.8
    answers = torch.cat([part["answer"] for part in result["predict"]])
    assert answers.device.type == "cpu" and len(answers) == 60
    assert {part["rank"] for part in result["predict"]} == set(range(devices))
    (_, labels) = whole_run.data().dataset.tensors
    assert (answers == labels).float().mean().item() == pytest.approx(result["test"][0]["accuracy"])
    assert {value.device.type for value in result["state"].values()} == {"cpu"}
    assert result["where"] == {"sim:0"}


def test_the_tests_of_the_core_do_not_skip_it() -> None:
    """Whoever runs these tests has the package; those of the core skip only where it isn't installed."""
    assert hardware.missing("sim") == "" and "sim" in hardware.ACCELERATORS


def test_every_function_on_one_device() -> None:
    torch.manual_seed(0)
    trainer, result = whole_run.run("auto", 1)
    check(result, 1)
    assert trainer.strategy.root_device == torch.device("sim", 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_forkserver", "ddp_fork"])
def test_every_function_on_two_devices(tmp_path: Path, strategy: str) -> None:
    check(outcome(tmp_path / "result", strategy, 2), 2)


def test_a_fork_after_the_device_was_used_says_so() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import torch, torchhal_simulator, whole_run\n"
        "torchhal_simulator.load(); torch.ones(1, device='sim')\n"
        "whole_run.run('ddp_fork', 2)"
    )
    done = script("-c", code)
    assert done.returncode == 1
    assert "in a forked subprocess whose parent has used it" in done.stderr
    assert "'spawn'" in done.stderr


@pytest.mark.slow
def test_a_seed_reaches_a_device_that_comes_later(tmp_path: Path) -> None:
    """``torch.manual_seed`` comes before the Trainer that loads the device, and dropout draws on the device; in a
    worker, too."""
    one, other, again, spawned = (
        outcome(tmp_path / f"{strategy}-{seed}", strategy, 2, seed)["loss"]
        for strategy, seed in (("ddp", 1), ("ddp", 2), ("ddp", 1), ("ddp_spawn", 1))
    )
    assert torch.equal(one, again) and torch.equal(one, spawned) and not torch.equal(one, other)


@pytest.mark.parametrize(("first", "then"), [("sim", "cpu"), ("cpu", "sim")])
def test_a_run_continues_on_another_accelerator(tmp_path: Path, first: str, then: str) -> None:
    """Weights, optimizer and counters do; each kind of device draws its own random numbers."""
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch, whole_run
from torchhal import Trainer

def fit(accelerator, epochs, ckpt_path=None):
    trainer = Trainer(accelerator=accelerator, devices=1, max_epochs=epochs,
                      logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    model = Net()
    trainer.fit(model, whole_run.data(), ckpt_path=ckpt_path)
    return trainer, model

class Net(whole_run.Net):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.body[2](self.body[0](batch[0])), batch[1])

torch.manual_seed(0)
_, whole = fit("cpu", 4)
torch.manual_seed(0)
trainer, _ = fit({first!r}, 2)
trainer.save_checkpoint("half.ckpt")
trainer, second = fit({then!r}, 4, "half.ckpt")
assert trainer.global_step == 48
for name, value in whole.state_dict().items():
    torch.testing.assert_close(second.state_dict()[name], value)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hidden_syncs() -> Any:
    spec = importlib.util.spec_from_file_location("hidden_syncs", ROOT / "benchmarks" / "hidden_syncs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_step_has_no_hidden_synchronisations(hidden_syncs: Any, precision: str) -> None:
    """Logging, bar, logger, clipping, accumulation, scheduler, callbacks and validation add nothing to a plain loop's
    steps, but for one read where the logger gets values."""
    assert hidden_syncs.measure(precision, 1)


def test_a_step_of_ddp_has_no_hidden_synchronisations(hidden_syncs: Any) -> None:
    assert hidden_syncs.under_torchrun("16-mixed")


def test_a_hidden_synchronisation_would_be_seen(hidden_syncs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = hidden_syncs.Net.training_step

    def careless(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = clean(self, batch, batch_idx)
        loss.item()
        return loss

    monkeypatch.setattr(hidden_syncs.Net, "training_step", careless)
    assert not hidden_syncs.measure("32-true", 1)


def test_evaluation_reads_nothing_from_the_device(hidden_syncs: Any) -> None:
    """A validation of many batches waits as often as one of few: when its metrics are made into numbers."""

    def waits(count: int) -> int:
        model, batches = hidden_syncs.Net(), hidden_syncs.Batches().batches
        trainer = hidden_syncs.Trainer(
            accelerator="sim", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        with counting() as counted:
            trainer.validate(model, batches[:count], verbose=False)
        return counted.synchronizations

    assert waits(2) == waits(12)


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    demo = ROOT / "docs" / "tutorials" / "digits.py"
    done = script(demo, "--accelerator", "sim", "--root", tmp_path, "--epochs", 6, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_accuracy" in done.stdout + done.stderr
