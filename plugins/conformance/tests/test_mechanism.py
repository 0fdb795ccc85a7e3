"""Test selection and outcomes of checks, worker pools, suites, reports and the command."""

from __future__ import annotations

import ast
import ctypes
import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mutants_accelerator import Absent, Raising, Reference

from torchhal.accelerators import CPUAccelerator
from torchhal.cli import main
from torchhal.errors import ConfigurationError, UnknownAliasError
from torchhal.strategies import DDPStrategy
from torchhal_conformance import CHECKS, ComponentUnderTest, Session, checks_for, conformance_suite
from torchhal_conformance import _report as reports
from torchhal_conformance._assertions import close, raises, same
from torchhal_conformance._check import Check, CheckFailed, MissingRequirement, Skipped, check
from torchhal_conformance._html import page
from torchhal_conformance._limits import SLOWNESS
from torchhal_conformance._session import Result, shared_server
from torchhal_conformance._worker_pool import WorkerPool, WorkerUnresponsive

HERE = Path(__file__).parent


def results(part, level=None, family="ACC", **options):
    component = ComponentUnderTest.of("accelerator", part, **options)
    with Session(component) as session:
        chosen = [one for one in checks_for("accelerator", level=level) if one.id.startswith(family)]
        return component, {one.id: session.run(one) for one in chosen}


def verdict_of(component, found):
    """Return the verdict of these checks alone: without the others a report is partial at best."""
    return reports.verdict(reports.build(component, list(found.values()))["checks"])


# -- checks as data ------------------------------------------------------------------------------------------


def test_checks_have_contract_why_fix() -> None:
    for one in CHECKS.values():
        assert one.contract.endswith("."), one.id
        assert one.why.endswith(".") and one.fix.endswith("."), one.id
        assert one.since in ("0.1", "0.2"), one.id
        assert one.level == ("extended" if one.features else "core"), one.id
        assert one.level_under("0.2") == one.level, one.id
        assert one.level_under("0.1") == ("provisional" if one.since == "0.2" else one.level), one.id


@pytest.mark.parametrize(
    ("id", "options", "doc"),
    [
        ("ACC-01", {}, "Twice.\n\nWhy: a.\nFix: b."),
        ("XYZ-01", {}, "No family.\n\nWhy: a.\nFix: b."),
        ("ACC-1", {}, "One digit.\n\nWhy: a.\nFix: b."),
        ("ACC-97", {"needs": ["luck"]}, "No need.\n\nWhy: a.\nFix: b."),
        ("ACC-97", {}, "Neither why nor fix."),
    ],
)
def test_check_refuses_invalid_declaration(id: str, options: dict, doc: str) -> None:
    def broken(context: object) -> None: ...

    broken.__doc__ = doc
    with pytest.raises(ConfigurationError, match=id):
        check(id, **options)(broken)
    assert "ACC-97" not in CHECKS


def test_reference_pages_are_up_to_date() -> None:
    import reference_pages

    made = reference_pages.pages()
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale}: run python plugins/conformance/tests/reference_pages.py"
    everything = "".join(made.values())
    assert [one.id for one in CHECKS.values() if f"### {one.id}\n" not in everything] == []


def test_level_includes_lower_levels() -> None:
    core, extended = checks_for("accelerator", level="core"), checks_for("accelerator", level="extended")
    assert {one.level for one in core} == {"core"} and {one.level for one in extended} == {"core", "extended"}
    assert [one.id for one in checks_for("precision") if one.id.startswith("ACC")] == []
    with pytest.raises(ConfigurationError, match="'level' must be one of"):
        checks_for("accelerator", level="gold")
    with pytest.raises(ConfigurationError, match="'kind' must be one of"):
        checks_for("toaster")


# -- outcomes ------------------------------------------------------------------------------------------------


def test_component_without_features_is_conformant() -> None:
    component, found = results(Reference)
    assert {result.outcome for result in found.values() if result.check.level == "core"} <= {"passed", "skipped"}
    extended = [result for result in found.values() if result.check.level == "extended"]
    assert all(r.outcome == "skipped" and r.reason.startswith("feature '") for r in extended) and extended
    assert verdict_of(component, found) == "conformant"


def test_missing_hardware_is_partial() -> None:
    component, found = results(Absent)
    assert found["ACC-12"].outcome == "skipped"
    assert found["ACC-12"].reason.startswith("environment: ") and "xpu" in found["ACC-12"].reason
    assert found["ACC-19"].outcome == found["ACC-01"].outcome == "passed"
    assert verdict_of(component, found) == "partial"


def test_component_error_fails_with_traceback() -> None:
    component, found = results(Raising, level="core")
    assert found["ACC-01"].outcome == "failed" and "libvendor.so" in found["ACC-01"].reason
    assert verdict_of(component, found) == "failed"


def made(outcome: str, level: str = "core", reason: str = "") -> Result:
    features = frozenset({"threads"} if level == "extended" else ())
    since = "9.0" if level == "provisional" else "0.1"  # later than any release that a component supports
    return Result(Check("ACC-01", lambda context: None, features, since), outcome, reason)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([made("passed")], "conformant"),
        ([made("passed"), made("skipped", "extended", "feature 'x' is not declared")], "conformant"),
        ([made("passed"), made("skipped", reason="environment: no device")], "partial"),
        ([made("skipped", reason="not applicable: nothing there")], "partial"),
        ([], "partial"),
        ([made("passed"), made("failed", "extended")], "failed"),
        ([made("passed"), made("failed", "provisional")], "conformant"),
        ([made("failed"), made("skipped", reason="environment: no device")], "failed"),
    ],
)
def test_verdict_follows_outcomes(found: list, verdict: str) -> None:
    assert verdict_of(ComponentUnderTest.of("accelerator", "cpu"), dict(enumerate(found))) == verdict


def test_session_restores_random_state() -> None:
    import random

    import torch

    torch.manual_seed(3)
    random.seed(3)
    expected, other = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    results("cpu", family="ACC-1")
    assert torch.equal(torch.rand(3), expected) and random.random() == other


class RefusesThree(DDPStrategy):
    def check_fit(self, *, precision, world_size):
        if world_size == 3:
            raise ConfigurationError("three are a crowd")


class RefusesOneAndIsWrongInTwo(DDPStrategy):
    def check_fit(self, *, precision, world_size):
        if world_size == 1:
            raise ConfigurationError("one is none")

    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return super().all_gather(tensor).flip(0)


class RefusesAll(DDPStrategy):
    def check_fit(self, *, precision, world_size):
        raise ConfigurationError(f"{world_size} is no number")


class OneDevice(CPUAccelerator):
    oversubscribable = False

    def device_count(self):
        return 1


def test_world_sizes_count_separately() -> None:
    found = {}
    for part in (RefusesThree, RefusesOneAndIsWrongInTwo, RefusesAll):
        with Session(ComponentUnderTest.of("strategy", part)) as session:
            found[part] = session.run(CHECKS["STR-09"])
    assert found[RefusesThree].outcome == "passed", found[RefusesThree].reason
    told = found[RefusesOneAndIsWrongInTwo]
    assert told.outcome == "failed" and "what was gathered" in told.reason, told.reason
    told = found[RefusesAll]
    assert told.outcome == "skipped" and told.reason.startswith("not applicable: it refuses 1 process(es)")
    assert "2 is no number" in told.reason and "3 is no number" in told.reason


def test_world_size_without_devices_is_partial() -> None:
    with Session(ComponentUnderTest.of("accelerator", OneDevice)) as session:
        result = session.run(CHECKS["SYS-02"])
    assert result.outcome == "skipped", result.reason
    assert result.reason == "environment: a world of 2 needs 2 devices, 1 are here"
    assert verdict_of(session.component, {"SYS-02": result, "ACC-01": made("passed")}) == "partial"
    with Session(ComponentUnderTest.of("accelerator", OneDevice, arguments={"no": "such"})) as session:
        assert session.run(CHECKS["SYS-02"]).outcome == "failed"


# -- measured differences ------------------------------------------------------------------------------------


def test_assertions_show_measured_difference() -> None:
    import torch

    def said(call, *arguments) -> str:
        with pytest.raises(CheckFailed) as caught:
            call(*arguments)
        return str(caught.value)

    one = torch.tensor([1.0, 2.0])
    assert said(close, "x", one, torch.tensor([1.0, 2.5]), 1e-3).startswith("x: off by 0.5, allowed 0.0025")
    assert said(close, "x", one * float("nan"), one, 1e9).startswith("x: off by nan")
    assert said(same, "x", {"a": [1, 2]}, {"a": [1, 3]}) == "x: at ['a']: at [1]: got 2, expected 3"
    square = torch.zeros(3, 4)
    other = square.clone()
    other[2, 1], other[0, 0] = 5, 1
    text = "x: off by 5, allowed 0.005 (at [2, 1] got 0.0, expected 5.0; 2 of 12 elements differ)"
    assert said(close, "x", square, other, 1e-3) == text
    text = "x: values differ (at [0, 0] got 0.0, expected 1.0; 2 of 12 elements differ)"
    assert said(same, "x", square.T, other.T) == text
    assert "got torch.float32 of (2,), expected torch.float64" in said(same, "x", one, one.double())
    assert "values differ" in said(same, "x", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert "must raise ValueError (it returned 1)" in said(raises, "x", ValueError, lambda: 1)
    assert "must name 'zz'" in said(raises, "x", ValueError, lambda: int("a"), "zz")
    same("NaN", [float("nan"), one * float("nan")], [float("nan"), one * float("nan")])


def test_hanging_check_fails_with_stack(monkeypatch) -> None:
    def sleeps(context: object) -> None:
        time.sleep(60)

    running = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's, which the kit would leave alone
    monkeypatch.setattr(sys.modules["torchhal_conformance._session"], "TIMEOUT_HERE", 0.2)
    try:
        with Session(ComponentUnderTest.of("accelerator", "cpu")) as session:
            result = session.run(Check("ACC-01", sleeps, timeout=0.1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, *running)
    assert result.outcome == "failed" and result.hung and "time.sleep(60)" in result.reason


# -- worker pools --------------------------------------------------------------------------------------------------


def ranks_sleep(last: int) -> int:
    rank = int(os.environ["RANK"])
    if rank == last:
        time.sleep(100)
    return rank


def ranks_fail() -> None:
    if os.environ["RANK"] == "1":
        raise CheckFailed("one and one is three")
    time.sleep(100)


def ranks_die() -> None:
    if os.environ["RANK"] == "1":
        print("rank 1 has had enough")
        sys.stdout.flush()
        ctypes.string_at(0)
    time.sleep(100)


def ranks_skip() -> None:
    raise MissingRequirement("no luck today")


def ranks_interrupt() -> str:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        return "interrupted"
    return "nothing"


@pytest.fixture
def pool():
    pool = WorkerPool(shared_server(), 3)
    yield pool
    pool.stop()


def test_slowness_scales_timeouts(pool: WorkerPool, monkeypatch) -> None:
    monkeypatch.setenv(SLOWNESS, "3")
    with pytest.raises(WorkerUnresponsive, match=r"rank 2 HANG after 1\.5 s"):
        pool.run(ranks_sleep, 2, timeout=0.5)
    for value in ("much", "0.5", "nan", "inf", ""):
        monkeypatch.setenv(SLOWNESS, value)
        with pytest.raises(ValueError, match=f"{SLOWNESS} must be a number of at least 1"):
            pool.run(ranks_sleep, -1)


def test_ranks_are_interrupted_behind_an_ampersand(pool: WorkerPool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what it doesn't wait for
    try:
        assert pool.run(ranks_interrupt) == ["interrupted"] * 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_unresponsive_rank_is_named_and_replaced(pool: WorkerPool, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["torchhal_conformance._worker_pool"], "GRACE", 2)
    monkeypatch.delenv(SLOWNESS, raising=False)
    assert pool.run(ranks_sleep, -1) == [0, 1, 2]
    before = list(pool._pids)
    with pytest.raises(WorkerUnresponsive, match=r"(?s)rank 2 HANG after 1 s.*ranks_sleep"):
        pool.run(ranks_sleep, 2, timeout=1)
    assert pool.run(ranks_sleep, -1) == [0, 1, 2]
    assert not set(before) & set(pool._pids)
    start = time.monotonic()
    with pytest.raises(
        WorkerUnresponsive, match=r"(?s)rank 1 of 3: one and one is three.*rank 0, rank 2 HANG, waiting"
    ):
        pool.run(ranks_fail)
    with pytest.raises(
        WorkerUnresponsive, match=r"(?s)rank 1 DIED.*rank 1 has had enough.*Segmentation fault.*ranks_die"
    ):
        pool.run(ranks_die)
    assert time.monotonic() - start < 50  # the others sleep for twice as long
    with pytest.raises(Skipped, match="environment: no luck today"):
        pool.run(ranks_skip)
    pids = list(pool._pids)
    pool.stop()
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"{pids} are left")


# -- pytest --------------------------------------------------------------------------------------------------


def test_suite_refuses_invalid_options() -> None:
    for options, words in (
        ({"expected_failures": {"ACC-77": "why"}}, "'ACC-77', which is no check"),
        ({"expected_failures": {"PRE-01": "why"}}, "'PRE-01', which is no check"),
        ({"expected_failures": {"ACC-18": "why"}, "level": "core"}, "no check of this suite"),
        ({"expected_failures": {"ACC-01": " "}}, "must say why ACC-01 fails"),
        ({"features": {"flying"}}, "'memory_stats'.*got 'flying'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            conformance_suite("accelerator", "cpu", **options)
    with pytest.raises(UnknownAliasError):
        conformance_suite("accelerator", "cqu")
    with pytest.raises(TypeError, match="by alias, Component or class"):
        conformance_suite("accelerator", Reference())
    with pytest.raises(TypeError, match="one str"):
        conformance_suite("accelerator", "cpu", features="threads")
    with pytest.raises(ConfigurationError, match="must be a subclass of"):
        conformance_suite("accelerator", int)


SUITES = """
import torch
from torchhal.accelerators import CPUAccelerator
from torchhal_conformance import conformance_suite
from torchhal_conformance._check import CheckFailed, check

class Mine(CPUAccelerator):
    name = "mine"
    def manual_seed(self, seed):
        pass

class Unready(CPUAccelerator):
    name = "unready"

@check("ACC-98", since="9.0")
def new(context):
    '''It is ready.

    Why: it is new.
    Fix: get it ready.'''
    if context.component.cls is Unready:
        raise CheckFailed("not yet")

TestNew = conformance_suite("accelerator", Unready, only={"ACC-98", "ACC-14"})
TestTold = conformance_suite("accelerator", Unready, only={"ACC-98"}, expected_failures={"ACC-98": "in May"})
TestReady = conformance_suite("accelerator", "torchhal/cpu", only={"ACC-98"})
TestQualified = conformance_suite("precision", "torchhal/32-true", accelerator="torchhal/cpu", level="core")
ONLY = dict(level="core")
TestGood = conformance_suite("accelerator", "cpu", **ONLY)
TestBroken = conformance_suite("accelerator", Mine, **ONLY)
TestKnown = conformance_suite("accelerator", Mine, **ONLY, expected_failures={"ACC-14": "seeds are not supported yet"})
TestMended = conformance_suite("accelerator", "cpu", **ONLY, expected_failures={"ACC-14": "no longer true"})
"""


@pytest.mark.slow
def test_suite_makes_one_item_per_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-k",
        "ACC-14 or ACC-20 or ACC-98 or PRE-01",
        str(tmp_path),
    ]
    environ = {**os.environ, "TORCHHAL_CONFORMANCE_REPORTS": str(tmp_path / "reports")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
    ids = {line.split(" - ")[0].strip() for line in done.stdout.splitlines()}
    assert "PASSED test_mine.py::TestGood::test[ACC-14]" in ids, done.stdout + done.stderr
    assert "FAILED test_mine.py::TestBroken::test[ACC-14]" in ids
    assert "PASSED test_mine.py::TestBroken::test[ACC-20]" in ids  # a class that only this file knows
    assert "XFAIL test_mine.py::TestKnown::test[ACC-14]" in ids
    assert "FAILED test_mine.py::TestMended::test[ACC-14]" in ids and "[XPASS(strict)]" in done.stdout
    assert "XFAIL test_mine.py::TestNew::test[ACC-98]" in ids and "PASSED test_mine.py::TestNew::test[ACC-14]" in ids
    assert "XFAIL test_mine.py::TestTold::test[ACC-98]" in ids and "PASSED test_mine.py::TestReady::test[ACC-98]" in ids
    one = CHECKS["ACC-14"]
    assert f"ACC-14: {one.contract}" in done.stdout and f"Fix: {one.fix}" in done.stdout
    assert "the first draw after the same seed: values differ" in done.stdout
    written = sorted(file.name for file in (tmp_path / "reports").iterdir())
    # one of a part, the last, by its own alias
    assert written == [
        "torchhal.accelerator.cpu.json",
        "torchhal.precision.32-true.cpu.json",
        "user.accelerator.mine.json",
    ]
    checks = json.loads((tmp_path / "reports" / written[2]).read_text())["checks"]
    assert checks[0]["reason"].startswith("expected: seeds are not supported yet\nthe first draw")


def test_component_found_by_any_name() -> None:
    for name in ("torchhal/slurm", "slurm", "SLURM"):
        component = ComponentUnderTest.of("cluster_environment", name)
        assert component.alias == "slurm" and component.looked_up_as == name and len(component.own_tables) == 4
    component = ComponentUnderTest.of("cluster_environment", "mpi")
    assert component.alias == "openmpi" and len(component.own_tables) == 4
    assert ComponentUnderTest.of("cluster_environment", "torchhal/local").own_launcher == ()


# -- the command and its report ------------------------------------------------------------------------------


def test_run_writes_all_report_formats(tmp_path: Path, capsys) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("report", "html", "junit", "badge")}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    chosen = ["--check", "ACC-01", "--check", "ACC-14", "--check", "ACC-22", "--check", "ACC-19"]
    assert main(["conformance", "run", "accelerator", "cpu", *chosen, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(files["report"].read_text())
    assert list(report) == [
        "schema", "kind", "alias", "plugin", "versions", "date", "contract", "device", "hardware", "features",
        "arguments", "seed", "levels", "checks", "verdict",
    ]  # fmt: skip
    assert report["schema"] == 1 and report["plugin"] == "torchhal"
    assert report["verdict"] == "partial"  # most checks of the core were not made
    assert {"kit", "torchhal", "torch", "python"} == set(report["versions"])
    assert report["levels"] == {
        "core": {"passed": 2, "failed": 0, "skipped": 1},
        "extended": {"passed": 0, "failed": 0, "skipped": 1},
    }
    assert [list(one) for one in report["checks"]] == [["id", "level", "outcome", "reason", "seconds"]] * 4
    suite = ElementTree.fromstring(files["junit"].read_text())
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("4", "2", "0")
    assert json.loads(files["badge"].read_text())["message"] == "partial"
    assert "accelerator cpu" in files["html"].read_text() and CHECKS["ACC-01"].contract in files["html"].read_text()


def test_report_marks_expected_failure() -> None:
    component = ComponentUnderTest.of("accelerator", "cpu")
    found = [made("failed", reason="off by 2"), made("skipped", reason="environment: no device")]
    checks = reports.build(component, found, {"ACC-01": "known since May"})["checks"]
    assert [one["reason"] for one in checks] == ["expected: known since May\noff by 2", "environment: no device"]
    assert reports.verdict(checks) == "failed"


def test_failed_run_shows_reasons(tmp_path: Path) -> None:
    component, found = results(Raising, level="core", family="ACC-0")
    report = reports.build(component, list(found.values()))
    assert "OSError: libvendor.so" in page(report) and html.escape(CHECKS["ACC-01"].fix) in page(report)
    suite = ElementTree.fromstring(reports.junit(report))
    assert int(suite.get("failures", 0)) >= 1 and suite.find(".//failure") is not None
    assert reports.badge(report)["color"] == "red"


def test_command_refuses_invalid_arguments(capsys) -> None:
    for arguments, words in (
        (("run", "accelerator", "cqu"), "did you mean 'cpu'?"),
        (("run", "accelerator", "cpu", "--features", "flying"), "'flying'"),
        (("run", "accelerator", "cpu", "--check", "PRE-01"), "'PRE-01'"),
        (("run", "accelerator", "cpu", "--check", ""), "(got '')"),
        (("run", "precision", "32-true", "--accelerator", "nope"), "no accelerator is called 'nope'"),
        (("run", "accelerator", "cpu", "--report", "/nowhere/x.json"), "/nowhere/x.json"),  # before the checks
    ):
        assert main(["conformance", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_list_prints_all_checks(capsys) -> None:
    assert main(["conformance", "list", "accelerator", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checks"]
    assert [one["id"] for one in listed] == [one.id for one in checks_for("accelerator")]
    assert all(one["contract"] and one["why"] and one["fix"] for one in listed)


@pytest.mark.cold_start
def test_cli_import_loads_no_kit() -> None:
    program = "import sys, torchhal.cli; print([m for m in sys.modules if m.startswith(('torchhal_conf', 'torch.'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_kit_imports_no_test_tool() -> None:
    for file in (Path(reports.__file__).parent).rglob("*.py"):
        tree = ast.parse(file.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.name for node in top for name in node.names} | {getattr(node, "module", "") for node in top}
        assert not names & {"pytest", "hypothesis"}, file
