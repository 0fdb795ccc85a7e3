"""LightningCLI makes the exchanged Trainer from a command line, with the options of Lightning's."""

import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import json
import sys
import torch
import {tree} as pl
from {tree}.cli import LightningCLI
from {tree}.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    cli = LightningCLI(BoringModel, BoringDataModule, args=sys.argv[1:])
    trainer = cli.trainer
    kinds = [type(each).__name__ for each in trainer.callbacks]
    print("FOUND", json.dumps([type(trainer).__module__, trainer.global_step, trainer.max_epochs, kinds]))
    made = [type(each).__name__ for each in (trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)]
    print("MADE", *made, trainer.optimizers[0].param_groups[0]["lr"])
"""


@pytest.fixture(params=[(), ("--stand-in",)], ids=str)
def run(request, pl, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tree=pl.__name__)))

    def call(*arguments):
        command = [sys.executable, "-m", "torchhal_lightning", *request.param, script.name, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return call


def test_a_fit(run, pl, tmp_path):
    stopping = f"{pl.__name__}.callbacks.EarlyStopping"
    (tmp_path / "config.yaml").write_text(
        "trainer:\n  accelerator: cpu\n  max_epochs: 2\n  limit_train_batches: 3\n  logger: false\n"
        f"  default_root_dir: out\n  callbacks:\n  - class_path: {stopping}\n"
        "    init_args: {monitor: x, strict: false}\n"
    )
    done = run("fit", "--config", "config.yaml", "--trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    module, steps, epochs, kinds = json.loads(line.removeprefix("FOUND"))
    assert module in ("torchhal_lightning.trainer", "torchhal_lightning.stand_in.pytorch.trainer")
    assert (steps, epochs) == (3, 1)
    assert {"EarlyStopping", "SaveConfigCallback", "ModelCheckpoint"} <= set(kinds)
    assert "max_epochs: 1" in (tmp_path / "out" / "config.yaml").read_text()


def test_help_and_a_wrong_option(run):
    done = run("fit", "--help")
    assert done.returncode == 0 and "--trainer.gradient_clip_val" in done.stdout and "--ckpt_path" in done.stdout
    done = run("fit", "--trainer.max_epochs=many")
    assert done.returncode == 2 and "max_epochs" in done.stderr


def test_an_optimizer_of_the_command_line(run):
    done = run(
        "fit", "--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.limit_train_batches=2",
        "--trainer.logger=false", "--trainer.default_root_dir=out", "--optimizer=Adam", "--optimizer.lr=0.25",
        "--lr_scheduler=torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MADE Adam StepLR 0.0625" in done.stdout
