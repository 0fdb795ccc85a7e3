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
"""


@pytest.fixture
def run(pl, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tree=pl.__name__)))

    def call(*arguments):
        command = [sys.executable, "-m", "torchhal_lightning", script.name, *arguments]
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
    assert (module, steps, epochs) == ("torchhal_lightning.trainer", 3, 1)
    assert {"EarlyStopping", "SaveConfigCallback", "ModelCheckpoint"} <= set(kinds)
    assert "max_epochs: 1" in (tmp_path / "out" / "config.yaml").read_text()


def test_help_and_a_wrong_option(run):
    done = run("fit", "--help")
    assert done.returncode == 0 and "--trainer.gradient_clip_val" in done.stdout and "--ckpt_path" in done.stdout
    done = run("fit", "--trainer.max_epochs=many")
    assert done.returncode == 2 and "max_epochs" in done.stderr
