"""Run what the documentation shows: its Python blocks, its scripts and the torchhal commands in its consoles.

How a page is read stands in docs/README.md, for those who write one:

* The Python blocks of a page are one program, run from top to bottom in an empty folder.
* A comment on the line before a block changes that: ``<!-- test: script NAME -->`` runs the block as a file of its
  own, ``<!-- test: file NAME -->`` only writes it (any language), ``<!-- test: raises NAME -->`` expects the error,
  ``<!-- no-run: reason -->`` leaves it out. ``exits N`` after a script's name, or before a console, expects that code.
* In a console every ``$ torchhal ...`` runs; each line shown below it must begin as a line of the real output does.
* A page sees the parts of core, of torchhal-parallel, the kit and the simulator; a plugin's README also its own, and
  a page with ``<!-- plugins: NAME ... -->`` those of that folder in ``plugins``. One with
  ``<!-- packages: NAME ... -->`` is skipped where one of these can't be imported, but not in CI.

Blocks keep their line numbers, so that a traceback names the line of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import MARKER, ROOT, Block, blocks_of, padded, run_command, write_files

pytestmark = pytest.mark.timeout(330)

PAGES = [ROOT / "README.md", ROOT / "core" / "README.md", ROOT / "docs" / "README.md"]
PAGES += sorted((ROOT / "docs" / "how-to").glob("*.md")) + sorted((ROOT / "plugins").glob("*/README.md"))
PLUGIN_PAGE = ROOT / "docs" / "how-to" / "write-a-strategy.md"
TIMEOUT = 300  # seconds, on a machine that does much else

EVERYWHERE = {"conformance", "parallel", "simulator"}
FIRST_PARTY = {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")}

NEEDS = re.compile(r"^<!-- plugins: (.+?) -->$", re.MULTILINE)

PACKAGES = re.compile(r"^<!-- packages: (.+?) -->$", re.MULTILINE)


def need_packages(page: Path) -> None:
    """Skip the test where a package that the page shows isn't installed; requirements-dev.txt has it."""
    needed = {name for names in PACKAGES.findall(page.read_text(encoding="utf-8")) for name in names.split()}
    missing = sorted(name for name in needed if find_spec(name) is None)
    assert not (missing and os.environ.get("CI")), f"{name_of(page)} needs {', '.join(missing)}"
    if missing:
        pytest.skip(f"environment: {', '.join(missing)} not installed; requirements-dev.txt has what this needs")


def hidden_from(page: Path) -> str:
    """The distributions that a reader of the page need not have installed."""
    needed = {name for names in NEEDS.findall(page.read_text(encoding="utf-8")) for name in names.split()}
    assert needed <= FIRST_PARTY, f"{name_of(page)} needs {needed - FIRST_PARTY}, no folder of plugins/"
    return ",".join(f"torchhal-{name}" for name in sorted(FIRST_PARTY - EVERYWHERE - needed - {page.parent.name}))


def run(command: list[str], folder: Path, site: Path, hidden: str) -> subprocess.CompletedProcess[str]:
    dropped = re.compile(r"TORCHHAL_|TORCHELASTIC_|PYTEST_|(MASTER|LOCAL|NODE|GROUP|ROLE)_|RANK$|WORLD_SIZE$")
    environ = {name: value for name, value in os.environ.items() if not dropped.match(name)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    environ["TORCHHAL_DISABLE_PLUGINS"] = hidden
    return run_command(command, folder, environ, TIMEOUT)


@pytest.fixture(scope="module")
def sites() -> dict[Path, Path]:
    return {}


@pytest.fixture
def site(page: Path, sites: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin that the page makes, installed by pip; write-a-strategy.md's for those without one."""
    owner = page if any(is_project(block) for block in blocks_of(page)) else PLUGIN_PAGE
    if owner not in sites:
        sites[owner] = install_plugin(owner, tmp_path_factory)
    return sites[owner]


def is_project(block: Block) -> bool:
    return block.verb == "file" and block.marker[1].endswith("pyproject.toml")


def install_plugin(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    write_files([block for block in blocks_of(page) if block.verb == "file"], sources)
    (project,) = (path.parent for path in sources.rglob("pyproject.toml"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--no-compile", "--target", str(target), str(project)], check=True)
    return target


def commands_of(block: Block) -> list[tuple[list[str], list[str]]]:
    """The torchhal commands of a console, each with the lines shown below it."""
    commands: list[tuple[list[str], list[str]]] = []
    mine = False
    for row in block.text:
        if row.startswith("$ "):
            words = shlex.split(row[2:])
            mine = words[0] == "torchhal"
            if mine:
                commands.append((words[1:], []))
        elif mine and row.strip() and row.strip() != "...":
            commands[-1][1].append(row)
    return commands


def first_word(row: str) -> str:
    return row.split()[0] if row.split() else ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples() -> list[object]:
    """Every program, script and console once, even if two pages show it."""
    found: list[object] = []
    seen: set[tuple[str, ...]] = set()
    for page in PAGES:
        blocks = blocks_of(page)
        marks = [] if page == ROOT / "README.md" else [pytest.mark.slow]
        if any(block.language == "python" and block.verb in ("", "raises") for block in blocks):
            found.append(pytest.param(page, None, id=f"{name_of(page)}-program", marks=marks))
        for block in blocks:
            is_console = block.language == "console" and block.verb != "no-run" and commands_of(block)
            key = (*block.marker, *block.text)
            if (block.verb == "script" or is_console) and key not in seen:
                seen.add(key)
                found.append(pytest.param(page, block.line, id=f"{name_of(page)}-{block.line}", marks=marks))
    return found


@pytest.mark.packaging
@pytest.mark.parametrize(("page", "line"), examples())
def test_example(page: Path, line: int | None, tmp_path: Path, site: Path) -> None:
    need_packages(page)
    blocks, hidden = blocks_of(page), hidden_from(page)
    write_files(blocks, tmp_path)
    if line is None:
        program = tmp_path / f"{page.stem}_page.py"  # profile.py alone would hide the module of that name
        program.write_text(padded([b for b in blocks if b.language == "python" and b.verb in ("", "raises")]))
        check([sys.executable, program.name], 0, tmp_path, site, hidden)
        return
    (block,) = (block for block in blocks if block.line == line)
    if block.verb == "script":
        check([sys.executable, block.marker[1]], block.exit_code, tmp_path, site, hidden)
        return
    for command, shown in commands_of(block):
        done = check([sys.executable, "-m", "torchhal.cli", *command], block.exit_code, tmp_path, site, hidden)
        real = {first_word(row) for row in (done.stdout + done.stderr).splitlines()}
        missing = [row for row in shown if first_word(row) not in real]
        assert not missing, f"torchhal {' '.join(command)} no longer prints:\n{missing}\nbut:\n{done.stdout}"


def check(command: list[str], code: int, folder: Path, site: Path, hidden: str) -> subprocess.CompletedProcess[str]:
    done = run(command, folder, site, hidden)
    assert done.returncode == code, (
        f"exit code {done.returncode}, not {code}: {' '.join(command)}\n{done.stdout}\n{done.stderr}"
    )
    return done


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs" / "explanation").glob("*.md"))], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Links between files of the repository, and to headings of Markdown pages."""
    broken = []
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and heading not in headings(file)):
            broken.append(target)
    assert broken == []


def headings(page: Path) -> set[str]:
    """The anchors that a Markdown renderer gives the headings of ``page``."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_exception_has_a_reason() -> None:
    """A block that is left out says why."""
    comments = [
        (name_of(page), line.strip())
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("<!-- ") and ("test:" in line or "no-run" in line)
    ]
    assert [comment for comment in comments if not MARKER.match(comment[1])] == []
    assert len(comments) > 5


INSTALL = re.compile(r"pip install ([^`\n|]+)")
OURS = {
    re.search(r'^name = "(.*)"', file.read_text(), re.MULTILINE)[1]: file.parent
    for pattern in ("core/pyproject.toml", "plugins/*/pyproject.toml", "plugins/*/stub/pyproject.toml")
    for file in ROOT.glob(pattern)
}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("plugins/*/stub/README.md"))], ids=name_of)
def test_what_a_page_tells_to_install_is_there(page: Path) -> None:
    """A folder of a clone, or a package that an index has: no stub, which are for tests, and no plugin that isn't."""
    wrong = []
    for line in INSTALL.findall(page.read_text(encoding="utf-8")):
        for word in line.replace("'", " ").replace('"', " ").split():
            name = re.split(r"[\[<>=!~;]", word)[0]
            if name.startswith("./"):
                is_there = (ROOT / name).exists() or "acme" in name  # that a page has made
            elif name.startswith("torchhal"):
                is_there = name in OURS or "acme" in name or word == "torchhal-<hardware>"
            else:
                is_there = name not in OURS
            wrong += [] if is_there else [word]
    assert wrong == []


def test_torch_bounds_match_versions_page() -> None:
    """What a plugin asks of torch beyond core is named there."""
    page = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    (least,) = re.findall(r"^torch (\d+\.\d+) or later is required", page, re.MULTILINE)
    for name, folder in OURS.items():
        (dependencies,) = re.findall(r"^dependencies = \[(.*?)\]", (folder / "pyproject.toml").read_text(), re.M | re.S)
        for bounds in re.findall(r'"torch([<>=!~][^"]*)"', dependencies):
            own = bounds.removeprefix(">=")
            assert own == least or f"{name}, whose\nlower bound is TorchFT's ({own})" in page, (name, bounds)
