"""wandb, comet, swanlab and trackio without a network: what is in the files that each keeps, by its own format."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from limits import scaled

from torchhal.errors import ConfigurationError

SCRIPT = Path(__file__).with_name("logged_fit.py")


def history_of_wandb(folder):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    from torchhal_loggers._wandb_file import Records

    rows, ids = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.parent.name.rsplit("-", 1)[1])
        for content in Records(path).read():
            record = messages.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return ids, [(row["trainer/global_step"], row["loss"]) for row in rows if "loss" in row]


def history_of_comet(folder):
    ids, points = set(), []
    for path in sorted(folder.rglob("*.zip"), key=os.path.getmtime):
        with zipfile.ZipFile(path) as archive:
            ids.add(json.loads(archive.read("experiment.json"))["offline_id"])
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                metric = message["payload"].get("metric") if message["type"] == "metric_msg" else None
                if metric and metric["metricName"] == "loss":
                    points.append((metric["step"], float(metric["metricValue"])))
    return ids, points


def history_of_swanlab(folder):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    ids, points = set(), []
    for path in sorted(folder.rglob("*.swanlab"), key=os.path.getmtime):
        ids.add(path.stem.removeprefix("run-"))
        if not path.stat().st_size:  # the process was killed before SwanLab had written what it has in memory
            continue
        reader = DataStoreReader()
        reader.open(str(path))
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "scalar" and record.scalar.key == "loss":
                points.append((record.scalar.step, record.scalar.value.number))
        reader.close()
    return ids, points


def history_of_trackio(folder):
    with sqlite3.connect(folder / "trackio" / "torchhal_logs.db") as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    points = [(step, json.loads(metrics)) for _, step, metrics in rows]
    return {name for name, _, _ in rows}, [(step, row["loss"]) for step, row in points if "loss" in row]


SERVICES = {
    "wandb": ({"mode": "offline"}, history_of_wandb),
    "comet": ({"online": False}, history_of_comet),
    "swanlab": ({"mode": "offline"}, history_of_swanlab),
    "trackio": ({}, history_of_trackio),
}
PACKAGES = {"comet": "comet_ml"}


@pytest.fixture(params=SERVICES)
def service(request):
    pytest.importorskip(PACKAGES.get(request.param, request.param))
    return request.param


@pytest.fixture
def fit(service, tmp_path):
    def fit(*arguments, **options):
        given = json.dumps({service: {**SERVICES[service][0], **options}})
        environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, SCRIPT, given, tmp_path, *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=scaled(150), env=environ)

    return fit


@pytest.fixture
def history(service, tmp_path):
    return lambda: SERVICES[service][1](tmp_path)


@pytest.mark.parametrize(
    "start", [(), ("strategy=ddp_spawn", "devices=2"), ("strategy=ddp_fork", "devices=2")], ids=str
)
def test_a_fit_is_in_its_files(fit, history, start):
    done = fit(*start)
    assert done.returncode == 0 and "0 warnings" in done.stdout, done.stderr
    ids, points = history()
    assert len(ids) == 1 and [step for step, _ in points] == list(range(1, len(points) + 1))
    assert len(points) == (8 if start else 16) and points[0][1] > points[-1][1] > 0


def test_a_killed_fit_goes_on_in_its_run(service, fit, history):
    killed = fit("kill_at=11", version=5)
    assert killed.returncode == -9
    done = fit("epochs=1", version=5)
    assert done.returncode == 0, done.stderr
    ids, points = history()
    steps = [step for step, _ in points]
    assert len(ids) == 1 and set(steps) == set(range(1, 12)), "every step of the first"
    if service != "swanlab":  # which keeps the first value of a step
        assert steps[-8:] == list(range(1, 9)), "and then the second"


@pytest.mark.parametrize(("name", "says"), [
    ("wandb", "run 'wandb login', set WANDB_API_KEY, or write mode='offline'"),
    ("comet", "run 'comet login', set COMET_API_KEY, or write online=False"),
    ("swanlab", "run 'swanlab login', set SWANLAB_API_KEY, or write mode='offline'"),
])  # fmt: skip
def test_no_credentials_are_an_error_before_anything_starts(tmp_path, monkeypatch, name, says):
    pytest.importorskip(PACKAGES.get(name, name))
    from torchhal import Trainer

    for variable in ("WANDB_API_KEY", "COMET_API_KEY", "SWANLAB_API_KEY", "WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigurationError, match=says):
        Trainer(logger=name, accelerator="cpu", devices=1)


def classes():
    from torchhal_loggers import CometLogger, SwanLabLogger, TrackioLogger, WandbLogger

    return {"comet": CometLogger, "swanlab": SwanLabLogger, "trackio": TrackioLogger, "wandb": WandbLogger}


@pytest.fixture
def make(service, tmp_path):
    """Make a logger of the service in this process."""

    def make(project="project", **options):
        given = {"timeout": scaled(60), **SERVICES[service][0], **options}
        return classes()[service](project, save_dir=tmp_path, **given)

    return make


def test_media_and_hyperparameters_are_taken(service, make, tmp_path, recwarn):
    logger = make()
    logger.log_hyperparams({"lr": 0.1, "net": {"depth": 3}, "object": object()})
    logger.log_text("note", "hello", 1)
    logger.log_image("picture", torch.rand(3, 8, 8), 1)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert (logger.service_dir / "records.jsonl").stat().st_size == int((logger.service_dir / "sent").read_text())
    assert not [warning for warning in recwarn if str(warning.message).startswith(service)]
    if service in {"wandb", "swanlab"}:  # the other ones put it into a zip file or a database's folder
        sent = [path for path in tmp_path.rglob("*.png") if path.parent != logger.service_dir / "images"]
        assert sent, "its own copy of the picture"


def test_two_loggers_in_turn_have_a_run_each(service, make, tmp_path):
    """SwanLab and Comet have one run per process."""
    pytest.importorskip("google.protobuf")
    first, second = make("first"), make("second")
    for step in range(3):
        first.log_metrics({"loss": float(step)}, step)
    first.finalize("success")
    second.log_metrics({"loss": 10.0}, 10)
    second.finalize("success")
    first.log_metrics({"loss": 3.0}, 3)
    first.finalize("success")
    assert all(
        (logger.service_dir / "records.jsonl").stat().st_size == int((logger.service_dir / "sent").read_text())
        for logger in (first, second)
    )
    if service in {"comet", "swanlab"}:  # these write below the run's folder
        read = SERVICES[service][1]
        assert [step for step, _ in read(first.service_dir)[1]] == [0, 1, 2, 3]
        assert [step for step, _ in read(second.service_dir)[1]] == [10]


def test_a_sweep_leaves_no_run_open(tmp_path):
    pytest.importorskip("wandb")
    import wandb

    from torchhal_loggers import WandbLogger

    runs = []
    for step in range(4):
        logger = WandbLogger(save_dir=tmp_path, mode="offline", timeout=scaled(60))
        logger.log_metrics({"loss": 1.0}, step)
        logger.finalize("success")
        runs.append(logger.experiment)
        assert wandb.run is runs[-1]
    assert len({run.id for run in runs}) == 4
    assert all(run._is_finished for run in runs[:-1]), "each ends where the next begins"
    runs[-1].finish()


def test_late_hyperparameters(make, service):
    if service != "trackio":
        pytest.skip("trackio alone sends a run's config with its first row only")
    from trackio.sqlite_storage import SQLiteStorage

    logger = make("late")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    logger.log_hyperparams({"lr": 0.2, "more": 1})
    logger.finalize("success")
    with sqlite3.connect(SQLiteStorage.get_project_db_path("late")) as connection:
        (content,) = connection.execute("SELECT config FROM configs").fetchone()
    config = json.loads(content)
    assert config["lr"] == 0.2 and config["more"] == 1


@pytest.mark.parametrize(("name", "option", "near"), [
    ("wandb", "notess", "did you mean 'notes'"), ("comet", "log_git_metadat", "did you mean 'log_git_metadata'"),
    ("swanlab", "descripton", "did you mean 'description'"), ("trackio", "server_ur", "did you mean 'server_url'"),
    ("wandb", "projet", "did you mean 'project'"), ("wandb", "resume", "which the logger gives itself"),
])  # fmt: skip
def test_misspelled_options(tmp_path, name, option, near):
    pytest.importorskip(PACKAGES.get(name, name))
    with pytest.raises(ConfigurationError, match=rf"has no argument '{option}': {near}"):
        classes()[name](save_dir=tmp_path, **SERVICES[name][0], **{option: 1})


def test_what_wandb_was_given_survives_a_kill(tmp_path):
    """The logger says that a record is sent when wandb's own process has it in its file."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    from torchhal_loggers._wandb_file import Records

    script = f"""
import os, signal, time
from torchhal_loggers import WandbLogger
logger = WandbLogger(save_dir={str(tmp_path)!r}, mode="offline")
logger.log_hyperparams({{"lr": 0.1}})
for step in range(100):
    logger.log_metrics({{"loss": float(step)}}, step)
records = logger.service_dir / "records.jsonl"
sent = logger.service_dir / "sent"
while not sent.exists() or int(sent.read_text()) < records.stat().st_size:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=scaled(100))
    assert done.returncode == -9
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kinds = []
    for content in Records(path).read():
        record = messages.Record()
        record.ParseFromString(content)
        kinds.append(record.WhichOneof("record_type"))
    assert kinds.count("history") == 100 and kinds.count("config") == 1


def test_a_program_that_ends_without_finalize(service, tmp_path):
    """The library is imported while the program runs, since it can't be when the interpreter ends."""
    script = f"""
import json, sys, torchhal_loggers
made = getattr(torchhal_loggers, sys.argv[1])(save_dir={str(tmp_path)!r}, **json.loads(sys.argv[2]))
for step in range(20):
    made.log_metrics({{"loss": 1.0}}, step)
"""
    name = classes()[service].__name__
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, name, json.dumps({**SERVICES[service][0], "timeout": scaled(60)})],
        check=False, capture_output=True, text=True, timeout=scaled(150), env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = next(tmp_path.rglob("records.jsonl"))
    assert int(records.with_name("sent").read_text()) == records.stat().st_size, done.stderr
    assert [step for step, _ in SERVICES[service][1](tmp_path)[1]] == list(range(20))


@pytest.mark.parametrize(("name", "environ"), [
    ("wandb", {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}),
    ("comet", {"COMET_API_KEY": "a" * 25, "COMET_URL_OVERRIDE": "http://127.0.0.1:9/clientlib/"}),
    ("swanlab", {"SWANLAB_API_KEY": "a" * 20, "SWANLAB_API_HOST": "http://127.0.0.1:9/api"}),
])  # fmt: skip
def test_a_service_out_of_reach_is_said_once_and_costs_bounded_time(tmp_path, name, environ):
    pytest.importorskip(PACKAGES.get(name, name))
    given = json.dumps({name: {"timeout": 5}})
    command = [sys.executable, SCRIPT, given, tmp_path]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=scaled(150), env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    assert ", 1 warnings " in done.stdout and "torchhal sync-logs" in done.stdout and "Training goes on" in done.stdout
    records = (tmp_path / "torchhal_logs" / "version_0" / name / "records.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in records) == 16
