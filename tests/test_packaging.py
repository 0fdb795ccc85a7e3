"""The core as a wheel, beside a plugin's wheel: what `pip install torchhal acme-slate` gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
import torch
import torchhal
from torch.nn import functional as F

assert torchhal.__file__.startswith(sys.argv[1]), torchhal.__file__


class Model(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torchhal.seed_everything(0)
x = torch.randn(64, 4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8)
trainer = torchhal.Trainer(
    accelerator="slate",
    devices=2,
    strategy="ddp",
    max_epochs=20,
    default_root_dir=sys.argv[2],
    enable_progress_bar=False,
)
trainer.fit(Model(), data)
trainer.print(f"{type(trainer.accelerator).__module__} {trainer.world_size} {trainer.callback_metrics['loss'] < 1e-2}")
"""


def build(source: Path, folder: Path, scratch: Path) -> Path:
    copy = scratch / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "dist"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "core", tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy"))


def test_the_wheel_holds_what_users_and_type_checkers_need(core_wheel: Path) -> None:
    with zipfile.ZipFile(core_wheel) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "torchhal/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"torchhal", f"torchhal-{core_wheel.name.split('-')[1]}.dist-info"}
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert not any("==" in line for line in requirements), "a package pins nothing"
    assert "License-Expression: MIT" in metadata
    assert "Requires-Dist: torch>=2.6" in metadata


def test_a_plugin_installed_beside_it_trains_by_its_alias(core_wheel: Path, tmp_path: Path) -> None:
    plugin = build(ROOT / "tests" / "distributions" / "slate", tmp_path / "dist", tmp_path / "copy")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(core_wheel), str(plugin)], check=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(site), str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "acme_slate.accelerator 2 True" in done.stdout
    listed = subprocess.run(
        [sys.executable, str(site / "bin" / "torchhal"), "plugins"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "acme-slate" in listed.stdout
