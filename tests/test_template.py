"""The template: what it bakes is whole, clean by the linters' word, and works when its wheel is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchhal
from torchhal.plugin import KINDS
from torchhal.registry import _builtin as builtin
from torchhal.registry._discovery import collect_components
from torchhal.registry._hints import DISTRIBUTIONS

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "templates" / "plugin"
MODULES = {
    "accelerator": "accelerator.py",
    "precision": "precision.py",
    "checkpoint_io": "checkpoint.py",
    "cluster_environment": "environment.py",
    "strategy": "strategy.py",
    "logger": "logger.py",
    "callback": "callback.py",
}
ALWAYS = {
    ".github/workflows/ci.yml", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml",
    "tests/test_conformance.py", "tests/test_training.py",
}  # fmt: skip


def new(*arguments: str, answers: str | None = None) -> subprocess.CompletedProcess[str]:
    asking = ["--no-input"] if answers is None else []
    return subprocess.run(
        [sys.executable, "-m", "torchhal.cli", "new", *arguments, *asking],
        input=answers or "", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def bake(folder: Path, kinds: tuple[str, ...]) -> Path:
    name = f"Acme {kinds[0].split('_')[0]}" if len(kinds) == 1 else "Acme-All"
    wanted = [argument for kind in kinds for argument in ("--kind", kind)]
    done = new(name, *wanted, "--vendor", "Acme Inc", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    (project,) = folder.iterdir()
    assert done.stdout.startswith(f"{project}\n")
    return project


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(kinds, marks=[pytest.mark.slow] if kinds != ("accelerator",) else [])
        for kinds in (*((kind,) for kind in KINDS), KINDS)
    ],
    ids="+".join,
)
def test_a_baked_plugin_works(kinds: tuple[str, ...], tmp_path: Path) -> None:
    project = bake(tmp_path / "projects", kinds)
    package = project.name.replace("-", "_")
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    modules = {"__init__.py", "_plugin.py", "py.typed", *(MODULES[kind] for kind in kinds)}
    assert files == ALWAYS | {f"src/{package}/{module}" for module in modules}

    linters = [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    if len(kinds) > 1:  # the same modules
        linters.append(["mypy", "--cache-dir", str(tmp_path / "types")])
    for linter in linters:
        done = subprocess.run([sys.executable, "-m", *linter], cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    # The wheel's files alone in a folder, not an environment of its own, for which torch would have to be downloaded.
    site = tmp_path / "site"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(project)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    environ = {**os.environ, "PYTHONPATH": str(site)}
    listed = subprocess.run(
        [sys.executable, "-m", "torchhal.cli", "plugins", "--json"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (record,) = [each for each in json.loads(listed.stdout)["plugins"] if each["distribution"] == project.name]
    assert record["status"] == "loaded" and record["file"].startswith(str(site))
    assert [part["kind"] for part in record["components"]] == list(kinds)
    assert all(part["available"] for part in record["components"])

    if len(kinds) > 1:  # each has run its checks alone
        run_tests(project, environ, "tests/test_training.py")
        return
    run_tests(project, {**environ, "TORCHHAL_CONFORMANCE_REPORTS": str(tmp_path / "reports")}, "tests")
    (report,) = (tmp_path / "reports").iterdir()
    assert json.loads(report.read_text())["verdict"] == "conformant"


def run_tests(project: Path, environ: dict[str, str], tests: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        cwd=project, env=environ, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def editable(project: Path) -> dict[str, str]:
    """The environment in which the source is installed, as pip's --editable does, but faster."""
    package = project.name.replace("-", "_")
    info = project / "src" / f"{package}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project.name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[torchhal]\n{package} = {package}._plugin\n")
    return {**os.environ, "PYTHONPATH": str(project / "src")}


def test_template_without_vendor_library(tmp_path: Path) -> None:
    """Without the vendor's library the plugin loads, and its training tests are skipped with the reason."""
    project = bake(tmp_path, ("accelerator",))
    (manifest,) = project.glob("src/*/_plugin.py")
    text = manifest.read_text()
    manifest.write_text(text.replace("# requires=(", "requires=("))
    assert manifest.read_text() != text
    shown = run_tests(project, editable(project), "tests/test_training.py")
    assert "1 skipped" in shown and "'the_vendors_module' is not installed" in shown


@pytest.mark.simulator
def test_its_strategy_and_precision_work_on_the_simulated_accelerator(tmp_path: Path) -> None:
    project = bake(tmp_path, ("precision", "strategy"))
    arguments = ["--accelerator", "sim", "--devices", "2", "--strategy", "acme_all", "--precision", "acme_all_bf16"]
    done = subprocess.run(
        [sys.executable, "-m", "torchhal.cli", "explain", *arguments],
        env=editable(project), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "sim:0, sim:1" in done.stdout, done.stderr


def test_the_longest_answers_keep_to_the_line_length(tmp_path: Path) -> None:
    kinds = [argument for kind in KINDS for argument in ("--kind", kind)]
    texts = ["--vendor", "Müller & Söhne " + "v" * 25, "--description", "d" * 100, "--email", "a@b.example"]
    done = new("Abcdefghij abcdefghij abcdefgh", *kinds, *texts, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (project,) = tmp_path.iterdir()
    for linter in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *linter, "."], cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
    settings = (project / "pyproject.toml").read_text()
    assert 'authors = [{ email = "a@b.example" }]' in settings
    assert '"https://github.com/muller-sohne-vv' in settings


def test_the_workflow(tmp_path: Path) -> None:
    project = bake(tmp_path, ("accelerator",))
    jobs: dict[str, Any] = yaml.safe_load((project / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]["include"]
    assert [case["torchhal"] for case in matrix] == ["oldest", "newest"]
    (python,) = (step["with"] for step in jobs["test"]["steps"] if "setup-python" in step.get("uses", ""))
    assert python == {"python-version": "${{ matrix.python }}"} and all(isinstance(c["python"], str) for c in matrix)
    assert jobs["build"]["needs"] == "test" and jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "refs/tags/v" in jobs["publish"]["if"]
    (kept,) = (step for step in jobs["test"]["steps"] if "upload-artifact" in step.get("uses", ""))
    (tests,) = (step for step in jobs["test"]["steps"] if step.get("run") == "pytest")
    assert kept["if"] == "always()"  # the report of a failure above all
    assert kept["with"]["path"] == tests["env"]["TORCHHAL_CONFORMANCE_REPORTS"]

    (oldest,) = (step["run"] for step in jobs["test"]["steps"] if "oldest" in step.get("if", ""))
    settings = project / "pyproject.toml"
    text = settings.read_text()
    version = ".".join(torchhal.__version__.split(".")[:2])
    requirement = f'["torchhal>={version},<{int(version[0]) + 1}"]'
    assert requirement in text
    for written, bound in (
        (requirement, version),
        ('["torchhal>=0.7"]', "0.7"),
        ('[\n  "numpy>=1",\n  "torchhal>=0.7.1,<2",\n]', "0.7.1"),
    ):
        settings.write_text(text.replace(requirement, written))
        assert (
            shell(f'pip() {{ printf "%s\n" "$@"; }}; {oldest}', project) == f"install\ntorchhal[conformance]=={bound}\n"
        )
    settings.write_text(text)

    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", str(project)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (tag,) = (step["run"] for step in jobs["build"]["steps"] if "refs/tags/v" in step.get("if", ""))
    assert shell(f"{tag} && echo same", project, GITHUB_REF_NAME="v0.1.0") == "same\n"
    assert shell(f"{tag} || echo other", project, GITHUB_REF_NAME="v0.2.0") == "other\n"


def shell(script: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_it_asks_for_what_is_not_given(tmp_path: Path) -> None:
    done = new(
        "Board", "--vendor", "Acme", "--output", str(tmp_path), answers="accelerator, strategy\n\nme@b.example\n\n"
    )
    assert done.returncode == 0, done.stderr
    assert "What the plugin is for" not in done.stdout and "Who makes" not in done.stdout
    project = tmp_path / "torchhal-board"
    assert {path.name for path in project.glob("src/*/*.py")} == {
        "__init__.py", "_plugin.py", "accelerator.py", "strategy.py"
    }  # fmt: skip
    settings = (project / "pyproject.toml").read_text()
    assert 'email = "me@b.example"' in settings and 'description = "Board for torchhal."' in settings
    done = new("Other", "--output", str(tmp_path), answers="Acme\n")
    assert done.returncode == 2 and "'kinds'" in done.stderr and "--no-input" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_with_a_meaning_are_known() -> None:
    """The template runs without torchhal, so it has a list of its own of what core and its plugins are called by."""
    (source,) = re.findall(r"^TAKEN = (\{.*?\})", (TEMPLATE / "hooks" / "pre_gen_project.py").read_text(), re.M | re.S)
    names = {
        name
        for kind, part in collect_components(builtin)
        if kind not in ("command", "callback")
        for name in (part.alias, *part.aliases)
    }
    names |= set(DISTRIBUTIONS) | {name.removeprefix("torchhal-") for name in DISTRIBUTIONS.values()}
    possible = {name for name in names if re.fullmatch("[a-z][a-z0-9_]*", name) and len(name) <= 30}
    assert sorted(possible - ast.literal_eval(source)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1x"], "a letter first, with single blanks, dashes or underscores inside (got '1x')"),
        (["a  b"], "(got 'a  b')"),
        (["a/b"], "(got 'a/b')"),
        (["Ünï"], "(got 'Ünï')"),
        ([""], "(got '')"),
        (["auto"], "must not be 'auto'"),
        (["CPU"], "must not be 'cpu'"),
        (["class"], "must not be 'class'"),
        (["gpu"], "must not be 'gpu'"),
        (["torchhal-acme"], "goes without 'torchhal'"),
        (["Board", "--vendor", "{{ 1 }}"], "'vendor' must not contain '{{'"),
        (["Board", "--author", "{% x"], "'author' must not contain '{%'"),
        (["a" * 31], "at most 30 characters (got 31)"),
        (["Board", "--vendor", ' "'], "'vendor' must be one line without quotation marks"),
        (["Board", "--vendor", " "], "'vendor' must have 1 to 40 characters (got ' ')"),
        (["Board", "--vendor", "&"], "'vendor' must have a letter or a digit (got '&')"),
        (["Board", "--description", ""], "'description' must have 1 to 100 characters (got '')"),
        (["Board", "--kind", "loop"], "invalid choice: 'loop'"),
    ],
)
def test_bad_answers_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = new(*arguments, "--output", str(tmp_path))
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_nothing_is_overwritten(tmp_path: Path) -> None:
    project = bake(tmp_path, ("accelerator",))
    (project / "README.md").write_text("mine")
    done = new("Acme accelerator", "--output", str(tmp_path))
    assert done.returncode == 2 and "nothing is overwritten" in done.stderr
    assert (project / "README.md").read_text() == "mine"


def test_the_command_and_cookiecutter_bake_the_same(tmp_path: Path) -> None:
    """For those who use cookiecutter itself; its default for the version is the core's of today."""
    done = subprocess.run(
        [sys.executable, "-m", "cookiecutter", "--no-input", "--output-dir", str(tmp_path / "a"), str(TEMPLATE)],
        env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert new("Acme Board", "--output", str(tmp_path / "b")).returncode == 0
    one, two = (
        {path.relative_to(tmp_path / side): path.read_text() for path in (tmp_path / side).rglob("*") if path.is_file()}
        for side in "ab"
    )
    assert one == two
    version = ".".join(torchhal.__version__.split(".")[:2])
    assert f"torchhal>={version}," in (tmp_path / "a" / "torchhal-acme-board" / "pyproject.toml").read_text()
