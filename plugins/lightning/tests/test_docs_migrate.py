"""The programs of docs/how-to/migrate.md, in this environment of other trainers: they train the same model."""

import os
import re
import sys
from importlib import util

import pytest
from pages import ROOT, blocks_of, padded, run_command, write_files

PAGE = ROOT / "docs" / "how-to" / "migrate.md"
NEEDS = ("accelerate", "transformers")
PRINTED = re.compile(r"^accuracy (.+), sum of weights (.+)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(160)


def programs():
    """Return each program of the page, by its name or by the package that it needs."""
    found = {}
    for block in blocks_of(PAGE):
        if block.verb == "script":
            found[block.marker[1]] = block
        elif block.reason in NEEDS:
            found[block.reason] = block
    return found


def printed_by(name, folder):
    """Run a program of the page and return the accuracy and the sum of weights that it prints."""
    if name in NEEDS and util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-lightning")
    if name in NEEDS and util.find_spec("habana_frameworks_stub") is not None:
        pytest.skip("Accelerate imports Gaudi's library, of which a simulation is installed: make test-lightning")
    write_files(blocks_of(PAGE), folder)
    (folder / "program.py").write_text(padded([programs()[name]]))
    # On the CPU, where sums have one order.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = run_command([sys.executable, "program.py"], folder, environ, 150)
    assert done.returncode == 0, done.stderr
    ((accuracy, total),) = PRINTED.findall(done.stdout)
    return float(accuracy), total


def test_the_page_has_all_programs():
    assert set(programs()) == {"with_torchhal.py", "with_a_loop.py", "transformers_model.py", *NEEDS}


@pytest.mark.parametrize("name", ["with_a_loop.py", "accelerate"])
def test_a_migrated_program_trains_the_same_model(name, tmp_path):
    folders = tmp_path / "before", tmp_path / "after"
    for folder in folders:
        folder.mkdir()
    assert printed_by(name, folders[0]) == printed_by("with_torchhal.py", folders[1])


@pytest.mark.parametrize("name", ["transformers", "transformers_model.py"])
def test_a_transformers_model_is_trained(name, tmp_path):
    """Transformers shuffles in an order of its own."""
    assert printed_by(name, tmp_path)[0] > 0.85
