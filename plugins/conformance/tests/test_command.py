"""Test what ``torchhal conformance`` is given by an author, its exit codes, and what it shows of failures."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import blocks
import made_plugins
import pytest
from environment_tables import ENV

from torchhal import registry
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cli import main
from torchhal.cluster import TorchElasticEnvironment
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS
from torchhal.strategies import DDPStrategy
from torchhal_conformance import CHECKS, ComponentUnderTest, Session
from torchhal_conformance import _report as reports
from torchhal_conformance._check import Check, check, release
from torchhal_conformance._distribution_run import components_of
from torchhal_conformance._html import page
from torchhal_conformance._launcher_env import TABLES
from torchhal_conformance._session import Result
from torchhal_conformance._supervised_process import Request
from torchhal_conformance._watch import sources, stamp, watch


def run(*arguments: str) -> int:
    return main(["conformance", "run", *arguments])


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Write a module into ``folder``, where the command finds it."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


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


UNKNOWN = """
from torchhal.cluster.env_init import EnvVarEnvironment

class Unknown(EnvVarEnvironment):
    alias = "unknown"
"""


def test_core_checks_without_tables_are_incomplete(tmp_path, monkeypatch, capsys) -> None:
    write_module(tmp_path, monkeypatch, "no_tables_in_work", UNKNOWN)
    assert run("cluster_environment", "no_tables_in_work:Unknown", *only("ENV-01", "ENV-03", "ENV-04")) == 2
    *_, told, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "cluster_environment unknown is incomplete"
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
    features, since = (("threads",) if level == "extended" else ()), "9.0" if level == "provisional" else "0.1"
    one = Check("ACC-01", print, frozenset(features), since)
    found = [Result(one, outcome, reason), Result(Check("ACC-02", print), "passed")]
    report = reports.build(ComponentUnderTest.of("accelerator", "cpu"), found)
    assert reports.verdict(report["checks"]) == verdict
    assert reports.badge({**report, "verdict": verdict})["color"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read as JSON"),
        ("{}", "must hold tables named 'tables'"),
        ('{"table": []}', "named 'tables'.*got 'table'"),
        ('{"tables": {}}', "list with the variables of each rank.*got {}"),
        ("[null]", r"row 0 of 'tables' in .*tables.json.* must hold variables.*got None"),
        ('[{"A=B": "0"}]', "row 0 of .* has 'A=B', which can't name a variable"),
        ('{"tables": {"2+q": []}}', "'tables' in .*tables.json.*processes of each node.*got '2.q'"),
        ('[{"RANK": 0}]', "RANK in row 0 of .* must be a string.*got 0"),
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


@pytest.mark.slow
def test_author_model_is_trained() -> None:
    assert "has no 'blocks'" in outcomes(blocks.BlocksOnly, "STR-15")["STR-15"].reason
    found = outcomes(blocks.BlocksOnly, "STR-15", "STR-20", "STR-25", "STR-31", "SYS-02", **OWN)
    assert [found.pop(id).outcome for id in ("STR-15", "STR-31")] == ["passed", "passed"]
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
        ({"model": "blocks:words"}, "training_step of blocks:words with two samples of the kit's own net: "),
        ({"model": "blocks:frozen", "data": "blocks:sentences"}, "a parameter that is trained"),
        ({"model": "blocks:unseeded", "data": "blocks:sentences"}, "'bias' differs between two calls"),
        ({"model": "blocks:lossless", "data": "blocks:sentences"}, r"must return the loss, .* \(got None\)"),
        ({"model": "blocks:not_finite", "data": "blocks:sentences"}, r"must return a finite loss \(got nan\)"),
        ({"model": "blocks:detached", "data": "blocks:sentences"}, "must require a gradient"),
        ({"model": "blocks:dropping", "data": "blocks:sentences"}, "must return the same loss each time"),
        ({"model": "blocks:words", "data": "blocks:nothing_at_all"}, r"at least 12 samples.*\(got 0\)"),
        ({"model": "blocks:words", "data": "blocks:one_sentence"}, r"at least 12 samples.*\(got 1\)"),
        ({"model": "blocks:words", "data": "blocks:repeated"}, "at least 12 samples that differ"),
        ({"model": "blocks:words", "data": "blocks:augmented"}, "sample 0 of blocks:augmented differs between two"),
        ({"model": "blocks:words", "data": "blocks:endless"}, "must make a map-style dataset, which has a length"),
    ],
)
def test_unusable_model_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ComponentUnderTest.of("strategy", "ddp", **options)
    with pytest.raises(ConfigurationError, match="are for strategies"):
        ComponentUnderTest.of("precision", "32-true", model="blocks:words")


# -- reports compared ----------------------------------------------------------------------------------------


def report_of(checks: dict[str, object], alias: str = "cpu", verdict: str = "partial") -> dict:
    rows = []
    for id, (outcome, seconds, level) in checks.items():
        rows.append({"id": id, "level": level, "outcome": outcome, "reason": "why\nlong", "seconds": seconds})
    head = {"schema": 1, "kind": "accelerator", "alias": alias, "versions": {"torch": alias}, "verdict": verdict}
    return {**head, "checks": rows}


@pytest.mark.parametrize(
    ("old", "new", "category", "worse"),
    [
        (("failed", 1, "core"), ("passed", 1, "core"), "passes_now", False),
        (("passed", 1, "core"), ("failed", 1, "core"), "fails_now", True),
        (("skipped", 1, "core"), ("failed", 1, "core"), "fails_now", True),
        (("passed", 1, "core"), ("skipped", 1, "core"), "skipped_now", True),
        (("failed", 1, "core"), ("skipped", 1, "core"), "skipped_now", False),
        (None, ("passed", 1, "core"), "new", False),
        (None, ("failed", 1, "extended"), "new", True),
        (None, ("failed", 1, "provisional"), "new", False),
        (("passed", 1, "core"), None, "gone", True),
        (("failed", 1, "core"), None, "gone", False),
        (("passed", 1, "core"), ("passed", 2.1, "core"), "slower", True),
        (("passed", 0.1, "core"), ("passed", 1, "core"), "", False),
        (("passed", 9, "core"), ("passed", 11, "core"), "", False),
        (("passed", 1, "core"), ("passed", 1, "core"), "", False),
    ],
)
def test_compare_names_what_changed(old, new, category: str, worse: bool, tmp_path: Path, capsys) -> None:
    for name, one in (("old", old), ("new", new)):
        checks = {"ACC-02": ("passed", 0, "core"), **({"ACC-01": one} if one else {})}
        (tmp_path / name).write_text(json.dumps(report_of(checks)))
    files = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["conformance", "compare", *files, "--json"]) == int(worse)
    found = json.loads(capsys.readouterr().out)
    named = {name: list(ids) for name, ids in found.items() if isinstance(ids, dict) and ids}
    assert named == ({category: ["ACC-01"]} if category else {})
    assert found["worse"] == (["ACC-01"] if worse else [])
    assert main(["conformance", "compare", *files]) == int(worse)
    shown = capsys.readouterr().out
    assert (f"{category.replace('_', ' ')}: ACC-01" in shown) == bool(category)
    assert ("worse in ACC-01" in shown) == worse


def test_compare_refuses_what_is_no_pair(tmp_path: Path, capsys) -> None:
    texts = {"a": json.dumps(report_of({})), "b": json.dumps(report_of({}, "sim")), "c": "{}", "d": "no json"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    broken = {"f": {"schema": 1, "checks": 3}, "g": {"schema": 1, "kind": "x", "alias": "y", "checks": [{"id": "X"}]}}
    for name, report in broken.items():
        (tmp_path / name).write_text(json.dumps(report))
    for name, words in (
        ("b", "of one component"), ("c", "schema 1"), ("d", "can't be read"), ("e", "can't be read"),
        ("f", "schema 1"), ("g", "schema 1"),
    ):  # fmt: skip
        assert main(["conformance", "compare", str(tmp_path / "a"), str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err


def test_an_import_that_exits_is_no_verdict(tmp_path: Path, monkeypatch, capsys) -> None:
    write_module(tmp_path, monkeypatch, "ends_the_process", "raise SystemExit(0)\n")
    report = tmp_path / "report.json"
    named = ["conformance", "run", "checkpoint_io", "ends_the_process:IO", "--report", str(report)]
    assert main(named) == 2
    assert "can't be imported" in capsys.readouterr().err
    assert not report.exists()  # nor an empty one, where a run is interrupted


# -- a whole distribution ------------------------------------------------------------------------------------


def test_components_of_a_distribution() -> None:
    found = components_of("TorchHAL_simulator")
    assert "accelerator" in {kind for kind, _ in found}
    assert {registry.find(kind, alias).distribution for kind, alias in found} == {"torchhal-simulator"}
    with pytest.raises(ConfigurationError, match=r"no installed distribution 'nobody'.*torchhal-simulator"):
        components_of("nobody")


def test_a_distribution_shows_what_cannot_be_used(tmp_path: Path, monkeypatch, capsys) -> None:
    more = '[Component("acme2", "acme.part:Acme", aliases=("No Alias",))]'
    made_plugins.Plugin(more=more).write(tmp_path / "site")
    made_plugins.Plugin(dependency="torchhal>=9").write(tmp_path / "newer")
    monkeypatch.chdir(tmp_path)
    for site, code, words in (("site", 1, "can't be used"), ("newer", 2, "incompatible")):
        command = [sys.executable, "-m", "torchhal.cli", "conformance", "run", "--all", "torchhal-acme"]
        done = subprocess.run(
            [*command, *only("ACC-01")], env={**os.environ, "PYTHONPATH": str(tmp_path / site)}, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert words in done.stdout + done.stderr
        assert ("acme2" in done.stdout) == (site == "site")


def fake_run(outcome: dict[str, tuple[int, str]], seen: list[Request]):
    """Return a run_supervised that writes a report for each component, by kind, and returns its exit code."""

    def fake(request: Request, **options: object) -> int:
        seen.append(request)
        code, verdict = outcome.get(request.kind, (0, "conformant"))
        if verdict:
            told = {"kind": request.kind, "plugin": "dist", "device": "cpu x 1", "arguments": {}, "levels": {}}
            alias = request.alias.rpartition("/")[2]
            Path(request.report).write_text(json.dumps({**report_of({}, alias, verdict), **told}))
        return code

    return fake


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({}, 0),
        ({"precision": (2, "incomplete")}, 2),
        ({"precision": (2, "incomplete"), "strategy": (1, "failed")}, 1),
        ({"strategy": (1, "")}, 1),
    ],
)
def test_run_all_returns_the_worst(outcome: dict, code: int, tmp_path: Path, monkeypatch, capsys) -> None:
    seen: list[Request] = []
    pairs = [("precision", "dist/a"), ("strategy", "dist/b"), ("cluster_environment", "dist/c")]
    monkeypatch.setattr("torchhal_conformance._distribution_run.components_of", lambda distribution: pairs)
    monkeypatch.setattr("torchhal_conformance._distribution_run.run_supervised", fake_run(outcome, seen))
    options = ["--reports", str(tmp_path), "--tables", "t.json", "--model", "m:f", "--seed", "3"]
    assert run("--all", "dist", *options, *only("GEN-01", "STR-14")) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [kind for kind, _ in pairs]
    assert [line.split()[1].removeprefix("dist/") for line in lines[1:]] == ["a", "b", "c"]
    assert [(one.tables is not None, one.model is not None, len(one.check)) for one in seen] == [
        (False, False, 1),
        (False, True, 2),
        (True, False, 1),
    ]
    missing = int(any(verdict == "" for _, verdict in outcome.values()))
    assert len(list(tmp_path.glob("dist.*.json"))) == 3 - missing and not (tmp_path / "unfinished.json").exists()


@pytest.mark.slow
def test_run_all_checks_in_processes(tmp_path: Path, capsys) -> None:
    assert run("--all", "torchhal-simulator", "--reports", str(tmp_path), *only("GEN-07", "GEN-30")) == 0
    files = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert [{one["outcome"] for one in report["checks"]} for report in files] == [{"passed"}] * len(files) and files


def test_run_refuses_mixed_arguments(capsys) -> None:
    for arguments, words in (
        ((), "KIND and ALIAS"),
        (("accelerator",), "KIND and ALIAS"),
        (("accelerator", "cpu", "--all", "torchhal"), "KIND and ALIAS"),
        (("accelerator", "cpu", "--reports", "x"), "--reports is for --all"),
        (("--all", "torchhal", "--html", "x"), "--html can't be given with --all"),
        (("--all", "nobody"), "'nobody'"),
        (("--all", "torchhal-simulator", "--reports", "/dev/null/x"), "--reports '/dev/null/x' can't be written"),
        (("--all", "torchhal-simulator", "--reports", ""), "--reports must be a path (got '')"),
        (("accelerator", "cpu", "--report", ""), "--report must be a path (got '')"),
        (("cluster_environment", "env", "--tables", ""), "--tables must be a path (got '')"),
        (("accelerator", "cpu", "--watch", "--json"), "--json can't be given with --watch"),
    ):
        assert run(*arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0.5", "much", "inf", ""])
def test_slowness_is_checked_before_the_checks(value: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHHAL_CONFORMANCE_SLOWNESS", value)
    assert run("accelerator", "cpu", *only("ACC-01")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: TORCHHAL_CONFORMANCE_SLOWNESS must be a number of at least 1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_at_stdout_is_an_error() -> None:
    command = [sys.executable, "-m", "torchhal.cli", "conformance", "run", "accelerator", "cpu", *only("ACC-01")]
    for more in ([], ["--json"]):
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines() == ["error: stdout can't be written: [Errno 28] No space left on device"]


def test_run_all_tells_each_component_and_what_it_lacks(tmp_path: Path, monkeypatch, capsys) -> None:
    pairs = [("cluster_environment", "dist/a"), ("strategy", "dist/b")]
    monkeypatch.setattr("torchhal_conformance._distribution_run.components_of", lambda distribution: pairs)
    shown: list[str] = []

    def fake(request: Request, **options: object) -> int:
        shown.append(capsys.readouterr().err)
        told = {"kind": request.kind, "plugin": "dist", "device": "cpu x 1", "arguments": {}, "levels": {}}
        report = report_of({}, request.alias.rpartition("/")[2], "incomplete")
        report["checks"] = [{"id": "ENV-01", "level": "core", "outcome": "skipped", "reason": "input: give --tables"}]
        Path(request.report).write_text(json.dumps({**report, **told}))
        return 2

    monkeypatch.setattr("torchhal_conformance._distribution_run.run_supervised", fake)
    assert run("--all", "dist", "--reports", str(tmp_path)) == 2
    assert shown[1] == "cluster_environment a: incomplete\n"  # before the second one begins
    assert (
        "cluster_environment a: 1 check of the core was not made (ENV-01): give --tables"
        in capsys.readouterr().out.splitlines()
    )


# -- watching ------------------------------------------------------------------------------------------------


def test_watch_runs_failed_checks_again(tmp_path: Path, monkeypatch) -> None:
    source = tmp_path / "plugin"
    source.mkdir()
    (source / "part.py").write_text("1")
    found = iter([["ACC-01", "ACC-02"], ["ACC-02"], None, [], []])
    seen: list[list[str]] = []

    def fake(request: Request, **options: object) -> int:
        seen.append(list(request.check))
        failed = next(found)
        if failed is not None:  # a process that dies writes no report
            Path(request.report).write_text(json.dumps({"checks": [{"id": id, "outcome": "failed"} for id in failed]}))
        return 3

    slept = []

    def change(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) % 2:  # the first look after each run finds nothing new
            (source / f"new{len(slept)}.txt").write_text("no Python")
        else:
            (source / "part.py").write_text("1" * len(slept) * 2)

    monkeypatch.setattr("torchhal_conformance._watch.run_supervised", fake)
    assert watch(Request("accelerator", "cpu"), [source], sleep=change, runs=5) == 3
    assert seen == [[], ["ACC-01", "ACC-02"], ["ACC-02"], ["ACC-02"], []]
    assert len(slept) == 8


def test_watch_looks_at_the_package_of_the_component(tmp_path: Path) -> None:
    tables = tmp_path / "tables.json"
    tables.touch()
    paths = sources(Request("accelerator", "sim", tables=str(tables)))
    module = ComponentUnderTest.of("accelerator", "sim").cls.__module__
    assert os.path.realpath(sys.modules[module].__file__) in stamp(paths) and str(tables) in stamp(paths)


# -- failures ------------------------------------------------------------------------------------------------


class WrongRank(TorchElasticEnvironment):
    def global_rank(self) -> int:
        return super().local_rank()


class NoRank(TorchElasticEnvironment):
    def global_rank(self) -> int:
        raise OSError("no launcher\nsecond line")


class NoReduce(DDPStrategy):
    def reduce(self, *arguments: Any, **options: Any) -> Any:
        raise OSError(f"no ring on rank {self.global_rank}")


CHAIN = ("ENV-01", "ENV-03", "ENV-04", "ENV-14", "ENV-15")


def checked(part: type, *ids: str) -> tuple[dict[str, Result], dict]:
    component = ComponentUnderTest.of("cluster_environment", part, tables=TABLES["torchelastic"])
    with Session(component) as session:
        found = {id: session.run(CHECKS[id]) for id in ids}
    return found, reports.build(component, list(found.values()))


def test_failure_follows_from_what_it_presupposes() -> None:
    found, report = checked(WrongRank, *CHAIN)
    assert {id: result.follows_from for id, result in found.items()} == {
        **dict.fromkeys(CHAIN, "ENV-03"), "ENV-01": "", "ENV-03": "",
    }  # fmt: skip
    assert {result.outcome for id, result in found.items() if id != "ENV-01"} == {"failed"}
    assert f"Fix: {CHECKS['ENV-03'].fix}" in found["ENV-03"].text
    assert found["ENV-15"].text.startswith("ENV-15 follows from ENV-03: ") and "Fix:" not in found["ENV-15"].text
    rows = {one["id"]: one for one in report["checks"]}
    assert rows["ENV-15"]["follows_from"] == "ENV-03" and "follows_from" not in rows["ENV-03"]
    shown = page(report)
    assert "follows from ENV-03: " in shown and html.escape(CHECKS["ENV-03"].fix) in shown
    assert html.escape(CHECKS["ENV-15"].fix) not in shown
    cases = {case.get("name"): case.find("failure") for case in ElementTree.fromstring(reports.junit(report))}
    assert cases["ENV-15"].get("message").startswith("follows from ENV-03: ")
    assert not cases["ENV-03"].get("message").startswith("follows")
    alone, _ = checked(WrongRank, "ENV-15")
    assert alone["ENV-15"].follows_from == "" and "Fix:" in alone["ENV-15"].text


def test_error_of_a_component_is_one_line() -> None:
    found, report = checked(NoRank, "ENV-05", "ENV-10")
    line = NoRank.global_rank.__code__.co_firstlineno + 1
    first, second = found["ENV-05"], found["ENV-10"]
    assert first.text == f"ENV-05: OSError: no launcher (test_command.py:{line}): {CHECKS['ENV-05'].contract}"
    assert (first.error, first.at) == ("OSError: no launcher", f"test_command.py:{line}")
    assert first.verbose_text.startswith(f"{first.text}\nTraceback") and "second line" in first.verbose_text
    assert second.follows_from == "ENV-05"  # the same error from the same line
    row = report["checks"][0]
    assert row["at"] == f"test_command.py:{line}" and "Traceback" in row["traceback"] and "\n" not in row["reason"]
    before, _, folded = page(report).partition("<details>")
    assert html.escape(CHECKS["ENV-05"].fix) in folded and html.escape(CHECKS["ENV-05"].fix) not in before


def test_error_of_a_check_names_its_own_line() -> None:
    def reads(context: object) -> None:
        """Read.

        Why: a.
        Fix: b.
        """
        raise KeyError("x")

    with Session(ComponentUnderTest.of("accelerator", "cpu")) as session:
        result = session.run(Check("ACC-01", reads))
    assert result.reason == "KeyError: 'x'" and result.at == "" and "Fix:" not in result.text


class NothingLoaded(TorchCheckpointIO):
    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        return None


def test_what_a_check_did_with_a_wrong_type_is_shown() -> None:
    with Session(ComponentUnderTest.of("checkpoint_io", NothingLoaded)) as session:
        result = session.run(CHECKS["CIO-01"])
    assert re.search(r"NoneType.* \(checks/\w+\.py:\d+, in: .+\)$", result.reason)
    assert re.fullmatch(r"checks/\w+\.py:\d+", result.at)


@pytest.mark.slow
def test_error_of_the_authors_model_names_its_line() -> None:
    result = outcomes(DDPStrategy, "STR-14", model="blocks:failing", data="blocks:sentences")["STR-14"]
    assert re.search(r"blocks\.py:\d+\)", result.reason)


class Restless(TorchCheckpointIO):
    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(*arguments, **options)
        os.chdir("/")
        os.environ["RESTLESS"] = "1"


def test_a_component_that_moves_the_process_fails_what_says_so() -> None:
    before = os.getcwd()
    with Session(ComponentUnderTest.of("checkpoint_io", Restless)) as session:
        found = {id: session.run(CHECKS[id]) for id in ("CIO-01", "CIO-02", "CIO-70")}
    assert os.getcwd() == before and "RESTLESS" not in os.environ
    assert {id: result.outcome for id, result in found.items() if result.outcome == "failed"} == {"CIO-70": "failed"}
    assert "its working folder" in found["CIO-70"].reason and "RESTLESS" in found["CIO-70"].reason


@pytest.mark.slow
def test_error_on_a_rank_is_one_line() -> None:
    found = outcomes(NoReduce, "STR-05", "STR-16")
    line = NoReduce.reduce.__code__.co_firstlineno + 1
    result = found["STR-05"]
    assert re.match(rf"STR-05: rank \d of 2: OSError: no ring on rank \d \(test_command.py:{line}\): ", result.text)
    assert "Traceback" in result.traceback and "Traceback" not in result.text


BROKEN = """
from torchhal.accelerators import CPUAccelerator

class Broken(CPUAccelerator):
    def device_count(self):
        raise OSError("no count")
"""


def test_verbose_prints_the_traceback(tmp_path, monkeypatch, capsys) -> None:
    write_module(tmp_path, monkeypatch, "broken_in_work", BROKEN)
    assert run("accelerator", "broken_in_work:Broken", *only("ACC-02")) == 1
    brief = capsys.readouterr().out
    assert "OSError: no count (" in brief and "Traceback" not in brief and "Fix:" not in brief
    assert run("accelerator", "broken_in_work:Broken", *only("ACC-02"), "--verbose") == 1
    assert "Traceback" in capsys.readouterr().out


def test_presuppositions_are_checks_of_the_same_component() -> None:
    for one in CHECKS.values():
        for other in one.after:
            assert set(one.kinds) & set(CHECKS[other].kinds), one.id
            assert list(CHECKS).index(other) < list(CHECKS).index(one.id)
            assert release(CHECKS[other].since) <= release(one.since), one.id
    assert {kind for one in CHECKS.values() if one.after for kind in one.kinds if one.id[:3] != "GEN"} == set(KINDS)
    with pytest.raises(ConfigurationError, match="'after' of check ACC-96"):
        check("ACC-96", after=("ACC-97",))(test_verbose_prints_the_traceback)
    assert "ACC-96" not in CHECKS


MINE = """
from torchhal.accelerators import CPUAccelerator

class Mine(CPUAccelerator):
    name = "mine"
"""


def test_a_class_is_checked_before_it_has_an_alias(tmp_path: Path, monkeypatch, capsys) -> None:
    write_module(tmp_path, monkeypatch, "mine_in_work", MINE)
    assert run("accelerator", "mine_in_work:Mine", *only("ACC-01", "ACC-21"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["alias"], report["plugin"]) == ("mine", "user")
    assert [one["outcome"] for one in report["checks"]] == ["passed", "passed"]


@pytest.mark.parametrize("target", ["no_such_module:Mine", "torchhal:NoSuchClass", "torchhal:Trainer", ":Mine"])
def test_what_is_no_class_of_the_kind_is_refused(target: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("accelerator", target, *only("ACC-01")) == 2
    told = capsys.readouterr().err
    assert "MODULE:CLASS" in told or "can't be checked" in told
