"""Test what the command says of components that end, crash, block or interrupt the process of their checks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from torchhal.cli import main
from torchhal.errors import ConfigurationError
from torchhal_conformance import CHECKS, ComponentUnderTest, Session
from torchhal_conformance import _report as reports
from torchhal_conformance import _supervised_process as supervised
from torchhal_conformance._checking_process import _results
from torchhal_conformance._report_validation import problem
from torchhal_conformance._session import TIMEOUT_HERE, Result
from torchhal_conformance._supervised_process import Request, run_supervised

HEAD = """
import os, signal, threading, time
from torchhal.checkpoint import TorchCheckpointIO


class IO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, **options):
"""
WITHOUT_SIGALRM = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)"
"""A hang that the process itself can't see, as one in C code."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a module with a checkpoint IO and returns its name for the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    number = iter(range(9))

    def write(body: str, head: str = HEAD) -> str:
        name = f"in_work_{next(number)}"
        Path(f"{name}.py").write_text(head + textwrap.indent(body, " " * 8) + "\n")
        return f"{name}:IO"

    return write


def run(target: str, *ids: str, kind: str = "checkpoint_io") -> tuple[int, dict[str, dict]]:
    code = main(["conformance", "run", kind, target, *(w for id in ids for w in ("--check", id)), "--report", "r.json"])
    if not Path("r.json").exists():
        return code, {}
    return code, {one["id"]: one for one in json.loads(Path("r.json").read_text())["checks"]}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("torchhal-*"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os._exit(0)", r"os._exit\(0\) was called"),
        ("try: os._exit(0)\nexcept BaseException: pass", r"os._exit\(0\) was called"),
        ("threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(5)", "DIED: .* exit code 0 amid the check"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "DIED: the process ended by SIGKILL amid the check"),
        ("__import__('ctypes').CDLL(None)._exit(0)", "DIED: the process ended with exit code 0 amid the check"),
        ("if os.fork() == 0: raise KeyError('child')\nos.wait(); raise OSError('parent')", "OSError: parent"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_an_end_of_the_process_fails_the_check(body: str, words: str, written, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code, rows = run(written(body), "CIO-01", "GEN-07")
    assert code == 1
    assert [rows[id]["outcome"] for id in ("CIO-01", "GEN-07")] == ["failed", "passed"]  # others are made all the same
    assert re.search(words, rows["CIO-01"]["reason"])
    shown = capsys.readouterr().out
    assert "CIO-01 failed" in shown and "is failed" in shown
    assert left(tmp_path) == []


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise KeyboardInterrupt", "raise SystemExit(0)"])
def test_an_end_at_the_import_is_never_zero(end: str, written, capfd) -> None:
    code, rows = run(written("pass", f"{end}\n{HEAD}"), "CIO-01")
    told = capfd.readouterr().err
    assert code in (1, 2) and not rows
    assert "error: " in told and ("amid the import of" in told or "can't be " in told)


INIT = """
import ctypes, os, time
from torchhal.checkpoint import TorchCheckpointIO
made = 0


class IO(TorchCheckpointIO):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
"""


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(0)", r"os\._exit\(0\) was called"),
        ("ctypes.CDLL(None)._exit(0)", "DIED: .* exit code 0 amid the check"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        (WITHOUT_SIGALRM.replace("signal.", "__import__('signal')."), "HANG: "),
    ],
)
def test_a_component_that_ends_or_blocks_the_process_as_it_is_made_fails(
    end: str, words: str, written, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(supervised, "_GRACE", 6.0 - TIMEOUT_HERE)
    monkeypatch.setattr(supervised, "_IMPORT_TIMEOUT", 12.0)
    target = written(end, INIT)
    code, rows = run(target, "CIO-01", "CIO-10")
    assert code == 1 and [row["outcome"] for row in rows.values()] == ["failed", "failed"]
    assert re.search(words, rows["CIO-01"]["reason"])
    told = capfd.readouterr()
    assert f"the making of an instance of checkpoint_io {target!r}" in told.err and ",;" not in told.err
    assert "is failed" in told.out


def test_an_end_after_the_checks_fails_the_last_one(written, capfd) -> None:
    """The report has the features of an instance, which is made when all checks have passed."""
    while_reporting = f"any(each.name == '{reports.build.__name__}' for each in traceback.extract_stack())"
    target = written(f"import traceback\nif {while_reporting}: ctypes.CDLL(None)._exit(0)", INIT)
    seen: list[str] = []
    request = Request("checkpoint_io", target, check=["CIO-02", "CIO-04"], report="r.json")
    assert run_supervised(request, show=seen.append) == 1
    outcomes = {one["id"]: one["outcome"] for one in json.loads(Path("r.json").read_text())["checks"]}
    assert outcomes == {"CIO-02": "passed", "CIO-04": "failed"} and seen[-1].endswith("is failed")


def test_a_factory_that_ends_the_process_is_never_zero(written, capfd) -> None:
    Path("factories.py").write_text("import os\ndef net(): os._exit(0)\n")
    assert main(["conformance", "run", "strategy", "ddp", "--model", "factories:net", "--check", "STR-14"]) == 1
    assert "DIED: the process ended with exit code 0 amid the import of strategy 'ddp'" in capfd.readouterr().err


def test_a_hang_in_c_code_is_seen_from_outside(written, monkeypatch) -> None:
    monkeypatch.setattr(supervised, "_GRACE", 10.0 - TIMEOUT_HERE)
    code, rows = run(written(WITHOUT_SIGALRM), "CIO-01", "GEN-07")
    assert code == 1
    assert rows["CIO-01"]["reason"].startswith("HANG: ") and "save_checkpoint" in rows["CIO-01"]["reason"]
    assert rows["GEN-07"]["outcome"] == "passed"


def test_a_hang_of_the_import_is_an_error(written, monkeypatch, capfd) -> None:
    monkeypatch.setattr(supervised, "_IMPORT_TIMEOUT", 8.0)
    code, rows = run(written("pass", f"import time; time.sleep(600)\n{HEAD}"), "CIO-01")
    told = capfd.readouterr().err
    assert (code, rows) == (1, {})
    assert "HANG: the import of" in told and "in_work_0.py" in told


def test_results_are_shown_as_they_come(written) -> None:
    seen: list[tuple[float, str]] = []
    request = Request("checkpoint_io", written("time.sleep(1); super().save_checkpoint(checkpoint, path, **options)"))
    assert run_supervised(
        replace(request, check=["CIO-01", "CIO-02"]), show=lambda line: seen.append((time.monotonic(), line))
    ) in (0, 1)
    first, second = (next(at for at, line in seen if line.startswith(id)) for id in ("CIO-01", "CIO-02"))
    assert second - first > 0.5


def test_after_five_hangs_the_rest_is_not_made() -> None:
    ids = ["CIO-01", "CIO-02", "CIO-03", "CIO-04", "CIO-05", "CIO-06", "GEN-07"]
    made = [{"check": id, "outcome": "failed", "reason": "HANG: it", "hung": True} for id in ids[:4]]
    component, sent = ComponentUnderTest.of("checkpoint_io", "torch"), []

    def made_of(*more: dict) -> list[Result]:
        chosen = [CHECKS[id] for id in ids]
        return _results(component, chosen, [*made, *more], lambda **event: sent.append(event), quiet=True)

    assert [result.outcome for result in made_of()[4:]] == ["passed"] * 3
    follows = made_of({"check": "CIO-05", "outcome": "failed", "reason": "rank 1 HANG, waiting for a rank that failed"})
    assert follows[-1].outcome == "passed"
    found = made_of({"check": "CIO-05", "outcome": "failed", "reason": "rank 1 HANG", "hung": True})
    assert [result.outcome for result in found[5:]] == ["skipped"] * 2
    assert found[-1].reason.startswith("not made: 5 checks before it hung (CIO-01, ")
    report = reports.build(component, found)
    assert report["verdict"] == "failed" and problem(report) == ""
    rows = [{**row, "level": "provisional" if row["outcome"] == "failed" else "core"} for row in report["checks"]]
    assert reports.verdict(rows) == "partial"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_checks_and_leaves_nothing(number: signal.Signals, written, tmp_path) -> None:
    target = written("open('begun', 'w').close(); time.sleep(600)")
    folder = tmp_path / "temporary"
    folder.mkdir()
    # CI ignores SIGINT, and a process that it starts would
    code = "import signal; signal.signal(2, signal.default_int_handler); from torchhal.cli import main; exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "conformance", "run", "checkpoint_io", target, "--check", "CIO-01"],
        env={**os.environ, "TMPDIR": str(folder)},
    )
    deadline = time.monotonic() + 60
    while not Path("begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left(folder)
    process.send_signal(number)
    code = process.wait(30)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    while (left(folder) or checking(target)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left(folder) == [] and checking(target) == []


def checking(target: str) -> list[str]:
    """Return the processes that check ``target`` still."""
    found = subprocess.run(["pgrep", "-f", "_checking_process"], capture_output=True, text=True, check=False).stdout
    mine = []
    for pid in found.split():
        try:
            folder = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        mine += [pid] if folder == os.getcwd() else []
    return mine


def test_what_cannot_be_is_an_error_of_the_command(written) -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint io is called 'nothing'"):
        run_supervised(Request("checkpoint_io", "nothing"))
    with pytest.raises(ConfigurationError, match="must be MODULE:CLASS"):
        run_supervised(Request("checkpoint_io", "nothing:IO"))


def test_pytest_is_not_ended_by_a_component(written, monkeypatch) -> None:
    target = written("os._exit(0)")
    monkeypatch.syspath_prepend(os.getcwd())
    module = __import__(target.partition(":")[0])
    with Session(ComponentUnderTest.of("checkpoint_io", module.IO)) as session:
        result = session.run(CHECKS["CIO-01"])
    assert result.outcome == "failed" and "os._exit(0) was called" in result.reason


def test_a_command_without_stderr_works(written) -> None:
    target = written("super().save_checkpoint(checkpoint, path, **options)")
    command = f"{sys.executable} -m torchhal.cli conformance run checkpoint_io {target} --check CIO-01 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0 and "CIO-01 passed" in done.stdout
