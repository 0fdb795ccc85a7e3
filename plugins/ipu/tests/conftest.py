"""What needs poptorch runs in processes of its own: once imported it stays, and "auto" would take its IPUs."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[2] / "tests"))
import stub_processes  # noqa: E402

DROPPED = ("OMPI_COMM_WORLD_SIZE", "POPTORCH_CACHE_DIR", "POPTORCH_DEFAULT_OPTIONS", "POPTORCH_IPU_MODEL",
           "POPTORCH_STUB_IPUS")  # fmt: skip


@pytest.fixture
def python(tmp_path):
    """Run a script of ``scripts/``, or a piece of code, in a process of its own; what it printed. Its failure is the
    test's."""

    def run(what, *arguments, timeout=170, **variables):
        env = stub_processes.environment("POPTORCH_STUB", variables, DROPPED)
        done = stub_processes.run(HERE / "scripts", what, arguments, env=env, cwd=tmp_path, timeout=timeout)
        return stub_processes.output(done)

    return run
