"""Each test that needs the device runs in processes of its own: torch has one accelerator per process, and the library
reads its environment once."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[2] / "tests"))
import stub_processes  # noqa: E402

DROPPED = ("HLS_MODULE_ID", "PT_HPU_LAZY_MODE")


@pytest.fixture
def python(tmp_path):
    """Run a script of ``scripts/``, or a piece of code, in a process of its own; what it printed. Its failure is the
    test's."""

    def run(what, *arguments, timeout=150, **variables):
        env = stub_processes.environment("HABANA_FRAMEWORKS_STUB", variables, DROPPED)
        done = stub_processes.run(HERE / "scripts", what, arguments, env=env, cwd=tmp_path, timeout=timeout)
        return stub_processes.output(done)

    return run
