"""Test what ``torchhal conformance`` is given by an author, its exit codes, and what it shows of failures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import blocks
import pytest
from test_builtin import ENV

from torchhal.cli import main
from torchhal.errors import ConfigurationError
from torchhal_conformance import CHECKS, ComponentUnderTest, Session
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


# -- a model and data ----------------------------------------------------------------------------------------

OWN = {"model": blocks.words, "data": "blocks:sentences"}
TRAINED = ("STR-13", "STR-14", "STR-22", "STR-35", "STR-47")


def outcomes(part: type, *ids: str, **options: object) -> dict[str, Result]:
    with Session(ComponentUnderTest.of("strategy", part, **options)) as session:
        return {id: session.run(CHECKS[id]) for id in ids}


def test_author_model_is_trained() -> None:
    assert "has no 'blocks'" in outcomes(blocks.BlocksOnly, "STR-15")["STR-15"].reason
    found = outcomes(blocks.BlocksOnly, "STR-15", "STR-20", "STR-25", "STR-31", "SYS-02", **OWN)
    assert found.pop("STR-15").outcome == "passed"
    own = "not applicable: the check is about a model of its own, and a model was given"
    assert {(result.outcome, result.reason) for result in found.values()} == {("skipped", own)}
    broken = outcomes(blocks.Unaveraged, "STR-15", **OWN)["STR-15"]
    assert broken.outcome == "failed" and "after three micro-batches: embedding.weight" in broken.reason


@pytest.mark.slow
def test_every_training_check_takes_the_author_model() -> None:
    found = outcomes(blocks.BlocksOnly, *TRAINED, "STR-17", "STR-18", "STR-21", "STR-42", "STR-48", **OWN)
    assert {id: result.reason for id, result in found.items() if result.outcome != "passed"} == {}


def test_command_takes_model_and_data(capsys) -> None:
    where = ["--model", "blocks:words", "--data", "blocks:sentences"]
    assert run("strategy", "ddp", *where, *only("STR-31", "STR-37"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["data"]) == ("blocks:words", "blocks:sentences")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "blocks"}, "'model' must be 'MODULE:FACTORY'"),
        ({"model": lambda: None}, "'model' must be 'MODULE:FACTORY'"),
        ({"model": "blocks:nothing"}, "blocks:nothing can't be imported and called: AttributeError"),
        ({"model": "blocks:stepless"}, "must return an nn.Module with a training_step"),
        ({"data": "blocks:sentences"}, "give 'model' too"),
        ({"model": "blocks:words", "data": "blocks:sentences_of_text"}, "must be tuples of tensors or numbers"),
    ],
)
def test_unusable_model_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ComponentUnderTest.of("strategy", "ddp", **options)
    with pytest.raises(ConfigurationError, match="are for strategies"):
        ComponentUnderTest.of("precision", "32-true", model="blocks:words")
