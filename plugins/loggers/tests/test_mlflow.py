"""MLflowLogger and a real tracking server on sqlite: read back by REST, and in the server's pages."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import chromium
import pytest
import torch
from limits import scaled

from torchhal_loggers import MLflowLogger

pytest.importorskip("mlflow.server", reason="a tracking server comes with the whole of mlflow")

SCRIPT = Path(__file__).with_name("logged_fit.py")


class Server:
    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port),
            "--workers", "1",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + scaled(120)
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.1)

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def get(self, endpoint, **query):
        with urllib.request.urlopen(f"{self.url}/api/2.0/mlflow/{endpoint}?{urllib.parse.urlencode(query)}") as answer:
            return json.loads(answer.read())

    def run(self, run_id):
        return self.get("runs/get", run_id=run_id)["run"]

    def curve(self, run_id, metric):
        points = self.get("metrics/get-history", run_id=run_id, metric_key=metric)["metrics"]
        return [(point["step"], point["value"]) for point in sorted(points, key=lambda point: point["step"])]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow")).start()
    yield server
    server.kill()


def fit_script(options, folder, *arguments):
    command = [sys.executable, SCRIPT, json.dumps({"mlflow": options}), folder, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=scaled(150))


def run_id_of(folder, experiment, version=0):
    state = folder / experiment / f"version_{version}" / "mlflow" / "run.json"
    return json.loads(state.read_text())["run_id"]


def test_a_fit_in_two_processes_is_at_the_server(server, tmp_path):
    options = {"experiment_name": "two", "tracking_uri": server.url, "group": "ranks", "tags": {"team": "a"}}
    done = fit_script({**options, "log_model": True}, tmp_path, "strategy=ddp_spawn", "devices=2")
    assert done.returncode == 0, done.stderr
    run_id = run_id_of(tmp_path, "two")
    run = server.run(run_id)
    assert run["info"]["status"] == "FINISHED" and run["info"]["run_name"] == "version_0"
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert tags["group"] == "ranks" and tags["team"] == "a"
    loss = server.curve(run_id, "loss")
    assert [step for step, _ in loss] == list(range(1, 9)) and loss[0][1] > loss[-1][1] > 0
    files = server.get("artifacts/list", run_id=run_id, path="checkpoints")["files"]
    assert [file["path"] for file in files] == [tags["best_checkpoint"]]


def test_what_a_killed_run_has_logged_is_there_when_it_goes_on(server, tmp_path):
    options = {"experiment_name": "killed", "tracking_uri": server.url, "version": 3}
    assert fit_script(options, tmp_path, "kill_at=11").returncode == -9
    assert fit_script(options, tmp_path, "epochs=1").returncode == 0
    run_id = run_id_of(tmp_path, "killed", 3)
    assert server.run(run_id)["info"]["status"] == "FINISHED"
    steps = [step for step, _ in server.curve(run_id, "loss")]
    assert sorted(set(steps)) == list(range(1, 12)), "all of the first, whose steps 1 to 8 came again"


def test_a_server_that_is_lost_in_mid_run(tmp_path):
    server = Server(tmp_path).start()
    try:
        logger = MLflowLogger("lost", tracking_uri=server.url, save_dir=tmp_path, timeout=scaled(60))
        for step in range(10):
            logger.log_metrics({"loss": float(step)}, step)
        run_id = logger.run_id or (logger.experiment and logger.run_id)
        server.kill()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.monotonic()
            for step in range(10, 20):
                logger.log_metrics({"loss": float(step)}, step)
            assert time.monotonic() - start < 1.0
            end = time.monotonic() + scaled(60)
            while not caught:
                assert time.monotonic() < end
                logger.save()
                time.sleep(0.1)
            server.start()
            logger.log_metrics({"loss": 20.0}, 20)
            logger.finalize("success")
            end = time.monotonic() + scaled(60)
            while len(server.curve(run_id, "loss")) < 21:
                assert time.monotonic() < end
                time.sleep(0.2)
        assert len(caught) == 1 and "mlflow can't be reached" in str(caught[0].message)
        assert server.curve(run_id, "loss") == [(step, float(step)) for step in range(21)]
    finally:
        server.kill()


def test_hyperparameters_names_and_media(server, tmp_path):
    logger = MLflowLogger("odd", tracking_uri=server.url, save_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.log_hyperparams({"lr": 0.1, "net": {"depth": 3, "name": None}, "long": "x" * 9000})
        logger.log_hyperparams({"lr": 0.2, "more": True})
        logger.log_metrics({"a(b)": 1.0, "größe/x y:z": 2.0, "nan": float("nan"), "inf": float("inf")}, 5)
        logger.log_metrics({"a[b]": 3.0})
        logger.log_text("a note", "hello", 5)
        logger.log_image("samples/first", torch.rand(3, 8, 8), 5)
        logger.finalize("failed")
        logger.save()
    run = server.run(logger.run_id)
    params = {item["key"]: item["value"] for item in run["data"]["params"]}
    assert params["lr"] == "0.1" and params["net/depth"] == "3" and params["more"] == "True"
    assert len(params["long"]) == 6000 and run["info"]["status"] == "FAILED"
    metrics = {item["key"]: item for item in run["data"]["metrics"]}
    assert metrics["größe/x y:z"]["value"] == 2.0 and {"nan", "inf"} <= set(metrics)
    assert metrics["a_b_"]["step"] == 5, "one that has no step has that of the one before"
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 3 and "keeps the first value of a hyperparameter: lr stays '0.1'" in said[2], said
    assert "'a(b)' is 'a_b_' there" in said[0] and "has one name, 'a_b_', for 'a(b)' and 'a[b]'" in said[1], said
    images = server.get("artifacts/list", run_id=logger.run_id, path="images")["files"]
    texts = server.get("artifacts/list", run_id=logger.run_id, path="texts/a note")["files"]
    assert images and [file["path"] for file in texts] == ["texts/a note/5.txt"]


def test_the_programs_own_mlflow_is_left_alone(server, tmp_path):
    import mlflow

    mine = f"sqlite:///{tmp_path}/mine.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(mine)
    try:
        logger = MLflowLogger("other", tracking_uri=server.url, save_dir=tmp_path)
        logger.log_metrics({"loss": 1.0}, 0)
        logger.finalize("success")
        assert mlflow.get_tracking_uri() == mine and mlflow.active_run() is None
        assert MLflowLogger(save_dir=tmp_path)._uri == mine, "what was set is taken where nothing is given"
    finally:
        mlflow.set_tracking_uri(before)


def test_a_run_that_the_server_has_lost_begins_anew(server, tmp_path):
    logger = MLflowLogger("gone", tracking_uri=server.url, save_dir=tmp_path, version="v")
    logger.update_run_state(run_id="0" * 32)
    logger.log_metrics({"loss": 1.0}, 0)
    with pytest.warns(UserWarning, match="has no run '0000"):
        logger.finalize("success")
    assert server.curve(logger.run_id, "loss") == [(0, 1.0)]


def test_a_second_call_is_running_until_it_ends(server, tmp_path):
    logger = MLflowLogger("twice", tracking_uri=server.url, save_dir=tmp_path, timeout=scaled(60))
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    assert server.run(logger.run_id)["info"]["status"] == "FINISHED"
    logger.log_metrics({"loss": 0.5}, 1)
    end = time.monotonic() + scaled(30)
    while len(server.curve(logger.run_id, "loss")) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert server.run(logger.run_id)["info"]["status"] == "RUNNING"
    logger.finalize("interrupted")
    assert server.run(logger.run_id)["info"]["status"] == "KILLED"


def test_an_experiment_of_a_path(server, tmp_path):
    """As Databricks has them."""
    logger = MLflowLogger("/Users/me/../x", tracking_uri=server.url, save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    assert logger.name == "/Users/me/../x" and logger.log_dir == str(tmp_path / "Users" / "me" / "x" / "version_0")
    found = server.get("experiments/get-by-name", experiment_name="/Users/me/../x")["experiment"]
    assert server.run(logger.run_id)["info"]["experiment_id"] == found["experiment_id"]


@pytest.mark.parametrize(("given", "kept"), [
    ("sqlite:///mlflow.db", "sqlite:///{cwd}/mlflow.db"), ("sqlite:////data/x.db", "sqlite:////data/x.db"),
    ("mlruns", "{cwd}/mlruns"), ("file:mlruns", "file:{cwd}/mlruns"), ("http://a:1", "http://a:1"),
    ("databricks", "databricks"), ("postgresql://user:word@host/db", {"withheld": "MLFLOW_TRACKING_URI"}),
])  # fmt: skip
def test_what_is_kept_of_an_address(tmp_path, monkeypatch, given, kept):
    """For a process that begins elsewhere, and without a password."""
    monkeypatch.chdir(tmp_path)
    options = MLflowLogger(tracking_uri=given, save_dir=tmp_path).options()
    expected = kept if isinstance(kept, dict) else kept.format(cwd=tmp_path)
    assert options["tracking_uri"] == expected and "word" not in json.dumps(options)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to ``server.behind``, or answers as a proxy does that has lost what is behind it."""

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.has_lost:
            return self.reply(404, b"<html>default backend - 404</html>", "text/html")
        request = urllib.request.Request(self.server.behind + self.path, content or None, method=self.command)
        request.add_header("Content-Type", self.headers.get("Content-Type") or "application/json")
        try:
            with urllib.request.urlopen(request) as answer:
                self.reply(answer.status, answer.read(), answer.headers["Content-Type"])
        except urllib.error.HTTPError as error:
            self.reply(error.code, error.read(), error.headers["Content-Type"])

    do_POST = do_PATCH = do_PUT = do_GET

    def reply(self, status, content, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_a_proxy_that_has_lost_its_server_refuses_nothing(server, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.behind, proxy.has_lost = server.url, False
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        logger = MLflowLogger("proxy", tracking_uri=url, save_dir=tmp_path, timeout=scaled(60))
        logger.log_metrics({"loss": 0.0}, 0)
        logger.finalize("success")
        proxy.has_lost = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, 5):
                logger.log_metrics({"loss": float(step)}, step)
            end = time.monotonic() + scaled(30)
            while not caught:
                assert time.monotonic() < end
                logger.save()
                time.sleep(0.1)
            proxy.has_lost = False
            logger.finalize("success")
            while len(server.curve(logger.run_id, "loss")) < 5:
                assert time.monotonic() < end
                time.sleep(0.1)
        assert ["can't be reached" in str(warning.message) for warning in caught] == [True]
        proxy.shutdown()


def test_the_curve_is_on_the_servers_page(server, tmp_path):
    if chromium.find() is None:
        pytest.skip("no Chromium: make browser")
    logger = MLflowLogger("drawn", tracking_uri=server.url, save_dir=tmp_path)
    for step in range(5):
        logger.log_metrics({"loss": 0.5 - step / 16}, step)
    logger.finalize("success")
    run = server.run(logger.run_id)
    with chromium.page() as page:
        page.open(f"{server.url}/#/experiments/{run['info']['experiment_id']}/runs/{logger.run_id}")
        try:
            page.wait_for("document.body.innerText.includes('0.25')")
        finally:
            page.screenshot(tmp_path / "mlflow.png")
        text = page.evaluate("document.body.innerText")
        assert "version_0" in text and "loss" in text
