"""The tools of the tests themselves: a second run of what failed, limits that scale, the table of costs."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import distribution
import limits
import pytest
import time_budget
from tiers import slow

ROOT = Path(__file__).parents[1]
FLAKY = """
import pathlib

def test_sound(): pass

def test_flaky():
    seen = pathlib.Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "of the first run"
"""


TEARDOWN = """
import pytest

@pytest.fixture(scope="module")
def left():
    yield []

@pytest.fixture(autouse=True, scope="module")
def nothing_left(left):
    yield
    assert left == []

def test_leaves(left): left.append(1)

def test_after(left): pass
"""


@pytest.fixture
def rerun(tmp_path):
    """Run ``.ci/rerun-failed`` over a file of tests: the process, and the folder of its output."""
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(ROOT / ".ci" / "rerun-failed", tmp_path / ".ci"))

    def run(source, *arguments):
        (tmp_path / "test_it.py").write_text(source)
        command = [script, sys.executable, "-m", "pytest", "-q", "-n", "2"]
        done = subprocess.run(
            [*command, *arguments, "test_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        return done, script.parent / "output"

    return run


def test_what_passes_alone_is_listed_and_fails_nothing(rerun):
    done, output = rerun(FLAKY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "flaky.txt").read_text() == "test_it.py::test_flaky\n"
    assert "of the first run" in (output / "0-first.txt").read_text()
    assert "1 passed" in (output / "0-second.txt").read_text()
    assert "test_sound" not in (output / "0-second.txt").read_text()


@pytest.mark.parametrize(
    ("source", "code", "second"),
    [
        ("def test_sound(): pass", 0, False),
        ("def test_broken(): assert 0", 1, True),
        slow("import pytest\n@pytest.fixture\ndef bad(): assert 0\ndef test_broken(bad): pass", 1, True),
        slow("\n".join(f"def test_{number}(): assert 0" for number in range(11)), 1, False),
        slow(TEARDOWN, 1, False),
        slow(FLAKY.replace("assert not first", "first or __import__('pytest').skip()\n    assert not first"), 1, True),
        slow("this is no Python", 2, True),
        slow("", 5, False),
    ],
    ids=["sound", "broken", "broken fixture", "eleven", "torn down", "skips then", "no Python", "no test"],
)
def test_what_fails_twice_or_in_another_way_fails(rerun, source, code, second):
    done, output = rerun(source)
    assert done.returncode == code, done.stdout + done.stderr
    assert (output / "0-second.txt").exists() == second
    assert not (output / "flaky.txt").exists()


def test_what_is_late_is_left_out_and_what_failed_gets_its_second_run(rerun, monkeypatch):
    monkeypatch.setattr(time_budget, "_until", "")
    for until, workers, late in (("1", None, True), ("1e12", None, False), ("1", 2, False)):
        monkeypatch.setenv(time_budget.UNTIL, until)
        time_budget.start(SimpleNamespace(option=SimpleNamespace(numprocesses=workers)))
        assert (time_budget.UNTIL in os.environ) == bool(workers)  # for the workers, and for nobody else
        if late:
            with pytest.raises(pytest.skip.Exception, match="the session had time until"):
                time_budget.skip_if_late()
            monkeypatch.setattr(time_budget, "_until", "")
        else:
            time_budget.skip_if_late()
    done, _ = rerun(f"import os\ndef test_it(): assert '{time_budget.UNTIL}' not in os.environ")
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_part_of_the_tests_is_last_in_the_next_session(monkeypatch):
    files = ["test_cheap.py"] * 20 + list(distribution.SLOW)[:2] * 3
    tests = [
        SimpleNamespace(nodeid=f"{file}::test_{number}", get_closest_marker=bool) for number, file in enumerate(files)
    ]
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    begins = set()
    for turn in range(4):
        monkeypatch.setenv(distribution.TURN, str(turn))
        ordered = list(tests)
        distribution.order(ordered)
        assert sorted(ordered, key=tests.index) == tests
        costly = ["test_cheap" not in test.nodeid for test in ordered]
        assert costly[-3:] == [turn % 2 == 1] * 3
        assert costly[:3] == [turn % 2 == 0] * 3
        begins.add(next(test.nodeid for test in ordered if "test_cheap" in test.nodeid))
    assert len(begins) == 4


def test_limits_of_processes_scale_and_short_waits_do_not(monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "3")
    seen = []
    wait = limits._scaling(lambda self, timeout=None: seen.append(timeout))
    wait(None, 60)
    wait(None, timeout=60)
    wait(None, timeout=0.5)
    wait(None)
    assert seen == [180, 180, 0.5, None]
    assert limits.scaled(10) == 30


def test_each_test_s_own_limit_scales(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import limits\ndef pytest_collection_modifyitems(config, items): limits.scale_timeouts(config, items)"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\ntimeout = 40")
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom pytest_timeout import _get_item_settings\n"
        "def test_default(request): assert _get_item_settings(request.node).timeout == 100\n"
        "@pytest.mark.timeout(8)\ndef test_own(request): assert _get_item_settings(request.node).timeout == 20\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, limits.VARIABLE: "2.5"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_costliest_files_are_shown(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import costs\ndef pytest_terminal_summary(terminalreporter): costs.write_summary(terminalreporter)"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}")
    for number in range(12):
        (tmp_path / f"test_{number:02}.py").write_text(
            f"import time\ndef test_it(): time.sleep({0.3 if number == 7 else 0})\ndef test_other(): pass"
        )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if "costliest files, of 12" in line)
    assert lines[start + 1].split() == ["0.3", "s", "2", "tests", "test_07.py"]
    assert sum(" tests  test_" in line for line in lines) == 10


ANOTHER_TORCH = """
from torchhal_simulator import _build as build
build.TORCH_MINORS = ("1.0",)
"""


@pytest.mark.slow
def test_simulator_tests_skip_on_other_torch(tmp_path):
    """Tests that run on the simulator are skipped beside another torch, with the reason."""
    (tmp_path / "another_torch.py").write_text(ANOTHER_TORCH)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "another_torch", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "core/tests/test_results.py", "plugins/simulator/tests/test_random.py", "-m", "not slow"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=170,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "this torchhal-simulator is for torch 1.0" in done.stdout


def test_each_module_that_tests_import_has_a_name_of_its_own():
    """All folders of tests are on one path: of two modules of a name, the first would answer for both."""
    files = [file for folder in ("core", "plugins/*", ".") for file in ROOT.glob(f"{folder}/tests/*.py")]
    tested = {file.stem for file in files if file.stem.startswith("test_")}
    shared = collections.Counter(file.stem for file in files if file.stem not in (*tested, "conftest"))
    assert [name for name, count in shared.items() if count > 1] == []
    for file in files:
        taken = set(re.findall(r"^\s*(?:from|import) (test_\w+)", file.read_text(), re.MULTILINE)) & tested
        assert taken <= {file.stem}, f"{file} imports {taken}: what tests share stands in a module that is no test"
