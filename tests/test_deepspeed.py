"""torchhal-deepspeed as a distribution of its own: what is in its wheel, and what it says without DeepSpeed, or beside
another release of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins" / "deepspeed"
ALIASES = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3",
    "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme",
]  # fmt: skip
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal, torchhal_deepspeed


class Line(torch.nn.Linear):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


x = torch.linspace(-1, 1, 64).unsqueeze(1)
data = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4)
trainer = torchhal.Trainer(
    accelerator="cpu", strategy="deepspeed_stage_3", devices=2, max_epochs=8, logger=False, enable_progress_bar=False
)
torch.manual_seed(0)  # of one start in fifty, 64 steps don't come near enough to 3
line = Line(1, 1)
trainer.fit(line, data)
trainer.print(torchhal.__file__, torchhal_deepspeed.__file__, round(line.weight.item()), trainer.global_step)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    for source in (ROOT / "core", PLUGIN):
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two wheels, installed into a folder of their own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), *map(str, wheels)], check=True)
    return target


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed here but for DeepSpeed and torchhal, as links: an environment that has neither."""
    folder = tmp_path_factory.mktemp("libraries")
    ours = ("deepspeed", "torchhal", "__editable__")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().startswith(ours) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def run(arguments: list[str], *paths: Path, cwd: Path, site_packages: bool = False) -> subprocess.CompletedProcess[str]:
    """A Python that sees ``paths``, and what is installed here only with ``site_packages``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of packages whose own files aren't among the links
    command = [sys.executable, *([] if site_packages else ["-S"]), *arguments]
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=150, check=False
    )  # fmt: skip


def test_the_wheel_is_pure_and_its_vendor_an_extra(wheels: list[Path]) -> None:
    (wheel,) = [path for path in wheels if "deepspeed" in path.name]
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "torchhal_deepspeed/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in required if "deepspeed" in line] == [
        "Requires-Dist: deepspeed<0.20,>=0.19.8; extra == 'vendor'"
    ]
    assert not any("==" in line.partition(";")[0] for line in required), "a package pins nothing"


@pytest.mark.slow
def test_installed_from_wheels_it_trains_by_its_alias(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(["train.py"], site, cwd=tmp_path, site_packages=True)
    assert done.returncode == 0, done.stderr
    core, plugin, weight, steps = done.stdout.split()[-4:]
    assert core.startswith(str(site)) and plugin.startswith(str(site))
    assert (weight, steps) == ("3", "64")


@pytest.mark.slow
def test_without_deepspeed_it_loads_and_says_what_is_missing(site: Path, libraries: Path, tmp_path: Path) -> None:
    listed = run(["-m", "torchhal.cli", "plugins", "--json"], site, libraries, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    (plugin,) = [p for p in json.loads(listed.stdout)["plugins"] if p["distribution"] == "torchhal-deepspeed"]
    assert plugin["status"] == "loaded"
    strategies = {c["alias"]: c for c in plugin["components"] if c["kind"] == "strategy"}
    assert sorted(strategies) == ALIASES
    assert {(c["available"], c["reason"]) for c in strategies.values()} == {
        (False, "the Python module 'deepspeed' is not installed")
    }
    asked = run(["-c", "from torchhal import Trainer; Trainer(strategy='deepspeed')"], site, libraries, cwd=tmp_path)
    assert asked.returncode == 1
    assert "strategy 'deepspeed' can't be used here: the Python module 'deepspeed' is not installed" in asked.stderr
    # what it has written can be read all the same
    script = (
        "from torchhal_deepspeed.checkpoint import DeepSpeedCheckpointIO as IO; IO().save_checkpoint({'a': 1}, 'c'); "
    )
    read = run(["-c", f"{script}print(IO().load_checkpoint('c'))"], site, libraries, cwd=tmp_path)
    assert read.stdout.split() == ["{'a':", "1}"], read.stderr


def test_another_release_is_named_before_it_is_used(site: Path, libraries: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "deepspeed").mkdir(parents=True)
    (old / "deepspeed" / "__init__.py").write_text("raise SystemError('this one must not be imported')")
    (old / "deepspeed-0.17.1.dist-info").mkdir()
    (old / "deepspeed-0.17.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.1\n"
    )
    asked = run(
        ["-c", "from torchhal import Trainer; Trainer(strategy='deepspeed_stage_2')"],
        site,
        libraries,
        old,
        cwd=tmp_path,
    )
    assert asked.returncode == 1
    assert "works with deepspeed <0.20,>=0.19.8 (found 0.17.1)" in asked.stderr
    assert "must not be imported" not in asked.stderr
