"""What trains runs in processes of its own: Bagua is initialised once in a process."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "scripts")]
sys.path.append(str(HERE.parents[2] / "tests"))
import stub_processes  # noqa: E402


def environment(**variables):
    """This process's, with the stub wanted; None takes a variable away."""
    return stub_processes.environment("BAGUA_STUB", variables)


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    """The stub may be imported in the tests of this folder, and in no others."""
    monkeypatch.setenv("BAGUA_STUB", "1")


@pytest.fixture
def process(tmp_path):
    """Run a script of ``scripts/``, or a piece of code, in a process of its own; the finished process."""

    def run(what, *arguments, timeout=170, **variables):
        env = environment(**variables)
        return stub_processes.run(HERE / "scripts", what, arguments, env=env, cwd=tmp_path, timeout=timeout)

    return run


@pytest.fixture
def python(process):
    """The same; what it printed. Its failure is the test's."""

    def run(what, *arguments, **options):
        return stub_processes.output(process(what, *arguments, **options))

    return run
