"""A logger for the service of ``ledger_server.py``, and that service as a process of a test."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from torchhal.vendor_package import VendorPackage
from torchhal_loggers import ServiceLogger


def wait_until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def log(logger, steps):
    for step in steps:
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)


SERVER = Path(__file__).with_name("ledger_server.py")


class LedgerLogger(ServiceLogger):
    service = "ledger"
    package = VendorPackage("torch", plugin="torchhal-ledger", install="pip install torch")
    interval_s = 0.05

    def __init__(self, url, *, run_id=None, save_dir=".", version=None, **options):
        super().__init__(save_dir, "experiment", version, **options)
        self.url, self.asked_id = url, run_id

    def connect(self):
        known = self.asked_id or self.run_state().get("run_id")
        answer = self.post({"run": known} if known else {"begin": self.run_name})
        self.update_run_state(run_id=answer["run"])
        return answer["run"]

    def send(self, experiment, records):
        self.post({"run": experiment, "records": list(records)})

    def end(self, experiment, status):
        self.post({"run": experiment, "status": status})

    def is_refusal(self, error):
        return isinstance(error, urllib.error.HTTPError) and error.code == 400

    def post(self, content):
        request = urllib.request.Request(self.url, json.dumps(content).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def options(self):
        return {"url": self.url}


class MemoryLogger(LedgerLogger):
    """A library that keeps what it is given until the run ends; ``lose`` makes it forget, as when it is lost."""

    service = "memory"
    writes_at_end = True
    lose = False

    def connect(self):
        self.kept = []
        return super().connect(), object()

    def send(self, experiment, records):
        if self.lose:
            self.lose = False
            self.disconnect()
            raise ConnectionError("lost")
        self.kept.extend(records)

    def end(self, experiment, status):
        self.post({"run": experiment[0], "records": self.kept})
        self.post({"run": experiment[0], "status": status})
        self.disconnect()


class Ledger:
    """The service in a process of its own, which is started, killed and asked what it has."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self, mode="ok"):
        self.behave(mode)
        self.process = subprocess.Popen([sys.executable, SERVER, str(self.port), str(self.folder)])
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.02)

    def behave(self, mode):
        (self.folder / "mode").write_text(mode)

    def kill(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def received(self):
        path = self.folder / "rows.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def records(self, kind="metrics"):
        return [record for message in self.received() for record in message.get("records", ()) if kind in record]

    def steps(self):
        return [record["step"] for record in self.records()]

    def runs(self):
        return {message["run"] for message in self.received() if "records" in message}

    def statuses(self):
        return [message["status"] for message in self.received() if "status" in message]
