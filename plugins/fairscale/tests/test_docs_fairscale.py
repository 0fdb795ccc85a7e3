"""The blocks of the documentation that need fairscale, which ``tests/test_docs.py`` leaves out elsewhere, run here."""

import pytest
from pages import blocks_that_need, run_alone

BLOCKS = blocks_that_need("fairscale")


@pytest.mark.usefixtures("fairscale")
@pytest.mark.timeout(160)
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_a_block_runs(page, code, tmp_path):
    run_alone(code, tmp_path)


def test_every_page_has_some():
    assert {page for page, _ in BLOCKS} == {"plugins/fairscale/README.md", "docs/how-to/fairscale.md"}
