"""The commands of docs/how-to/configure.md, in the order in which a reader types them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, run_command, write_files

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

PAGE = ROOT / "docs" / "how-to" / "configure.md"


def commands(*, hydra: bool) -> list[str]:
    consoles = [block for block in blocks_of(PAGE) if block.language == "console"]
    lines = [line.removeprefix("$ ") for block in consoles for line in block.text]
    return [line for line in lines if ("hydra" in line) is hydra]


def run(folder: Path, lines: list[str]) -> str:
    write_files(blocks_of(PAGE), folder)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_")}
    # A reader has activated the environment whose python runs this.
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = run_command(["bash", "-ec", "\n".join(lines)], folder, environ, 400)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(420)
def test_every_command_runs(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    printed = run(tmp_path, commands(hydra=False))
    assert "learning rate of SGD." in printed
    saved = [path.read_text() for path in sorted(tmp_path.glob("torchhal_logs/*/config.yaml"))]
    assert "lr: 0.05" in saved[0] and "patience: 2" in saved[1] and saved[1] != saved[2]


@pytest.mark.timeout(420)
def test_hydras_commands_run(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    pytest.importorskip("jsonargparse")  # train.py has a TrainerCLI
    run(tmp_path, commands(hydra=True))
    assert len(list(tmp_path.glob("outputs/*/*/torchhal_logs/version_0/run.json"))) == 1
    assert len(list(tmp_path.glob("multirun/*/*/*/torchhal_logs/version_0/run.json"))) == 2
