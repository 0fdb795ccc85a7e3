"""The blocks of the documentation that need torch_xla, which ``tests/test_docs.py`` leaves out elsewhere, run here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "plugins" / "xla" / "README.md", ROOT / "docs" / "how-to" / "xla.md"]
BLOCK = re.compile(r"^<!-- no-run: torch_xla -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page.name, number, code) for page in PAGES for number, code in enumerate(BLOCK.findall(page.read_text()))]


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize(("page", "number", "code"), BLOCKS, ids=[f"{page}-{n}" for page, n, _ in BLOCKS])
def test_a_block_runs(page, number, code, tmp_path):
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, env={**os.environ, "PJRT_DEVICE": "CPU"}, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_page_has_some():
    assert {page for page, _, _ in BLOCKS} == {page.name for page in PAGES}
