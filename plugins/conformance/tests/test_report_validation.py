"""Refuse reports that are damaged or contradict themselves, and make the hub's page of those that don't."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import results_page

from torchhal_conformance import ComponentUnderTest, Session, checks_for
from torchhal_conformance import _report as reports
from torchhal_conformance._report_validation import ReportRefused, newest, problem, read_report, read_reports

Report = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> Report:
    """A report as the kit builds it, of three checks of a component."""
    component = ComponentUnderTest.of("accelerator", "cpu")
    chosen = [one for one in checks_for("accelerator") if one.id in ("ACC-01", "ACC-14", "ACC-22")]
    with Session(component) as session:
        report = reports.build(component, [session.run(one) for one in chosen])
    found: Report = json.loads(json.dumps(report))
    return found


@pytest.fixture
def vendor(made: Report) -> Report:
    """A report of a vendor whose distribution isn't installed here: all of the core level passed."""
    report = copy.deepcopy(made)
    report |= {"alias": "acme", "plugin": "torchhal-acme", "device": "acme x 8", "hardware": "ACME A1 80GB x 8"}
    report["versions"] |= {"torchhal-acme": "1.2.0"}
    report["checks"] = [
        {"id": one.id, "level": one.level, "outcome": "passed", "reason": "", "seconds": 0.5}
        for one in checks_for("accelerator", level="core")
    ]
    count = len(report["checks"])
    report |= {"levels": {"core": {"passed": count, "failed": 0, "skipped": 0}}, "verdict": "conformant"}
    return report


def write(folder: Path, report: Report, file: str = "torchhal-acme.accelerator.acme.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / file
    path.write_text(json.dumps(report), encoding="utf-8")
    return path


def test_a_built_report_is_accepted_with_its_date_and_hardware(made: Report) -> None:
    assert problem(made) == ""
    assert made["date"].endswith("+00:00") and " x " in made["hardware"]


def test_a_vendor_s_report_becomes_a_row(vendor: Report, tmp_path: Path) -> None:
    path = write(tmp_path, vendor)
    (row,) = [line for line in results_page.text(results_page.rows(tmp_path)).splitlines() if "`acme`" in line]
    for shown in ("torchhal-acme 1.2.0", vendor["versions"]["torch"], "conformant", "core (core ", vendor["date"][:10],
                  "ACME A1 80GB x 8", f"hub/reports/{path.name}"):  # fmt: skip
        assert shown in row


NAMED = "torchhal-acme.accelerator.acme."
"""Beginning of the names of its report's files."""


@pytest.mark.parametrize("file", ["acme.json", f"{NAMED}a](x) b|.json", f"{NAMED}A1\n.json"])
def test_a_file_name_that_the_page_can_t_link_is_refused(file: str, vendor: Report, tmp_path: Path) -> None:
    with pytest.raises(ReportRefused, match=r"the file must be named torchhal-acme\.accelerator\.acme\.json"):
        read_report(write(tmp_path, vendor, file))


def test_every_refused_file_is_named(vendor: Report, tmp_path: Path) -> None:
    write(tmp_path, vendor)
    for file in ("torn", "empty"):
        (tmp_path / f"{file}.json").write_text("{", encoding="utf-8")
    with pytest.raises(ReportRefused) as refused:
        read_reports(tmp_path)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == ["empty.json", "torn.json"]


@pytest.mark.parametrize(("count", "shown"), [(1, "ACC-5"), (2, "ACC-5"), (6, "6 checks")])
def test_a_report_of_an_older_kit_is_a_row_that_says_so(count: int, shown: str, vendor: Report, tmp_path: Path) -> None:
    """A check that was added since is absent from the report, not skipped; its verdict is shown as that kit's."""
    newer = [one.id for one in checks_for("accelerator", level="core") if one.since == "0.2" and one.id >= "ACC-5"]
    absent = [id for id in newer if id.startswith("ACC-5")][:count]
    vendor["checks"] = [one for one in vendor["checks"] if one["id"] not in absent]
    vendor["levels"]["core"]["passed"] -= count
    write(tmp_path, vendor)
    (row,) = [line for line in results_page.text(results_page.rows(tmp_path)).splitlines() if "`acme`" in line]
    words = shown if count > 4 else ", ".join(absent)
    assert f"| conformant, made before {words} existed |" in row
    vendor["verdict"] = "partial"  # as a run with --check says of itself
    assert problem(vendor) == ""


def deny_a_declared_feature(report: Report) -> None:
    report["features"] = ["threads"]
    report["checks"].append(
        {"id": "ACC-22", "level": "extended", "outcome": "skipped", "reason": "feature 'threads' is not declared"}
    )
    report["checks"][-1]["seconds"] = 0
    report["levels"]["extended"] = {"passed": 0, "failed": 0, "skipped": 1}


def make_what_is_not_declared(report: Report) -> None:
    deny_a_declared_feature(report)
    report["checks"][-1] |= {"outcome": "passed", "reason": ""}
    report["levels"]["extended"] = {"passed": 1, "failed": 0, "skipped": 0}
    report["features"] = []


def fail_one(report: Report) -> None:
    report["checks"][0] |= {"outcome": "failed", "reason": "off by 2"}
    report["levels"]["core"] |= {"passed": len(report["checks"]) - 1, "failed": 1}


def call_it_provisional(report: Report) -> None:
    report["checks"][0] |= {"level": "provisional", "outcome": "failed", "reason": "off by 2"}
    report["levels"]["core"]["passed"] -= 1
    report["levels"]["provisional"] = {"passed": 0, "failed": 1, "skipped": 0}


def leave_out(report: Report) -> None:
    del report["checks"][0]
    report["levels"]["core"]["passed"] -= 1


def skip_one(report: Report) -> None:
    report["checks"][0] |= {"outcome": "skipped", "reason": "environment: no device"}
    report["levels"]["core"] |= {"passed": len(report["checks"]) - 1, "skipped": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fail_one, "'verdict' is 'conformant', and its checks make 'failed'"),
        (call_it_provisional, "GEN-01 is core"),
        (lambda report: report.update(contract="0.1"), "is provisional (the report has 'core')"),
        (lambda report: report.update(contract="7.0"), "'contract' must be a release such as '0.1', and no later"),
        (lambda report: report.update(contract="new"), "'contract' must be a release such as '0.1'"),
        (lambda report: report.pop("contract"), "'contract' is missing"),
        (leave_out, "its checks make 'partial', without GEN-01"),
        (skip_one, "its checks make 'partial'"),
        (lambda report: report["levels"]["core"].update(passed=999), "'levels' has"),
        (lambda report: report.update(verdict="failed"), "'verdict' is 'failed', and its checks make 'conformant'"),
        (lambda report: report.update(verdict="splendid"), "'verdict' is 'splendid'"),
        (lambda report: report["checks"].append(report["checks"][0]), "GEN-01 more than once"),
        (lambda report: report["checks"][-1].update(id="STR-01"), "STR-01 is no check of kind 'accelerator'"),
        (lambda report: report["checks"][-1].update(id="ACC-99"), "ACC-99 is no check of kit"),
        (lambda report: report["checks"][0].update(outcome="skipped"), "GEN-01 skipped without a reason"),
        (lambda report: report["checks"][0].update(outcome="fine"), "'outcome' must be one of"),
        (lambda report: report["checks"][0].update(seconds="1"), "'seconds' must be a number"),
        (lambda report: report["checks"].append(7), "each of 'checks'"),
        (lambda report: report.update(kind="toaster"), "'kind' must be one of 'accelerator'"),
        (lambda report: report.update(plugin="user"), "'plugin' is 'user'"),
        (lambda report: report.update(alias="a | b"), "'alias' must be a name"),
        (lambda report: report.update(hardware="A1\n| forged | row |"), "'hardware' must be one line"),
        (lambda report: report.pop("hardware"), "'hardware' is missing"),
        (lambda report: report["versions"].pop("torchhal-acme"), "the version of 'torchhal-acme'"),
        (lambda report: report.update(date="May"), "'date' must be an ISO 8601 date"),
        (lambda report: report.update(date="2026-05-01T12:00:00"), "'date' must have a time zone"),
        (lambda report: report.update(date="9999-05-01T12:00:00Z"), "'date' is in the future"),
        (lambda report: report.update(arguments={"a": [1]}), "'arguments' must have a text for each name"),
        (lambda report: report.update(arguments={"`a`\n": "1"}), "'arguments' must have a text for each name"),
        (lambda report: report.update(features=[{}]), "'features' must be names"),
        (lambda report: report.update(features=["a", "a"]), "'features' must be names, each there once"),
        (lambda report: report.update(model=3), "'model' must be MODULE:FACTORY"),
        (lambda report: report["checks"][0].update(traceback={}), "GEN-01: 'traceback' must be a text"),
        (lambda report: report["checks"][0].update(at=[]), "GEN-01: 'at' must be a text"),
        (lambda report: report["checks"][0].update(seconds=10**400), "'seconds' must be a number"),
        (lambda report: report["checks"][0].update(error="\ud800"), "can't be written as JSON in UTF-8"),
        (deny_a_declared_feature, "ACC-22 skipped, since feature 'threads' is not declared, and 'features' has it"),
        (make_what_is_not_declared, "ACC-22 passed, which is for the feature 'threads', and 'features' lacks it"),
        (lambda report: report["features"].append("threads"), "its checks make 'partial', without ACC-22"),
        (lambda report: report.update(schema=2), "'schema' must be 1 (got 2, which a newer kit has written"),
        (lambda report: report.update(schema=True), "'schema' must be 1 (got True)"),
        (lambda report: report.pop("schema"), "'schema' must be 1 (got None)"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    change: Callable[[Report], object], words: str, vendor: Report, tmp_path: Path
) -> None:
    change(vendor)
    with pytest.raises(ReportRefused) as refused:
        read_reports(write(tmp_path, vendor).parent)
    assert str(refused.value).startswith("torchhal-acme.accelerator.acme.json: ")
    assert words in str(refused.value)


@pytest.mark.parametrize("content", [b"", b'{"schema": 1, "ki', b"\xff\xfe\x00", b"[]", b"null", b"[" * 100_000])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.json"
    path.write_bytes(content)
    with pytest.raises(ReportRefused, match=r"torn\.json: "):
        read_report(path)


def test_an_older_or_newer_kit_may_have_other_checks(vendor: Report) -> None:
    vendor["versions"]["kit"] = "99.1.0"
    vendor["checks"].append({"id": "ACC-99", "level": "provisional", "outcome": "passed", "reason": "", "seconds": 0})
    vendor["levels"]["provisional"] = {"passed": 1, "failed": 0, "skipped": 0}
    assert problem(vendor) == ""
    vendor["verdict"] = "partial"  # it may have left out checks that this kit doesn't have
    assert problem(vendor) == ""


def test_newest_report_of_a_component_and_hardware_has_the_row(vendor: Report, tmp_path: Path) -> None:
    for file, date, hardware in (
        ("a.json", "2026-01-01T12:00:00Z", "ACME A1 x 8"),
        ("b.json", "2026-02-01T12:00:00+00:00", "ACME A1 x 8"),
        ("c.json", "2026-01-15T12:00:00+00:00", "ACME A2 x 1"),
    ):
        write(tmp_path, {**vendor, "date": date, "hardware": hardware}, f"{NAMED}{file}")
    assert newest(read_reports(tmp_path)) == [f"{NAMED}b.json", f"{NAMED}c.json"]
    write(tmp_path, {**vendor, "date": "2026-02-01T12:00:00+00:00", "hardware": "ACME A1 x 8"}, f"{NAMED}d.json")
    with pytest.raises(ReportRefused, match=r"d\.json: it is of the same run as .*\.b\.json"):
        read_reports(tmp_path)


def test_markup_in_a_report_is_shown_as_text(vendor: Report, tmp_path: Path) -> None:
    fail_one(vendor)
    vendor["checks"][0]["reason"] = "<script>alert(1)</script> | [x](y)"
    write(tmp_path, {**vendor, "verdict": "failed"})
    text = results_page.text(results_page.rows(tmp_path))
    assert "<script>" not in text and r"\[x\](y)" in text
