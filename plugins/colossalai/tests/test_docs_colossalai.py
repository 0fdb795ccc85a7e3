"""The blocks of the documentation that need Colossal-AI run here: ``tests/test_docs.py`` leaves them out elsewhere."""

import pytest
from pages import blocks_that_need, run_alone

BLOCKS = blocks_that_need("colossalai")


@pytest.mark.usefixtures("colossalai")
@pytest.mark.timeout(160)
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_a_block_runs(page, code, tmp_path):
    run_alone(code, tmp_path)


def test_every_page_has_some():
    assert {page for page, _ in BLOCKS} == {"plugins/colossalai/README.md", "docs/how-to/colossalai.md"}
