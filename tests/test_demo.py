"""The main job: the demo trains two processes on real digits, keeps a checkpoint, and tests it reloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.packaging
def test_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tutorials" / "digits.py"), "--root", str(tmp_path / "runs")],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^test accuracy of (.+): ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    checkpoint, accuracy = Path(line[0]), float(line[1])
    assert accuracy > 0.95
    assert checkpoint.is_file()
    assert checkpoint.is_relative_to(tmp_path / "runs")
    assert "val_accuracy=" in done.stderr  # the progress bar
    metrics = checkpoint.parents[1] / "metrics.csv"
    assert "train_loss" in metrics.read_text()
    draw = [sys.executable, str(ROOT / "docs" / "images" / "digits_curve.py"), str(metrics), str(tmp_path / "run.svg")]
    subprocess.run(draw, check=True, timeout=60)
    loss, validation = re.findall(r'<polyline .* points="(.*)"/>', (tmp_path / "run.svg").read_text())
    assert (len(loss.split()), len(validation.split())) == (12 * 19 // 10, 12)  # every 10th step, every epoch


def test_make_knows_the_demo() -> None:
    """``make demo`` runs the same file with nothing installed beforehand."""
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m venv" in plan
    assert "docs/tutorials/digits.py" in plan
