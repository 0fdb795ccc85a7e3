"""The conformance kit against wheels, and against parts of several distributions."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KIT_TESTS = Path(__file__).parents[1] / "plugins" / "conformance" / "tests"
sys.path.insert(0, str(KIT_TESTS))

import made_plugins  # noqa: E402
import results_page  # noqa: E402

from torchhal_conformance import CHECKS, Session  # noqa: E402

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "torchhal-acme"
version = "1.0"
dependencies = ["torchhal>=0.1,<1"]
{about}

[project.entry-points.torchhal]
{entry}

[project.urls]
Source = "https://example.org/acme"

[tool.hatch.build.targets.wheel]
packages = ["src/acme"]
"""
ABOUT = 'description = "ACME"\nlicense = "MIT"'
ENTRY = 'acme = "acme._plugin"'


@pytest.mark.slow
@pytest.mark.packaging
@pytest.mark.parametrize(
    ("about", "entry", "typed", "words"),
    [
        (ABOUT, ENTRY, True, ""),
        (ABOUT, ENTRY, False, "py.typed"),
        ('license = "MIT"', ENTRY, True, "Summary"),
        ('description = "ACME"', ENTRY, True, "License"),
        (ABOUT, 'acme = "acme.plugin"', True, "GEN-17"),
    ],
    ids=["sound", "not typed", "no summary", "no licence", "wrong entry point"],
)
def test_wheels(about: str, entry: str, typed: bool, words: str, tmp_path: Path) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    plugin = made_plugins.Plugin(features=("wheel",))
    plugin.write(project / "src")
    if typed:
        (project / "src" / "acme" / "py.typed").touch()
    (project / "pyproject.toml").write_text(PROJECT.format(about=about, entry=entry))
    with made_plugins.installed(plugin, site) as subject, Session(subject) as session:
        (site / "torchhal_acme-1.0.dist-info" / "direct_url.json").write_text(
            json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})
        )
        result = session.run(CHECKS["GEN-17"])
    assert result.outcome == ("failed" if words else "passed"), result.reason
    assert words in result.text


def test_results_page_is_complete() -> None:
    """The page of reports is that of today, with every component of this repository."""
    text = results_page.text(results_page.rows())
    for kind, alias in results_page.first_party():
        assert f"| `{alias}`" in text or f"\n- `{alias}` of" in text, (kind, alias)
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert page == text, "a report or a part has come or gone: run python plugins/conformance/tests/results_page.py"


def test_the_page_s_reasons_are_those_of_today() -> None:
    own = {entry.distribution for entry in results_page.first_party().values()}
    results = [report for _, report in results_page.rows() if report["plugin"] in own]
    reported = {(one["kind"], one["alias"]) for one in results}
    assert not reported & set(results_page.WITHOUT_REPORT), "a part with a report needs no reason to have none"
    assert set(results_page.WITHOUT_REPORT) <= set(results_page.first_party())

    modules = [KIT_TESTS / "test_builtin.py", *results_page.ROOT.glob("plugins/*/tests/test_conformance.py")]
    texts = {text for module in modules for text in _texts(module.read_text(encoding="utf-8"))}
    kept = {
        f"{report['alias']} {one['id']}": one["reason"].splitlines()[0].removeprefix("expected: ")
        for report in results
        for one in report["checks"]
        if one["outcome"] == "failed" and one["reason"].startswith("expected: ")
    }
    stale = {name: reason for name, reason in kept.items() if reason not in texts}
    assert not stale, "its suite gives another reason by now: run it with TORCHHAL_CONFORMANCE_REPORTS, then the page"


def _texts(source: str) -> Iterator[str]:
    """Every text in ``source``; also in the modules that a test writes, which are texts of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            if "conformance_suite(" in node.value:
                yield from _texts(node.value)
