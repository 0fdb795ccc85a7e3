"""The documentation site orders its versions as pip does, and leads to the newest release."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "docs" / "site"
LIST = """
import sys, types
sys.modules["api_pages"] = types.ModuleType("api_pages")  # it needs the environment that builds the site
from build import _list_versions
from pathlib import Path
_list_versions(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("newest_first", "leads_to"),
    [
        (["0.2.0", "0.2.0rc1", "0.2.0.dev3", "0.1.0"], "0.2.0"),
        (["0.10.0", "0.9.1", "0.9.0"], "0.10.0"),
        (["0.3.0rc1", "0.3.0b2", "0.2.0.post1", "0.2.0"], "0.2.0.post1"),
        (["0.2.0rc1", "0.2.0.dev3"], "0.2.0rc1"),
        (["1.0.0"], "1.0.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_versions_are_in_order(tmp_path: Path, newest_first: list[str], leads_to: str) -> None:
    for name in [*sorted(newest_first), "assets"]:  # what the host keeps beside the versions is none
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    subprocess.run([sys.executable, "-c", LIST, tmp_path], check=True, cwd=SITE)
    assert [entry["version"] for entry in json.loads((tmp_path / "versions.json").read_text())] == newest_first
    assert f"url={leads_to}/" in (tmp_path / "index.html").read_text()
