"""Core and plugin as wheels: what ``pip install torchhal torchhal-xla`` gives beside torch_xla trains by its alias."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
import torch
import torchhal
import torchhal_xla

for package in (torchhal, torchhal_xla):
    assert package.__file__.startswith(sys.argv[1]), package.__file__


class Line(torch.nn.Linear):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch), 3 * batch + 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


torchhal.seed_everything(0)
model = Line(1, 1)
trainer = torchhal.Trainer(accelerator="xla", strategy=sys.argv[2], max_epochs=20, default_root_dir=sys.argv[1])
trainer.fit(model, [torch.rand(16, 1) for _ in range(20)])
learned = abs(model.weight.item() - 3) < 0.05
print(type(trainer.strategy).__module__, learned, trainer.checkpoint_callback.best_model_path)
"""


def build(source: Path, folder: Path, scratch: Path) -> Path:
    copy = scratch / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "dist", "tests"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT / "plugins" / "xla", tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy"))


def test_the_vendor_is_an_extra(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode().splitlines()
    assert "torchhal_xla/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"torchhal_xla"}
    requires = [line for line in metadata if line.startswith("Requires-Dist")]
    assert not any("==" in line.partition(";")[0] for line in requires)
    assert any("torch-xla<2.10,>=2.9" in line.replace("_", "-") and "'vendor'" in line for line in requires)
    assert not any("xla" in line for line in requires if "extra" not in line)


@pytest.mark.usefixtures("torch_xla")
def test_the_wheels_train_by_their_alias(wheel, tmp_path):
    core = build(ROOT / "core", tmp_path / "dist", tmp_path / "copy")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(core), str(wheel)], check=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    for strategy, module in (("single_tpu", "torchhal_xla.single"), ("xla_fsdp", "torchhal_xla.spmd")):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "train.py"), str(site), strategy],
            env={**os.environ, "PYTHONPATH": str(site), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found, learned, checkpoint = done.stdout.splitlines()[-1].split()
        assert (found, learned) == (module, "True") and Path(checkpoint).is_file()
