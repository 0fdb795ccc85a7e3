"""Strategies as a user starts them: a script, spawned workers, the simulated accelerator, a model built on meta."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training

pytestmark = pytest.mark.timeout(170)

HERE = Path(__file__).parent
SCRIPT = """
import sys

sys.path.insert(0, {here!r})
import models
from torchhal import Trainer
from training import loader

if __name__ == "__main__":
    alias, accelerator, folder = sys.argv[1:]
    trainer = Trainer(
        accelerator=accelerator, strategy=alias, devices=2, max_epochs=1, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=models.CLIP,
        accumulate_grad_batches=models.ACCUMULATE,
    )
    module = models.Transformer()
    module.train_dataloader = models.Loader(trainer)
    trainer.fit(module)
    if trainer.is_global_zero:
        print("RESULT", sum(value.double().abs().sum().item() for value in module.state_dict().values()))
"""


def run(tmp_path, alias, accelerator):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(here=str(HERE)))
    done = subprocess.run(
        [sys.executable, str(script), alias, accelerator, str(tmp_path)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split("RESULT ")[1])


def test_the_names_that_users_know():
    from torchhal import registry

    means = {"ddp_sharded": "zero1", "ddp_fully_sharded": "zero3", "fsdp": "zero3"}
    assert {alias: registry.find("strategy", alias).component.alias for alias in means} == means
    assert registry.find("strategy", "ddp_sharded_spawn").create().start_method == "spawn"


@pytest.mark.slow
@pytest.mark.parametrize(
    "alias, accelerator",
    [
        ("ddp_sharded_spawn", "cpu"),
        ("ddp_fully_sharded", "cpu"),
        ("zero1", "sim"),
        ("zero3", "sim"),
        ("tensor_parallel", "sim"),
        ("pipeline", "sim"),
    ],
)
def test_a_script_trains(tmp_path, alias, accelerator):
    from parity import plain

    _, state = plain("Transformer")
    expected = sum(value.double().abs().sum().item() for value in state.values())
    assert run(tmp_path, alias, accelerator) == pytest.approx(expected, rel=1e-5)


FAILS = """
import sys

sys.path.insert(0, {here!r})
import wrong
from training import attempt

if __name__ == "__main__":
    print(*attempt("hybrid", 4, "OpenBesideOne", {{"pipeline": 2, "tensor": 2}}))
"""


@pytest.mark.slow
def test_stage_errors_are_unwrapped(tmp_path):
    """torch wraps it, and the ranks of the other stage wait for what never comes: they are ended."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS.format(here=str(HERE)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False)
    first = done.stdout.partition("\n")[0]
    assert first.startswith("ConfigurationError nothing closes the 'colwise' layer 'layers.0.side'"), done.stderr


@pytest.mark.slow
def test_configure_model_matches_one_process(world2):
    """Whoever set the values: reset_parameters, torch.nn.init, torch.tensor; and only rank 0 has room for all."""
    expected = training.built_late("single_device", 1, "Late")["state"]
    for result in (results := world2.run(training.built_late, "zero3", 2, "Late", timeout=100)):
        assert result["steps"].tolist() == [0, 3, 6, 9]
        assert result["loss"] == pytest.approx(results[0]["loss"])
    assert list(results[0]["state"]) == list(expected)
    for name, value in expected.items():
        assert torch.equal(results[0]["state"][name], value), name
    assert results[1]["peak"] < 0.8, "the others hold a unit and their shares"


def test_a_model_that_is_built_on_meta(world2):
    """Every rank ends with rank 0's draw of whole parameters: halves drawn by each rank would be equal halves."""
    results = world2.run(training.built_late, "zero3", 2, "LateOnMeta", timeout=100)
    assert max(result["peak"] for result in results) < 0.8, "no rank holds the whole model"
    state = results[0]["state"]
    first, second = state["layers.0.up.weight"].chunk(2)
    assert not torch.equal(first, second)
    assert all(value.isfinite().all() for value in state.values())
    assert results[0]["loss"] == pytest.approx(results[1]["loss"])
    assert all((state[f"layers.{index}.norm1.bias"] == 0.5).all() for index in range(4)), "_init_weights of the model"
    assert (state["layers.1.up.bias"] == 0.25).all(), "init_weights comes last"
    assert state["head.weight"].abs().max() < 0.2
    assert state["strength"] == 1.25 and results[1]["steps"].tolist() == [0, 3, 6, 9]


def test_what_has_values_keeps_them_beside_what_has_none(world2):
    state = world2.run(training.built_late, "zero3", 2, "Pretrained", timeout=100)[0]["state"]
    assert (state["embed.weight"] == 0.125).all()
    assert state["layers.2.down.weight"].abs().max() > 0
    assert (state["layers.1.up.bias"] == 0.25).all()


def test_what_nobody_gives_values_is_named(world2):
    for message in world2.run(training.built_late, "zero3", 2, "Forgotten", timeout=100):
        for word in ("'position'", "'strength'", "'unused'", "init_weights()", "configure_model"):
            assert word in message
