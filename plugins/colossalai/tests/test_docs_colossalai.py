"""The blocks of the documentation that need Colossal-AI, which ``tests/test_docs.py`` leaves out, run here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "plugins" / "colossalai" / "README.md", ROOT / "docs" / "how-to" / "colossalai.md"]
BLOCK = re.compile(r"^<!-- no-run: colossalai -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page.name, code) for page in PAGES for code in BLOCK.findall(page.read_text())]


@pytest.mark.usefixtures("colossalai")
@pytest.mark.timeout(160)
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_a_block_runs(page, code, tmp_path):
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_page_has_some():
    assert {page for page, _ in BLOCKS} == {page.name for page in PAGES}
