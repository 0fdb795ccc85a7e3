"""Test what ``torchhal conformance`` is given by an author, its exit codes, and what it shows of failures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_builtin import ENV

from torchhal.cli import main
from torchhal_conformance import ComponentUnderTest
from torchhal_conformance import _report as reports
from torchhal_conformance._check import Check
from torchhal_conformance._session import Result


def run(*arguments: str) -> int:
    return main(["conformance", "run", *arguments])


def only(*ids: str) -> list[str]:
    return [word for id in ids for word in ("--check", id)]


# -- tables --------------------------------------------------------------------------------------------------


def toml(rows: object) -> str:
    lines = [line for row in rows for line in ("[[tables]]", *(f"{name} = {json.dumps(row[name])}" for name in row))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tables.json", json.dumps({"tables": ENV})),
        ("rows.json", json.dumps(ENV)),
        pytest.param("tables.toml", toml(ENV), marks=pytest.mark.skipif("sys.version_info < (3, 11)")),
    ],
)
def test_tables_come_from_a_file(name: str, text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert run("cluster_environment", "env", "--tables", str(file), *only("ENV-02", "ENV-03"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["outcome"] for one in report["checks"]] == ["passed", "passed"]


def test_core_checks_without_tables_are_incomplete(capsys) -> None:
    assert run("cluster_environment", "env", *only("ENV-01", "ENV-03", "ENV-04")) == 2
    *_, told, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "cluster_environment env is incomplete"
    assert told.startswith("2 checks of the core were not made (ENV-03, ENV-04)") and "--tables FILE" in told


@pytest.mark.parametrize(
    ("level", "outcome", "reason", "verdict"),
    [
        ("core", "skipped", "input: a table", "incomplete"),
        ("core", "failed", "input: a table", "failed"),
        ("extended", "skipped", "input: a table", "partial"),
        ("provisional", "skipped", "input: a table", "conformant"),
    ],
)
def test_verdict_of_missing_input(level: str, outcome: str, reason: str, verdict: str) -> None:
    found = [Result(Check("ACC-01", print, level=level), outcome, reason), Result(Check("ACC-02", print), "passed")]
    report = reports.build(ComponentUnderTest.of("accelerator", "cpu"), found)
    assert reports.verdict(report["checks"]) == verdict
    assert reports.badge({**report, "verdict": verdict})["color"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read as JSON"),
        ("{}", "must hold tables named 'tables'"),
        ('{"table": []}', "named 'tables'.*got 'table'"),
        ('{"tables": {}}', "list with the variables of each rank .got dict"),
        ('[{"RANK": 0}]', "RANK in row 0 must be a string.*got 0"),
        ('[{"RANK": "0"}]', "4 rows.*got 1"),
    ],
)
def test_invalid_tables_are_refused(text: str, words: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "tables.json"
    file.write_text(text, encoding="utf-8")
    assert run("cluster_environment", "env", "--tables", str(file), *only("ENV-01")) == 2
    assert re.search(words, capsys.readouterr().err)
