"""The simulator as a distribution of its own: what is in its wheel, what pip makes of it, and what a machine says that
can't compile it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins" / "simulator"
PACKAGE = PLUGIN / "src" / "torchhal_simulator"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PLUGIN)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def torchhal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, in an environment that is empty but for what is given."""
    return subprocess.run(
        [sys.executable, "-m", "torchhal.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_wheel_is_pure_and_ships_the_sources(wheel: Path) -> None:
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    for source in (PACKAGE / "csrc").iterdir():
        assert f"torchhal_simulator/csrc/{source.name}" in names
    assert "torchhal_simulator/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    # pip would replace a torch that is there already; beside one that it isn't for, the plugin says so
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist")] == [
        "Requires-Dist: torchhal<1,>=0.2"
    ]


def test_installing_it_needs_no_second_torch(wheel: Path) -> None:
    """Not for the build, whose requirements an isolated environment would install, and not beside the one here."""
    assert 'requires = ["hatchling"]' in (PLUGIN / "pyproject.toml").read_text()
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", str(wheel)]
    report = subprocess.run(pip, capture_output=True, text=True, check=True)  # fails if anything else were needed
    assert {item["metadata"]["name"] for item in json.loads(report.stdout)["install"]} <= {"torchhal-simulator"}


def test_it_is_an_accelerator_and_no_strategy() -> None:
    done = torchhal("plugins", "--json", PATH=os.environ["PATH"])
    (plugin,) = [p for p in json.loads(done.stdout)["plugins"] if p["distribution"] == "torchhal-simulator"]
    assert plugin["status"] == "loaded", plugin["reason"]
    assert [(c["kind"], c["alias"]) for c in plugin["components"]] == [("accelerator", "sim")]


@pytest.mark.simulator
@pytest.mark.slow
def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    done = torchhal("doctor", HOME=str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "torchhal-simulator/sim" in line]
    assert "not available" in line
    assert "no C++ compiler is on PATH" in line
    asked = subprocess.run(
        [sys.executable, "-c", "from torchhal import Trainer; Trainer(accelerator='sim')"],
        env={"HOME": str(tmp_path), "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert asked.returncode == 1
    assert "AcceleratorUnavailableError: accelerator 'sim' can't be used here" in asked.stderr
    assert "no C++ compiler" in asked.stderr


@pytest.mark.simulator
def test_a_machine_without_the_hardware_says_so() -> None:
    done = torchhal("doctor", **{**os.environ, "TORCHHAL_SIM_DEVICES": "0"})
    assert "torchhal-simulator/sim not available: torch reports no usable sim device" in done.stdout


def test_a_default_run_never_compiles_it(tmp_path: Path) -> None:
    """``accelerator="auto"`` passes it by: its folder stays empty."""
    done = subprocess.run(
        [sys.executable, "-c", "from torchhal import Trainer; print(type(Trainer().accelerator).__name__)"],
        env={**os.environ, "TORCHHAL_SIM_CACHE": str(tmp_path / "cache")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["CPUAccelerator"], done.stderr
    assert not (tmp_path / "cache").exists()
