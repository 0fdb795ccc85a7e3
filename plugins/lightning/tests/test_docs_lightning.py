"""The blocks of the documentation that need Lightning, which ``tests/test_docs.py`` leaves out elsewhere, run here."""

from importlib import util

import pytest
from pages import blocks_that_need, run_alone

BLOCKS = blocks_that_need("lightning")


@pytest.mark.skipif(util.find_spec("lightning") is None, reason="Lightning is not installed: make test-lightning")
@pytest.mark.timeout(160)
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_a_block_runs(page, code, tmp_path):
    run_alone(code, tmp_path)
