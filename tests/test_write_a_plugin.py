"""The commands of docs/how-to/write-a-plugin.md, one after the other, as a reader types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "write-a-plugin.md"


def consoles() -> list[str]:
    return re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment of the reader's own, which finds here what an index would give: torchhal, torch, the tools."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "development.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for command, module in (("pip", "pip"), ("pytest", "pytest"), ("torchhal", "torchhal.cli")):
        script = folder / "bin" / command
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**os.environ, **offline, "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.timeout(420)
def test_every_command_runs_and_prints_what_is_shown(tmp_path: Path, environ: dict[str, str]) -> None:
    lines = [line for console in consoles() for line in console.splitlines() if line.strip()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert len(commands) > 8
    work = tmp_path / "work"
    work.mkdir()
    # no network is needed where the build backend is installed
    script = "\n".join(["set -e", *commands]).replace("python -m build", "python -m build --no-isolation")
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for shown in (line for line in lines if not line.startswith("$ ")):
        wanted = " ".join(shown.split())
        assert any(line.startswith(wanted) for line in printed), f"not printed: {shown}\n{done.stdout}"
    project = work / "torchhal-acme-npu"
    assert sorted(path.suffix for path in (project / "dist").iterdir()) == [".gz", ".whl"]
    (report,) = (project / "reports").iterdir()
    assert json.loads(report.read_text(encoding="utf-8"))["verdict"] == "conformant"
    assert {"report.json", "report.html", "badge.json"} <= {path.name for path in project.iterdir()}
    listed = subprocess.run([sys.executable, "-m", "pip", "list"], capture_output=True, text=True, check=True)
    assert project.name not in listed.stdout  # the development environment is as it was
