"""A ServiceLogger in odd processes, with libraries and records that fail, and folders that were moved."""

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from ledger import Ledger, LedgerLogger, MemoryLogger, log, wait_until

from torchhal_loggers import ServiceError
from torchhal_loggers._sync_command import load

TESTS = Path(__file__).parent


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger").start()
    yield ledger
    ledger.kill()


def script(text):
    environ = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        [sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=100, env=environ
    )


def sync_logs(*folders):
    return script(f"from torchhal.__main__ import main; raise SystemExit(main({['sync-logs', *map(str, folders)]!r}))")


def in_child(function):
    child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return child


# -- processes and threads -------------------------------------------------------------------------------------


def test_a_process_forked_while_records_are_sent_keeps_none_from_being_sent(ledger, tmp_path):
    """A DataLoader's worker lives on, with all descriptors of its parent, of which one is a lock."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(LedgerLogger):
        def send(self, experiment, records):
            begun.set()
            go_on.wait(20)
            super().send(experiment, records)

    logger = Slow(ledger.url, save_dir=tmp_path)
    log(logger, [0])
    assert begun.wait(20)
    worker = in_child(lambda: time.sleep(60))
    try:
        go_on.set()
        log(logger, [1])
        start = time.monotonic()
        logger.finalize("success")
        assert ledger.steps() == [0, 1] and time.monotonic() - start < 20
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)


def test_a_killed_sender_whose_worker_lives_on_holds_no_lock(ledger, tmp_path):
    done = script(f"""
import os, time, threading
from ledger import LedgerLogger
begun = threading.Event()
class Slow(LedgerLogger):
    def send(self, experiment, records):
        begun.set()
        time.sleep(60)
logger = Slow({ledger.url!r}, save_dir={str(tmp_path)!r}, version=0)
logger.log_metrics({{"loss": 1.0}}, 0)
begun.wait()
worker = os.fork()
if not worker:
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
os.kill(os.getpid(), 9)
""")
    worker = int(done.stdout)
    try:
        again = LedgerLogger(ledger.url, save_dir=tmp_path, version=0)
        log(again, [1])
        again.finalize("success")
        assert ledger.steps() == [0, 1]
    finally:
        os.kill(worker, 9)


def test_a_process_forked_while_the_logger_connects_connects_by_itself(ledger, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(LedgerLogger):
        def connect(self):
            begun.set()
            go_on.wait(20)
            return super().connect()

    logger = Slow(ledger.url, save_dir=tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    assert begun.wait(20)
    go_on_in_child = in_child(lambda: (go_on.set(), logger.experiment))
    wait_until(lambda: os.waitpid(go_on_in_child, os.WNOHANG) == (go_on_in_child, 0))
    go_on.set()
    logger.finalize("success")


def test_a_thread_that_cannot_be_started_stops_no_training(ledger, tmp_path, monkeypatch):
    real, calls = threading.Thread.start, []

    def start(self):
        calls.append(self)
        if len(calls) < 3:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    with pytest.warns(UserWarning, match="can't be reached .can't start new thread"):
        log(logger, range(4))
        logger.finalize("success")
    assert ledger.steps() == [0, 1, 2, 3]


def test_a_library_that_exits_ends_no_thread(ledger, tmp_path):
    class Exits(LedgerLogger):
        calls = 0

        def connect(self):
            self.calls += 1
            if self.calls == 1:
                sys.exit(1)
            return super().connect()

    logger = Exits(ledger.url, save_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log(logger, [0])
        wait_until(lambda: ledger.steps() == [0])


def test_loggers_that_have_ended_leave_no_file_open(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("torchhal_loggers._sender._IDLE_S", 0.05)

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    loggers = []
    for step in range(20):
        loggers.append(LedgerLogger(ledger.url, save_dir=tmp_path))
        log(loggers[-1], [step])
        loggers[-1].finalize("success")
    wait_until(lambda: descriptors() <= before + 1)
    assert ledger.steps() == list(range(20))


def test_a_sweep_without_its_service_keeps_no_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("torchhal_loggers._sender._LONGEST_PAUSE_S", 0.5)
    threads = threading.active_count()
    loggers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5):
            loggers.append(LedgerLogger("http://127.0.0.1:9", save_dir=tmp_path, timeout=0.1))
            log(loggers[-1], [step])
            loggers[-1].finalize("success")
        wait_until(lambda: threading.active_count() <= threads)


# -- libraries that write when a run ends ----------------------------------------------------------------------


def test_what_a_lost_connection_had_in_memory_is_sent_again(ledger, tmp_path):
    logger = MemoryLogger(ledger.url, save_dir=tmp_path)
    log(logger, range(5))
    wait_until(lambda: getattr(logger, "kept", None))
    logger.lose = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log(logger, range(5, 10))
        wait_until(lambda: not logger.lose)
        logger.finalize("success")
        wait_until(ledger.statuses)
    assert ledger.steps() == list(range(10))


def test_a_logger_that_is_idle_keeps_what_its_library_has_in_memory(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("torchhal_loggers._sender._IDLE_S", 0.05)
    done = script(f"""
import time
import torchhal_loggers._sender
from ledger import MemoryLogger
torchhal_loggers._sender._IDLE_S = 0.05
def use():
    logger = MemoryLogger({ledger.url!r}, save_dir={str(tmp_path)!r})
    logger.log_metrics({{"loss": 1.0}}, 0)
use()
time.sleep(1)
""")
    assert done.returncode == 0 and ledger.steps() == [0] and ledger.statuses() == ["success"], done.stderr


def test_a_killed_run_of_such_a_library_is_sent_whole(ledger, tmp_path):
    done = script(f"""
import os
from ledger import MemoryLogger
logger = MemoryLogger({ledger.url!r}, save_dir={str(tmp_path)!r}, version=0)
for step in range(10):
    logger.log_metrics({{"loss": 1.0}}, step)
while not getattr(logger, "kept", None): pass
os.kill(os.getpid(), 9)
""")
    assert done.returncode == -9 and ledger.steps() == []
    assert sync_logs(tmp_path / "experiment").returncode == 0
    assert ledger.steps() == list(range(10)) and ledger.statuses() == ["interrupted"]


# -- records that fail -----------------------------------------------------------------------------------------


def test_a_picture_that_is_gone_costs_no_other_record(ledger, tmp_path):
    class Reads(LedgerLogger):
        def send(self, experiment, records):
            for record in records:
                for path in record.get("image", {}).values():
                    Path(path).read_bytes()
            super().send(experiment, records)

    Reads.interval_s = 0.5
    logger = Reads(ledger.url, save_dir=tmp_path)
    log(logger, [0])
    logger.log_image("lost", torch.zeros(4, 4), 1)
    shutil.rmtree(logger.service_dir / "images")
    log(logger, [2])
    with pytest.warns(UserWarning, match="has refused image"):
        logger.finalize("success")
    assert ledger.steps() == [0, 2] and ledger.statuses() == ["success"]


def test_a_record_that_its_library_cannot_take_costs_no_other(ledger, tmp_path, monkeypatch):
    """It is passed over only when it has failed three times, and another one goes through."""
    monkeypatch.setattr("torchhal_loggers._sender._LONGEST_PAUSE_S", 0.2)

    class Fails(LedgerLogger):
        tries = 0

        def send(self, experiment, records):
            if any("poison" in record.get("metrics", {}) for record in records):
                self.tries += 1
                raise ValueError("Expecting value: line 1 column 1")
            super().send(experiment, records)

    logger = Fails(ledger.url, save_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log(logger, [0])
        logger.log_metrics({"poison": 1.0}, 1)
        wait_until(lambda: logger.tries >= 5)
        assert ledger.steps() in ([], [0]), "alone it may be the service that fails"
        log(logger, [2])
        wait_until(lambda: 2 in ledger.steps())
        logger.finalize("success")
    assert sorted(set(ledger.steps())) == [0, 2]
    assert any("has refused metrics {'poison': 1.0}" in str(warning.message) for warning in caught)


def test_a_proxy_that_answers_nonsense_for_a_while_costs_nothing(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("torchhal_loggers._sender._LONGEST_PAUSE_S", 0.1)

    class Proxy(LedgerLogger):
        left = 10

        def send(self, experiment, records):
            if self.left:
                self.left -= 1
                raise ValueError("Expecting value: line 1 column 1")
            super().send(experiment, records)

    logger = Proxy(ledger.url, save_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log(logger, range(5))
        wait_until(lambda: not logger.left)
        logger.finalize("success")
        wait_until(ledger.statuses)
    assert sorted(ledger.steps()) == list(range(5))


def test_one_refused_number_of_a_row_costs_no_other(ledger, tmp_path):
    ledger.behave("devil")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0, "devil": 2.0, "accuracy": 3.0}, 0)
    with pytest.warns(UserWarning, match="has refused metrics {'devil': 2.0}"):
        logger.finalize("success")
    got = {name: value for record in ledger.records() for name, value in record["metrics"].items()}
    assert got == {"loss": 1.0, "accuracy": 3.0}


def test_numbers_of_numpy_and_torch(ledger, tmp_path):
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    given = {"lr": np.float64(0.5), "n": np.int64(3), "yes": np.bool_(True), "t": torch.tensor(2), "path": Path("a")}
    logger.log_hyperparams(given)
    logger.log_metrics({"loss": torch.tensor(0.25)}, torch.tensor(4))
    logger.finalize("success")
    assert ledger.records("params")[0]["params"] == {"lr": 0.5, "n": 3, "yes": True, "t": 2, "path": "a"}
    assert ledger.steps() == [4]


# -- how a run ends --------------------------------------------------------------------------------------------


@pytest.mark.cold_start  # a real end of an interpreter
@pytest.mark.parametrize(("end", "statuses"), [
    ("", ["success"]),
    ("raise ValueError('no')", ["failed"]),
    ("logger.finalize('failed'); logger.log_metrics({'last': 1.0})", ["failed", "failed"]),
    ("logger.finalize('success'); logger.finalize('success')", ["success"]),
])  # fmt: skip
def test_statuses_of_programs(ledger, tmp_path, end, statuses):
    done = script(f"""
from ledger import LedgerLogger
logger = LedgerLogger({ledger.url!r}, save_dir={str(tmp_path)!r})
logger.log_metrics({{"loss": 1.0}}, 0)
{end}
""")
    assert ledger.statuses() == statuses, done.stderr


def test_a_killed_run_is_sent_without_an_end(ledger, tmp_path):
    ledger.kill()
    done = script(f"""
import os
from ledger import LedgerLogger
logger = LedgerLogger({ledger.url!r}, save_dir={str(tmp_path)!r}, version=0)
logger.log_metrics({{"loss": 1.0}}, 0)
os.kill(os.getpid(), 9)
""")
    assert done.returncode == -9
    ledger.start()
    assert sync_logs(tmp_path / "experiment" / "version_0").returncode == 0
    assert ledger.steps() == [0] and ledger.statuses() == [], "it may be going on elsewhere"


def test_the_end_of_a_run_is_sent_later_too(ledger, tmp_path):
    ledger.kill()
    script(f"""
from ledger import LedgerLogger
logger = LedgerLogger({ledger.url!r}, save_dir={str(tmp_path)!r}, version=0, timeout=0.1)
logger.log_metrics({{"loss": 1.0}}, 0)
logger.finalize("failed")
""")
    ledger.start()
    assert sync_logs(tmp_path / "experiment" / "version_0").returncode == 0
    assert ledger.statuses() == ["failed"]


# -- folders ---------------------------------------------------------------------------------------------------


def test_logs_of_a_folder_that_was_moved(ledger, tmp_path):
    ledger.kill()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, version="v", timeout=0.1)
    with pytest.warns(UserWarning, match="1 record waits|2 records wait"):
        log(logger, [0])
        logger.log_image("picture", torch.zeros(4, 4), 0)
        logger.finalize("success")
    shutil.move(tmp_path / "experiment" / "v", tmp_path / "elsewhere")
    wait_until(lambda: logger._sender.failure is not None)
    ledger.start()
    done = sync_logs(tmp_path / "elsewhere")
    assert done.returncode == 0 and "everything is sent" in done.stdout, done.stderr
    assert ledger.steps() == [0] and Path(ledger.records("image")[0]["image"]["picture"]).exists()
    assert ledger.received()[0]["begin"] == "v", "the run's name is that of its first folder"


def test_sync_logs_names_a_secret_that_it_needs(tmp_path, monkeypatch):
    folder = tmp_path / "version_0" / "ledger"
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text('{"metrics": {"loss": 1.0}, "step": 0, "time": 1.0}\n')
    (folder / "run.json").write_text(
        '{"logger": "ledger:LedgerLogger", "options": {"url": {"withheld": "LEDGER_URL"}}}'
    )
    monkeypatch.delenv("LEDGER_URL", raising=False)
    done = sync_logs(folder)
    assert done.returncode == 1 and "set LEDGER_URL" in done.stderr and "'url'" in done.stderr
    monkeypatch.setenv("LEDGER_URL", "http://127.0.0.1:9")
    assert load(folder).url == "http://127.0.0.1:9"


def test_two_jobs_have_a_version_each(ledger, tmp_path):
    one, two = LedgerLogger(ledger.url, save_dir=tmp_path), LedgerLogger(ledger.url, save_dir=tmp_path)
    log(one, [0])
    log(two, [1])
    assert one.version == 0 and two.version == 1
    one.finalize("success"), two.finalize("success")


# -- the library's object --------------------------------------------------------------------------------------


def test_the_experiment_of_a_service_that_is_away_takes_every_call(tmp_path):
    logger = LedgerLogger("http://127.0.0.1:9", save_dir=tmp_path)
    with pytest.warns(UserWarning, match="ledger can't be reached") as caught:
        for _ in range(3):
            logger.experiment.log({"loss": 1.0})
    assert len(caught) == 1
    with pytest.raises(ServiceError, match="can't be reached"):
        _ = LedgerLogger("http://127.0.0.1:9", save_dir=tmp_path, on_error="raise").experiment


def test_a_logger_that_raises_has_sent_what_it_could(ledger, tmp_path):
    ledger.behave("devil")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, on_error="raise")
    logger.log_metrics({"devil": 1.0}, 0)
    with pytest.raises(ServiceError, match="has refused"):
        wait_until(lambda: logger.log_metrics({"loss": 1.0}, 1))
    with pytest.raises(ServiceError, match="has refused"):
        logger.finalize("success")
    assert set(ledger.steps()) == {1} and ledger.statuses() == ["success"]
