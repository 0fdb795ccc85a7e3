"""What CI runs: a job for each environment that engines are tested in, and the conformance suites in all of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ENGINES = sorted(path.parents[1].name for path in ROOT.glob("plugins/*/environment/install.py"))


def test_every_environment_has_a_job() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    targets = jobs["test"]["strategy"]["matrix"]["target"]
    assert {f"test-{name}" for name in ENGINES} <= set(targets)
    assert "test-engines" not in targets, "all of them one after the other, as .ci/run does"


def test_the_script_of_ci_runs_all_of_them() -> None:
    (targets,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    assert "test-engines" in targets.split()


@pytest.mark.parametrize("engine", ENGINES)
def test_conformance_is_checked_where_an_engine_is(engine: str) -> None:
    """``make conformance`` makes the environment, and reports from there."""
    done = subprocess.run(
        ["make", "--dry-run", "conformance"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert f"touch .venv-{engine}/packages.stamp" in done.stdout or (ROOT / f".venv-{engine}/packages.stamp").exists()
    (names,) = re.findall(r"for engine in (.*); do", done.stdout)
    assert engine in names.split()
    assert re.search(
        r"CONFORMANCE_REPORTS=\S+ \.venv-\$engine/bin/python -m pytest plugins/\$engine/tests", done.stdout
    )
