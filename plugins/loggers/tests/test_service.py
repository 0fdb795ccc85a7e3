"""A ServiceLogger and a real service that is away, hangs, fails or refuses: nothing is lost, and no training waits."""

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from ledger import Ledger, LedgerLogger, log, wait_until
from logged_fit import Model

from torchhal import Trainer
from torchhal_loggers import ServiceError
from torchhal_loggers._sync_command import load

SCRIPT = Path(__file__).with_name("logged_fit.py")


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    yield ledger
    ledger.kill()


def fit_script(ledger, folder, *arguments, **options):
    logger = json.dumps({"ledger": {"url": ledger.url, **options}})
    command = [sys.executable, SCRIPT, logger, folder, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)


# -- a service that answers ------------------------------------------------------------------------------------


def test_everything_arrives_once_and_in_order(ledger, tmp_path):
    ledger.start()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, prefix="train")
    logger.log_hyperparams({"lr": 0.1, "net": {"depth": 3}})
    log(logger, range(2000))
    logger.finalize("success")
    assert ledger.steps() == list(range(2000)) and len(ledger.runs()) == 1
    assert ledger.records()[0]["metrics"] == {"train-loss": 1.0}
    assert ledger.records("params")[0]["params"] == {"lr": 0.1, "net": {"depth": 3}}
    assert ledger.statuses() == ["success"]


def test_nothing_is_written_or_asked_before_the_first_record(ledger, tmp_path):
    ledger.start()
    threads = threading.active_count()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    assert logger.version == 0 and logger.log_dir == str(tmp_path / "experiment" / "version_0")
    logger.save()
    logger.finalize("success")
    assert threading.active_count() == threads and not (tmp_path / "experiment").exists() and not ledger.received()


def test_fit_and_test_are_one_run(ledger, tmp_path):
    ledger.start()
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    trainer = Trainer(
        logger=LedgerLogger(ledger.url, save_dir=tmp_path), max_epochs=2, default_root_dir=tmp_path,
        log_every_n_steps=1, **quiet,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader, verbose=False)
    assert ledger.statuses() == ["success", "success"] and len(ledger.runs()) == 1
    names = {name for record in ledger.records() for name in record["metrics"]}
    assert names == {"loss", "val/loss", "epoch"}


def test_images_texts_and_figures(ledger, tmp_path):
    from matplotlib.figure import Figure
    from PIL import Image

    ledger.start()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    logger.log_text("note", "some *text*", 3)
    logger.log_image("one", torch.zeros(3, 5, 7), 3)
    logger.log_image("two", [torch.ones(5, 7), torch.zeros(1, 5, 7, dtype=torch.uint8)])
    logger.log_figure("curve", figure, 4)
    logger.finalize("success")
    assert ledger.records("text")[0]["text"] == {"note": "some *text*"}
    paths = {name: path for record in ledger.records("image") for name, path in record["image"].items()}
    assert sorted(paths) == ["curve", "one", "two/0", "two/1"]
    with Image.open(paths["one"]) as one, Image.open(paths["two/0"]) as two:
        assert one.size == (7, 5) and one.getpixel((0, 0)) == (0, 0, 0) and two.getpixel((0, 0)) == 255


@pytest.mark.parametrize(("value", "kind", "says"), [
    ("text", TypeError, "must be a tensor, an array or an image"),
    (torch.zeros(2, 4, 4), ValueError, "must have the shape"),
    (torch.zeros(4, 4, dtype=torch.int64), ValueError, "must be of uint8"),
])  # fmt: skip
def test_what_is_no_image_is_said_at_once(ledger, tmp_path, value, kind, says):
    with pytest.raises(kind, match=says):
        LedgerLogger(ledger.url, save_dir=tmp_path).log_image("x", value)


@pytest.mark.parametrize("mode", ["min", "max"])  # with max, the first one stays the best
@pytest.mark.parametrize(("log_model", "best", "all_of_them"), [(False, 0, 0), (True, 1, 1), ("all", 1, 3)])
def test_checkpoints(ledger, tmp_path, mode, log_model, best, all_of_them):
    from torchhal import ModelCheckpoint

    ledger.start()
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
    trainer = Trainer(
        logger=LedgerLogger(ledger.url, save_dir=tmp_path, log_model=log_model), max_epochs=3, accelerator="cpu",
        devices=1, enable_progress_bar=False, enable_model_summary=False,
        callbacks=ModelCheckpoint(monitor="val/loss", mode=mode, save_top_k=-1),
    )  # fmt: skip
    trainer.fit(Model(), loader, loader)
    found = [record["checkpoint"] for record in ledger.records("checkpoint")]
    assert (
        len(found) == all_of_them
        and sum(item["path"] == trainer.checkpoint_callback.best_model_path for item in found) >= best
    )
    assert all(Path(item["path"]).exists() and item["score"] > 0 for item in found)


# -- a service that is away ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["away", "hang", "fail"])
def test_a_service_that_does_not_answer_costs_bounded_time_and_is_said_once(ledger, tmp_path, mode):
    if mode != "away":
        ledger.start(mode)
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=1.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.monotonic()
        for part in range(3):
            log(logger, range(100 * part, 100 * part + 100))
            logger.save()
        logged = time.monotonic() - start
        logger.finalize("success")
        took = time.monotonic() - start
        log(logger, range(300, 400))
        logger.finalize("success")
    assert logged < 1.0 and took < 6.0, f"{logged:.1f} s, and {took:.1f} s with the end"
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1 and said[0].startswith("ledger ") and "Training goes on" in said[0], said
    ledger.kill()
    ledger.start()  # it is back, and another process sends the rest
    command = [sys.executable, "-m", "torchhal", "sync-logs", logger.log_dir]
    subprocess.run(command, check=True, env=_with_ledger(), timeout=90)
    assert sorted(set(ledger.steps())) == list(range(400)) == ledger.steps()


def test_a_call_is_not_ended_before_the_service_has_everything(ledger, tmp_path):
    """A library finishes the runs of ended loggers when another begins: with what is on its way, if that came first."""
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=0.2)
    log(logger, range(5))
    with pytest.warns(UserWarning, match="ledger"):
        logger.finalize("success")
    assert not logger.is_ended
    ledger.start()
    logger.finalize("success")
    wait_until(lambda: ledger.statuses() == ["success"])
    wait_until(lambda: logger.is_ended)


def _with_ledger():
    return {**os.environ, "PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_a_service_that_is_lost_in_mid_run_gets_the_rest_when_it_is_back(ledger, tmp_path):
    ledger.start()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=20)
    log(logger, range(50))
    wait_until(lambda: logger._outbox.is_empty)  # or what is on its way now comes twice
    ledger.kill()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log(logger, range(50, 100))
        wait_until(lambda: logger._sender.failure is not None)
        log(logger, range(100, 150))
        ledger.start()
        wait_until(lambda: len(ledger.steps()) == 150)
        log(logger, range(150, 200))
        logger.finalize("success")
    assert ledger.steps() == list(range(200)) and len(ledger.runs()) == 1 and ledger.statuses() == ["success"]
    assert len(caught) == 1 and "can't be reached" in str(caught[0].message)


def test_the_end_is_told_when_the_service_is_back(ledger, tmp_path):
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=0.2)
    log(logger, range(3))
    with pytest.warns(
        UserWarning, match=r"3 records wait in .*version_0/ledger' until ledger answers.* version=0, or by"
    ):
        logger.finalize("failed")
    ledger.start()
    wait_until(lambda: ledger.statuses() == ["failed"])
    assert ledger.steps() == [0, 1, 2]


def test_on_error_raise(ledger, tmp_path):
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=1, on_error="raise")
    log(logger, [0])
    with pytest.raises(ServiceError, match=r"ledger can't be reached .*refused"):
        logger.finalize("success")
    with pytest.raises(ServiceError, match="ledger can't be reached"):
        _ = logger.experiment


def test_a_fit_without_its_service_trains_as_with_it(ledger, tmp_path):
    done = fit_script(ledger, tmp_path, timeout=1)
    assert done.returncode == 0 and ", 1 warnings ledger can't be reached" in done.stdout, done.stderr
    ledger.start()
    again = load(tmp_path / "experiment" / "version_0" / "ledger")
    assert again.send_pending(30) == 0 and len(ledger.steps()) == 18 and len(ledger.runs()) == 1


@pytest.mark.slow
def test_a_fit_asked_to_raise_ends(ledger, tmp_path):
    done = fit_script(ledger, tmp_path, "epochs=400", timeout=1, on_error="raise")
    assert done.returncode != 0 and "ServiceError: ledger can't be reached" in done.stderr


def test_a_failed_run_is_not_kept_waiting(ledger, tmp_path):
    ledger.start("hang")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, timeout=60)
    log(logger, [0])
    start = time.monotonic()
    with pytest.warns(UserWarning, match="has not taken everything within 5 s"):
        logger.finalize("failed")
    assert time.monotonic() - start < 20


def test_a_logger_that_is_done_leaves_no_thread_and_can_go(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("torchhal_loggers._sender._IDLE_S", 0.1)
    ledger.start()
    threads = threading.active_count()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    log(logger, range(3))
    logger.finalize("success")
    wait_until(lambda: threading.active_count() == threads)
    log(logger, range(3, 6))
    logger.finalize("success")
    assert ledger.steps() == list(range(6))
    gone = weakref.ref(logger)
    del logger
    wait_until(lambda: gc.collect() >= 0 and gone() is None)


# -- what the service refuses ----------------------------------------------------------------------------------


def test_one_refused_record_costs_no_other(ledger, tmp_path):
    ledger.start("devil")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            logger.log_metrics({"devil" if step in {3, 7} else "loss": 1.0}, step)
        logger.finalize("success")
        logger.save()
    assert ledger.steps() == [step for step in range(20) if step not in {3, 7}]
    assert [str(warning.message)[:50] for warning in caught] == ["ledger has refused metrics {'devil': 1.0}: HTTP Er"]


def test_a_refusal_raises_where_it_is_asked_to(ledger, tmp_path):
    ledger.start("devil")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, on_error="raise")
    logger.log_metrics({"devil": 1.0}, 0)
    with pytest.raises(ServiceError, match="has refused metrics"):
        logger.finalize("success")


# -- processes -------------------------------------------------------------------------------------------------


def test_a_killed_fit_loses_nothing_and_goes_on_in_its_run(ledger, tmp_path):
    ledger.start()
    killed = fit_script(ledger, tmp_path, "kill_at=13", version=7)
    assert killed.returncode == -9
    done = fit_script(ledger, tmp_path, "epochs=1", version=7)
    assert done.returncode == 0, done.stderr
    assert len(ledger.runs()) == 1
    steps = [record["step"] for record in ledger.records() if "loss" in record["metrics"]]
    assert steps == [*range(1, 14), *range(1, 9)], "all of the first that was logged, and then the second"
    assert [record["params"] for record in ledger.records("params")] == [{"width": 4}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_in_processes_that_the_trainer_starts(ledger, tmp_path, strategy):
    ledger.start()
    done = fit_script(ledger, tmp_path, f"strategy={strategy}", "devices=2")
    assert done.returncode == 0, done.stderr
    assert len(ledger.runs()) == 1 and ledger.statuses() == ["success"]
    assert [record["step"] for record in ledger.records() if "loss" in record["metrics"]] == list(range(1, 9))


def test_a_copy_logs_into_the_same_run(ledger, tmp_path):
    ledger.start()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    log(logger, range(5))
    copy = pickle.loads(pickle.dumps(logger))
    log(copy, range(5, 10))
    log(logger, range(10, 15))
    copy.finalize("success")
    logger.finalize("success")
    assert sorted(ledger.steps()) == list(range(15)) and len(ledger.runs()) == 1


def test_a_forked_process_logs_into_the_same_run(ledger, tmp_path):
    ledger.start()
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    log(logger, range(5))
    logger.finalize("success")
    child = os.fork()
    if not child:
        code = 1
        try:
            log(logger, range(5, 10))
            logger.finalize("success")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    log(logger, range(10, 15))
    logger.finalize("success")
    assert ledger.steps() == list(range(15)) and len(ledger.runs()) == 1


def test_a_program_that_ends_without_finalize_sends_the_rest(ledger, tmp_path):
    ledger.start()
    script = (
        "from ledger import LedgerLogger\n"
        f"logger = LedgerLogger({ledger.url!r}, save_dir={str(tmp_path)!r})\n"
        "for step in range(100): logger.log_metrics({'loss': 1.0}, step)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_with_ledger(), timeout=60)
    assert ledger.steps() == list(range(100))


def test_only_rank_zero_sends(ledger, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path)
    log(logger, range(3))
    logger.log_image("x", torch.zeros(4, 4))
    assert logger.experiment.anything(1).goes
    logger.finalize("success")
    assert not (tmp_path / "experiment").exists()


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(ledger, tmp_path):
    (tmp_path / "experiment").write_text("in the way")
    logger = LedgerLogger(ledger.url, save_dir=tmp_path, version=1)
    with pytest.warns(UserWarning, match="ledger can't be sent what is logged"):
        log(logger, range(3))
    logger.finalize("success")


def test_a_run_whose_folder_cannot_be_made_goes_on(ledger, tmp_path):
    (tmp_path / "experiment").write_text("in the way")
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
    trainer = Trainer(
        logger=LedgerLogger(ledger.url, save_dir=tmp_path), max_epochs=1, accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="can't be created.*Training goes on without it"):
        trainer.fit(Model(), loader)
    assert trainer.state.status == "finished"


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    ({"log_model": "best"}, "'log_model' must be True, False or 'all'"),
    ({"on_error": "ignore"}, "'on_error' must be 'warn' or 'raise'"),
    ({"timeout": -1}, "'timeout' must be a number of seconds"),
    ({"timeout": "1"}, "'timeout' must be a number of seconds"),
    ({"prefix": 1}, "'prefix' must be a str"),
    ({"version": 1.5}, "'version' must be an int, a str or None"),
])  # fmt: skip
def test_wrong_arguments(tmp_path, options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        LedgerLogger("http://127.0.0.1:9", save_dir=tmp_path, **options)


def test_send_logs_says_what_is_wrong(tmp_path, capfd):
    from torchhal.__main__ import main

    (tmp_path / "empty").mkdir()
    assert main(["sync-logs", str(tmp_path / "empty")]) == 1
    assert "holds no records of a service" in capfd.readouterr().err
    (tmp_path / "lies").mkdir()
    (tmp_path / "lies" / "records.jsonl").write_text("{}\n")
    for content in ("", "[]", '{"logger": "os:path", "options": {}}', '{"logger": "nowhere:X", "options": {}}'):
        (tmp_path / "lies" / "run.json").write_text(content)
        assert main(["sync-logs", str(tmp_path / "lies")]) == 1
        assert "run.json" in capfd.readouterr().err
