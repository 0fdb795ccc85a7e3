"""The core as a wheel, beside a plugin's wheel: what `pip install torchhal acme-slate` gives."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lighthouses import lighthouse
from tiers import slow

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json
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
    **json.loads(sys.argv[3]), max_epochs=20, default_root_dir=sys.argv[2], enable_progress_bar=False
)
trainer.fit(Model(), data)
parts = type(trainer.accelerator).__module__, type(trainer.strategy).__module__
trainer.print(*parts, trainer.world_size, bool(trainer.callback_metrics["loss"] < 1e-2))
"""


def build(source: Path, folder: Path, scratch: Path) -> Path:
    copy = scratch / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.egg-info", "dist"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "core", tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def conformance_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "conformance"
    shutil.copytree(ROOT / "plugins" / "conformance", source)
    template = source / "src" / "torchhal_conformance" / "template"
    compileall.compile_dir(template, quiet=2)  # as whatever compiles a checkout leaves it
    assert list(template.rglob("*.pyc"))
    return build(source, tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy"))


def test_the_wheel_holds_what_users_and_type_checkers_need(core_wheel: Path) -> None:
    with zipfile.ZipFile(core_wheel) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"torchhal/py.typed", "torchhal/__init__.pyi"} <= set(names)
    assert [name for name in names if name.endswith(".pyc")] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"torchhal", f"torchhal-{core_wheel.name.split('-')[1]}.dist-info"}
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert not any("==" in line for line in requirements), "a package pins nothing"
    assert "License-Expression: MIT" in metadata
    assert "Requires-Dist: torch>=2.6" in metadata
    # Without it no objects go from rank to rank, and every other environment than that of a new user has it.
    assert "Requires-Dist: numpy" in metadata


def test_the_wheel_of_the_kit_holds_the_template(conformance_wheel: Path) -> None:
    with zipfile.ZipFile(conformance_wheel) as wheel:
        names = wheel.namelist()
    template, inside = ROOT / "templates" / "plugin", "torchhal_conformance/template/"
    files = {path.relative_to(template).as_posix() for path in template.rglob("*") if path.is_file()}
    mine = {name.removeprefix(inside) for name in names if name.startswith(inside)}
    assert mine == {file for file in files if "__pycache__" not in file}
    assert [name for name in names if name.endswith(".pyc")] == []


def install(site: Path, *wheels: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)
    return site


def test_baked_plugin_holds_no_bytecode(core_wheel: Path, conformance_wheel: Path, tmp_path: Path) -> None:
    """A plugin that an installed kit bakes holds nothing that pip has compiled."""
    site = install(tmp_path / "site", core_wheel, conformance_wheel)
    assert list((site / "torchhal_conformance" / "template").rglob("*.pyc")), "pip compiles what it installs"
    done = subprocess.run(
        [sys.executable, "-m", "torchhal.cli", "new", "Board", "--no-input", "--output", str(tmp_path / "plugins")],
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    baked = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "plugins").rglob("*")]
    assert "plugins/torchhal-board/pyproject.toml" in baked
    assert [path for path in baked if "__pycache__" in path or path.endswith(".pyc")] == []


@pytest.fixture
def variables(source: str) -> Iterator[dict[str, str]]:
    """What a plugin needs to be there while it trains."""
    if source != "plugins/torchft":
        yield {}
        return
    with lighthouse() as address:
        yield {"TORCHFT_LIGHTHOUSE": address}


@pytest.mark.parametrize(
    ("source", "options", "trained_by"),
    [
        (
            "tests/distributions/slate",
            {"accelerator": "slate", "devices": 2, "strategy": "ddp"},
            "acme_slate.accelerator torchhal.strategies.ddp 2 True",
        ),
        slow(
            "plugins/parallel",
            {"accelerator": "cpu", "devices": 2, "strategy": "zero2"},
            "torchhal.accelerators.cpu torchhal_parallel.fsdp 2 True",
        ),
        slow("plugins/gpu", {"accelerator": "auto", "devices": 1}, "torchhal.strategies.single_device 1 True"),
        slow(
            "plugins/hpu",
            {"accelerator": "hpu", "devices": 2, "strategy": "ddp"},
            "torchhal_hpu.accelerator torchhal_hpu.strategy 2 True",
        ),
        slow(
            "plugins/ipu",
            {"accelerator": "ipu", "devices": 2},
            "torchhal_ipu.accelerator torchhal_ipu.strategy 1 True",
        ),
        slow(
            "plugins/hivemind",
            {"accelerator": "cpu", "devices": 1, "strategy": "collaborative"},
            "torchhal.accelerators.cpu torchhal_hivemind.strategy 1 True",
        ),
        slow(
            "plugins/bagua",
            {"accelerator": "cpu", "devices": 2, "strategy": "bagua"},
            "torchhal.accelerators.cpu torchhal_bagua.strategy 2 True",
        ),
        slow(
            "plugins/torchft",
            {"accelerator": "cpu", "devices": 1, "strategy": "torchft"},
            "torchhal.accelerators.cpu torchhal_torchft.strategy 1 True",
        ),
    ],
    ids=["slate", "parallel", "gpu", "hpu", "ipu", "hivemind", "bagua", "torchft"],
)
def test_a_plugin_installed_beside_it_trains_by_its_alias(
    core_wheel: Path, tmp_path: Path, source: str, options: dict[str, Any], trained_by: str, variables: dict[str, str]
) -> None:
    plugin = build(ROOT / source, tmp_path / "dist", tmp_path / "copy")
    site = install(tmp_path / "site", core_wheel, plugin)
    (tmp_path / "train.py").write_text(SCRIPT)
    # the development environment's own plugins stay out: what runs is what the two wheels bring
    (name,) = [line.split("=")[0].strip() for line in _entry_points(site)]
    of_plugins = {
        "BAGUA_STUB": "1", "HABANA_FRAMEWORKS_STUB": "1", "POPTORCH_STUB": "1", "POPTORCH_STUB_IPUS": "2",
        "TORCHHAL_HIVEMIND_TARGET_BATCH_SIZE": "8",
    }  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(site), "TORCHHAL_PLUGINS": name, **of_plugins, **variables}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(site), str(tmp_path / "runs"), json.dumps(options)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert trained_by in done.stdout
    listed = subprocess.run(
        [sys.executable, str(site / "bin" / "torchhal"), "plugins", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (record,) = [each for each in json.loads(listed.stdout)["plugins"] if each["name"] == name]
    assert record["status"] == "loaded" and record["components"]
    assert record["file"].startswith(str(site))


def _entry_points(site: Path) -> list[str]:
    """The lines of group ``torchhal`` in what was installed."""
    lines: list[str] = []
    for file in site.glob("*.dist-info/entry_points.txt"):
        group = ""
        for line in file.read_text().splitlines():
            if line.startswith("["):
                group = line.strip()
            elif group == "[torchhal]" and line.strip():
                lines.append(line)
    return lines


def test_first_party_environments_are_announced() -> None:
    """Each cluster environment of these distributions has a variable, and every declaration can be used."""
    from torchhal import registry

    records = [record for record in registry.plugins() if record.distribution.startswith("torchhal-")]
    assert {problem for record in records for problem in record.problems} == set()
    environments = {
        entry.component.alias: set(entry.variables)
        for record in records
        for entry in record.components
        if entry.kind == "cluster_environment"
    }
    assert environments == {
        "horovod": {"HOROVOD_RANK"},
        "ray": {"RAY_JOB_ID", "TORCHHAL_RAY_WORKER"},
        "pjrt": {"TPU_WORKER_HOSTNAMES", "PJRT_LOCAL_PROCESS_COUNT"},
    }
