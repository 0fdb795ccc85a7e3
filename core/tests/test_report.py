"""What `torchhal report` shows of a run's folder, whatever state it is in."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchhal
from torchhal import Callback, Trainer, cli
from torchhal.errors import ConfigurationError
from torchhal.report import _plots as plots
from torchhal.report import html_page, read_record, read_run, read_runs, text_summary
from torchhal.report._fit_curves import Curve
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.loggers import CSVLogger, TensorBoardLogger

BATCHES = [torch.ones(2, 1)] * 4


class Net(torchhal.Module):
    def __init__(self, lr=0.1, tag="<b>&amp;"):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Raise(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            raise self.error

    def __init__(self, error):
        self.error = error


def fit(folder, *callbacks, module=None, ckpt_path=None, version=0, **options):
    options = {
        "accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False,
        "enable_model_summary": False, "logger": CSVLogger(folder, "logs", version), **options,
    }  # fmt: skip
    trainer = Trainer(callbacks=list(callbacks), default_root_dir=folder, **options)
    trainer.fit(module or Net(), BATCHES, BATCHES, ckpt_path=ckpt_path)
    return trainer


def report(capsys, *arguments):
    code = cli.main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def is_well_formed(page):
    """Parse the page, whose void elements alone are not closed."""
    from html.parser import HTMLParser

    open_tags = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag, self.getpos()

    Parser(convert_charrefs=True).feed(page)
    return not open_tags and "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


# -- what a fit records ----------------------------------------------------------------------------------------------


def test_record_of_a_fit(tmp_path):
    trainer = fit(tmp_path, ModelCheckpoint(monitor="val_loss"), profiler="simple")
    (record,) = read_record(trainer.log_dir)
    assert (record["status"], record["step"], record["epoch"], record["batches"]) == ("finished", 8, 2, 8)
    assert record["reason"] == "max_epochs=2 is reached after 2 epoch(s)"
    assert record["plan"]["strategy"]["choice"] == "single_device" and record["plan"]["precision"]["reason"]
    assert {"python", "torch", "torchhal"} <= set(record["versions"])
    assert record["hparams"] == {"lr": 0.1, "tag": "<b>&amp;"}
    assert record["settings"]["max_epochs"] == 2 and record["settings"]["profiler"] == "SimpleProfiler"
    assert set(record["seconds"]) == {"set-up", "sanity check", "validation", "training", "all"}
    assert sum(value for name, value in record["seconds"].items() if name != "all") == pytest.approx(
        record["seconds"]["all"], rel=0.05
    )
    assert record["profile"]["forward"][1] == 8
    assert record["memory"][0]["rank"] == 0 and record["memory"][0]["host_peak"] > 1 << 20
    assert record["checkpoints"][0]["best"] == trainer.checkpoint_callback.best_model_path
    assert record["ended"] - record["began"] == pytest.approx(record["seconds"]["all"])


def test_every_rank_of_a_job_is_recorded(tmp_path):
    trainer = fit(tmp_path, strategy="ddp_spawn", devices=2)
    (record,) = read_record(trainer.log_dir)
    assert record["world_size"] == 2
    assert [each["rank"] for each in record["memory"]] == [0, 1]


def test_a_failure_and_a_resume_in_one_folder(tmp_path):
    saver = ModelCheckpoint(every_n_train_steps=1)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, saver, Raise(ZeroDivisionError("no\n<way>")))
    trainer = fit(tmp_path, ckpt_path="last")
    first, second = read_record(trainer.log_dir)
    assert first["status"] == "failed" and first["reason"] == "ZeroDivisionError: no <way>" and first["step"] == 2
    assert second["status"] == "finished" and second["first_step"] in (1, 2) and second["continued_from"]
    page = html_page([read_run(trainer.log_dir)])
    assert "Fits, interruptions and resumes" in page and "ZeroDivisionError: no &lt;way&gt;" in page


def test_a_stop_by_a_signal(tmp_path):
    class Signals(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, Signals())
    (record,) = read_record(tmp_path / "logs" / "version_0")
    assert record["status"] == "stopped" and record["checkpoints"][0]["interrupted"]
    assert "interrupted" in text_summary([read_run(str(tmp_path / "logs" / "version_0"))])


def test_a_run_that_was_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys\nimport test_report as t\n"
        "class Kill(t.Callback):\n"
        "    def on_train_epoch_end(self, trainer, module):\n"
        "        if trainer.current_epoch == 1:\n            os.kill(os.getpid(), 9)\n"
        "t.fit(sys.argv[1], Kill())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ended = subprocess.run(
        [sys.executable, script, tmp_path], check=False, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == -9, ended.stderr
    run = read_run(str(tmp_path / "logs" / "version_0"))
    assert run.status().startswith("was killed") and len(run.curves["train_loss"].values) >= 4
    fit(tmp_path, ckpt_path="last")
    first, second = read_record(run.path)
    assert first["status"] == "killed" and second["status"] == "finished"


@pytest.mark.parametrize(
    "options", [{"logger": False}, {"fast_dev_run": True}], ids=["without a logger", "fast_dev_run"]
)
def test_nothing_is_recorded(tmp_path, options):
    fit(tmp_path, enable_checkpointing=False, **options)
    assert not list(tmp_path.rglob("run.json"))


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path, recwarn):
    (tmp_path / "logs" / "version_0" / "run.json").mkdir(parents=True)
    trainer = fit(tmp_path)
    assert trainer.global_step == 8
    assert len([each for each in recwarn if "can't be recorded" in str(each.message)]) == 1


# -- what is shown ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        fit(folder, ModelCheckpoint(monitor="val_loss")).log_dir,
        fit(folder, module=Net(lr=0.01), version=1, accumulate_grad_batches=2).log_dir,
    ]


def test_text_of_one_run(runs, capsys):
    code, out, _ = report(capsys, runs[0])
    assert code == 0
    for part in ("finished: max_epochs=2", "train_loss", "val_loss at", "lr", "single_device", "validation"):
        assert part.replace("val_loss at", "val_loss") in out
    assert "epoch=" in out and "best" in out and "note:" not in out


def test_page_of_one_run(runs, tmp_path, capsys):
    target = tmp_path / "page.html"
    code, out, _ = report(capsys, runs[0], "--html", target)
    page = target.read_text()
    assert code == 0 and str(target) in out and is_well_formed(page)
    for part in ("Hyperparameters", "Plan", "Time", "Memory", "Checkpoints", "Versions", "&lt;b&gt;&amp;amp;"):
        assert part in page


def test_comparison_begins_with_what_differs(runs, tmp_path, capsys):
    _, out, _ = report(capsys, *runs)
    lines = [line.split() for line in out.splitlines()]
    assert ["hyperparameters", "lr", "0.1", "0.01"] in lines
    assert ["settings", "accumulate_grad_batches", "1", "2"] in lines
    assert not any("tag" in line or "torchhal" in line for line in lines), "what is equal is left out"
    report(capsys, *runs, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert is_well_formed(page) and page.index("Differences") < page.index("Latest values") < page.index("Curves")


def test_json(runs, capsys):
    _, out, _ = report(capsys, runs[0], "--json")
    found = json.loads(out)
    assert found["schema"] == 1 and found["runs"][0]["metrics"]["train_loss"]["step"] == 8
    assert isinstance(found["runs"][0]["metrics"]["train_loss"]["latest"], float)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_json_has_no_value_that_is_not_finite(tmp_path, capsys, value):
    _, out, _ = report(capsys, folder_with(tmp_path, metrics_csv=f"loss,step\n1.5,1\n{value},2\n"), "--json")
    (run,) = json.loads(out, parse_constant=pytest.fail)["runs"]
    assert run["metrics"]["loss"] == {"latest": None, "step": 2, "values": 2}


def test_tensorboard_curves(tmp_path):
    pytest.importorskip("tensorboard")
    trainer = fit(tmp_path, logger=TensorBoardLogger(tmp_path, "tb"))
    run = read_run(trainer.log_dir)
    assert run.curves["train_loss"].steps[-1] == 8 and not run.problems


def test_labels_differ(runs, tmp_path):
    other = tmp_path / "other" / "version_0"
    shutil.copytree(runs[0], other)
    labels = [run.label for run in read_runs([runs[0], str(other), runs[0]])]
    assert len(set(labels)) == 3


# -- damaged and half-written ------------------------------------------------------------------------------------------


def folder_with(tmp_path, **files):
    folder = tmp_path / "version_0"
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name.replace('_', '.')}").write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no metric was logged"),
        ({"metrics_csv": "loss,step\n1.0,1\n2.0"}, "ends within a row"),
        ({"metrics_csv": "loss,step\n1.0,1\n2.0\nx,3\n"}, "2 row(s) or value(s) that can't be read"),
        ({"metrics_csv": b"\xff\xfe\0\0\0"}, "has no column 'step'"),
        ({"metrics_csv": ""}, "no metric was logged"),
        ({"metrics_csv": "a,b\n1,2\n"}, "has no column 'step'"),
        ({"run_json": "{"}, "is no JSON"),
        ({"run_json": "[]"}, "is not the record of a run"),
        ({"run_json": '{"schema": 9, "fits": []}'}, "has schema 9"),
        ({"run_json": '{"schema": 1, "fits": [3]}'}, "lists what is no fit"),
        ({"run_json": '{"schema": 1, "fits": [{}]}'}, "no metric was logged"),
        ({"run_json": '{"schema": 1, "fits": [{"plan": 1, "seconds": {"a": "b"}, "memory": [1, {}], "began": 1e99, '
          '"checkpoints": [{"scores": 1}], "profile": {"x": []}, "pid": 1e9}]}'}, "no metric was logged"),
        ({"hparams_json": "{"}, "hparams.json can't be read"),
        ({"events.out.tfevents.1": b"\x01\x02"}, ""),
    ],
)  # fmt: skip
def test_damaged_inputs_are_told(tmp_path, capsys, files, said):
    folder = folder_with(tmp_path, **files)
    code, out, _ = report(capsys, folder)
    assert code == 0 and said in out
    assert report(capsys, folder, "--html", tmp_path / "page.html")[0] == 0
    assert is_well_formed((tmp_path / "page.html").read_text())
    assert report(capsys, folder, folder, "--html", tmp_path / "page.html")[0] == 0


def test_values_that_are_not_finite(tmp_path):
    run = read_run(str(folder_with(tmp_path, metrics_csv="loss,x<&>,step\nnan,inf,1\n1.5,-inf,2\nnan,nan,3\n")))
    assert run.curves["loss"].not_finite == 2 and run.curves["x<&>"].extremes() is None
    page = html_page([run])
    assert is_well_formed(page) and "x&lt;&amp;&gt;" in page
    assert "1.5 at 2" in text_summary([run])


def test_without_a_record_the_latest_value_of_a_step_counts(tmp_path):
    run = read_run(str(folder_with(tmp_path, metrics_csv="loss,acc,step\n1,1,1\n2,2,2\n3,,4\n20,,2\n30,,3\n")))
    assert (run.curves["loss"].steps, run.curves["loss"].values) == ([1, 2, 3, 4], [1, 20, 30, 3])
    (problem,) = [each for each in run.problems if "go back" in each]
    assert "loss" in problem and "acc" not in problem


def test_a_page_goes_through_links_and_into_pipes(runs, tmp_path, capsys):
    """A device that was replaced by a page would be lost to all programs of the machine."""
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    assert report(capsys, runs[0], "--html", tmp_path / "link.html")[0] == 0
    assert (tmp_path / "link.html").is_symlink() and is_well_formed((tmp_path / "target.html").read_text())
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    assert report(capsys, runs[0], "--html", tmp_path / "pipe")[0] == 0
    assert is_well_formed(reader.communicate(timeout=60)[0]) and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["metrics.csv", "run.json", "hparams.json", "events.out.tfevents.1"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(tmp_path, capsys, name, kind):
    (tmp_path / "checkpoints").mkdir()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    code, out, _ = report(capsys, tmp_path)
    assert code == 0 and name in out and "no regular file" in out


@pytest.mark.parametrize("target", ["missing/page.html", "file/page.html", "folder"])
def test_a_page_that_cannot_be_written(tmp_path, capsys, target):
    folder = folder_with(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    code, _, err = report(capsys, folder, "--html", tmp_path / target)
    assert code == 2 and err.startswith("error: '--html' must be a file that can be written") and err.count("\n") == 1
    assert not list(tmp_path.rglob(".torchhal-report*"))


def test_what_is_no_run(tmp_path, capsys, runs):
    assert "doesn't exist" in report(capsys, tmp_path / "nothing")[2]
    (tmp_path / "file").write_text("")
    assert "is a file" in report(capsys, tmp_path / "file")[2]
    assert "is a folder with 2 run(s) in it" in report(capsys, Path(runs[0]).parent)[2]
    with pytest.raises(ConfigurationError):
        read_run(str(tmp_path / "nothing"))


# -- several fits and evaluations in one folder ------------------------------------------------------------------------


def rows(*points):
    return "val_loss,step\n" + "".join(f"{value},{step}\n" for step, value in points)


def record(*fits):
    return json.dumps({"schema": 1, "fits": fits})


@pytest.mark.parametrize("rows_are_recorded", [True, False])
def test_a_resume_replaces_what_it_repeats(tmp_path, rows_are_recorded):
    fits = [{"first_step": 0, "first_row": 0}, {"first_step": 20, "first_row": 4, "continued_from": "x.ckpt"}]
    if not rows_are_recorded:
        for each in fits:
            del each["first_row"]
    csv = rows((10, 3.0), (20, 2.0), (30, 0.1), (40, 0.2), (30, 1.5), (40, 1.4))
    run = read_run(str(folder_with(tmp_path, metrics_csv=csv, run_json=record(*fits))))
    (curve,) = run.curves.values()
    assert (curve.steps, curve.values) == ([10, 20, 30, 40], [3.0, 2.0, 1.5, 1.4])
    assert curve.extremes() == ((1.4, 40), (3.0, 10)) and "note:" not in text_summary([run])


def test_a_resume_drops_abandoned_values_of_every_metric(tmp_path):
    """Validation at step 40 is abandoned as soon as the resumed fit logs its loss at step 30."""
    csv = "val_loss,loss,step\n,3,20\n,2,30\n0.1,1,40\n,2.5,30\n5,,30\n"
    fits = record({"first_step": 0, "first_row": 0}, {"first_step": 20, "first_row": 3, "continued_from": "x.ckpt"})
    run = read_run(str(folder_with(tmp_path, metrics_csv=csv, run_json=fits)))
    assert (run.curves["loss"].steps, run.curves["loss"].values) == ([20, 30], [3, 2.5])
    assert (run.curves["val_loss"].steps, run.curves["val_loss"].values) == ([30], [5])


def test_a_resume_that_has_logged_nothing_replaces_nothing(tmp_path):
    fits = record({"first_step": 0, "first_row": 0}, {"first_step": 20, "first_row": 2, "continued_from": "x.ckpt"})
    run = read_run(str(folder_with(tmp_path, metrics_csv=rows((20, 1), (40, 2)), run_json=fits)))
    assert run.curves["val_loss"].steps == [20, 40]


@pytest.mark.parametrize("rows_are_recorded", [True, False])
def test_a_fit_that_begins_anew_has_its_own_curve(tmp_path, capsys, rows_are_recorded):
    fits = [{"first_step": 0, "step": 30, "first_row": 0}, {"first_step": 0, "step": 20, "first_row": 3}]
    if not rows_are_recorded:
        for each in fits:
            del each["first_row"]
    csv = rows((10, 3.0), (20, 2.0), (30, 1.0), (10, 30.0), (20, 20.0))
    run = read_run(str(folder_with(tmp_path, metrics_csv=csv, run_json=record(*fits))))
    assert {name: curve.values for name, curve in run.curves.items()} == {
        "val_loss (fit 1)": [3, 2, 1],
        "val_loss": [30, 20],
    }
    _, out, _ = report(capsys, run.path)
    assert "val_loss (fit 1)" in out and "fit 2" in out
    page = html_page([run])
    assert is_well_formed(page) and "val_loss (fit 1)" in page and page.count("<figure>") <= 1


def test_a_resume_continues_the_fit_before_it(tmp_path):
    fits = record(
        {"first_step": 0, "first_row": 0}, {"first_step": 0, "first_row": 2},
        {"first_step": 10, "first_row": 4, "continued_from": "x.ckpt"},
    )  # fmt: skip
    csv = rows((10, 1), (20, 2), (10, 3), (20, 4), (20, 5), (30, 6))
    run = read_run(str(folder_with(tmp_path, metrics_csv=csv, run_json=fits)))
    assert run.curves["val_loss"].values == [3, 5, 6] and run.curves["val_loss (fit 1)"].values == [1, 2]


@pytest.mark.parametrize("fits", ['{"schema": 1, "fits": [{}]}', '{"schema": 1, "fits": [{"first_step": "x"}]}'])
def test_fits_that_were_never_set_up_have_no_curves(tmp_path, fits):
    run = read_run(str(folder_with(tmp_path, metrics_csv=rows((10, 1), (10, 2)), run_json=fits)))
    assert run.curves["val_loss"].values == [2] and any("go back" in each for each in run.problems)


@pytest.fixture(params=["csv", "tensorboard"])
def logger(request, tmp_path):
    if request.param == "csv":
        return CSVLogger(tmp_path, "logs", 0)
    pytest.importorskip("tensorboard")
    return TensorBoardLogger(tmp_path, "logs", 0)


def test_evaluations_are_no_part_of_a_fits_curve(tmp_path, logger):
    trainer = fit(tmp_path, ModelCheckpoint(save_top_k=-1, monitor="val_loss"), logger=logger)
    before = read_run(trainer.log_dir).curves["val_loss"]
    assert before.steps == [4, 8]
    trainer.validate(trainer.module, BATCHES, ckpt_path=min(Path(trainer.log_dir, "checkpoints").glob("*.ckpt")))
    Trainer(accelerator="cpu", logger=logger, enable_progress_bar=False).validate(Net(), BATCHES)
    run = read_run(trainer.log_dir)
    assert run.curves["val_loss"] == before and not run.problems
    assert 0 in run.curves["val_loss (evaluation)"].steps


def test_a_second_fit_into_the_folder(tmp_path, logger):
    first = fit(tmp_path, logger=logger)
    curve = read_run(first.log_dir).curves["train_loss"]
    fit(tmp_path, logger=logger, module=Net(lr=0.01), max_epochs=1)
    run = read_run(first.log_dir)
    assert run.curves["train_loss (fit 1)"] == curve and run.curves["train_loss"].steps == [1, 2, 3, 4]


def test_a_resumed_fit_continues_the_curve(tmp_path, logger):
    first = fit(tmp_path, ModelCheckpoint(save_top_k=-1), logger=logger, max_epochs=3)
    checkpoint = next(Path(first.log_dir, "checkpoints").glob("*step=4*"))
    fit(tmp_path, logger=logger, module=Net(lr=0.01), max_epochs=2, ckpt_path=checkpoint)
    run = read_run(first.log_dir)
    assert run.curves["train_loss"].steps == list(range(1, 9)) and run.curves["val_loss"].steps == [4, 8]
    assert not any("fit" in name for name in run.curves) and not run.problems


# -- plots -------------------------------------------------------------------------------------------------------------


def test_without_matplotlib_the_page_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = html_page([read_run(runs[0])])
    assert "pip install &#39;torchhal[report]&#39;" in page and "<svg" not in page and "train_loss" in page


def test_a_long_curve_is_thinned_to_its_extremes():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, math.sin(step / 1000) + (50 if step == 77_777 else 0))
    points = plots.thinned(curve)
    assert len(points) <= plots.MAX_POINTS + 2 and max(value for _, value in points) > 49
    assert points == sorted(points)


def test_metrics_that_belong_together_share_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    columns = "train_loss,val_loss,loss_epoch,acc,_odd,$x^2$"
    run = read_run(str(folder_with(tmp_path, metrics_csv=f"{columns},step\n1,2,3,4,5,6,1\n2,3,4,5,6,7,2\n")))
    found = dict(plots.plots([run]))
    assert set(found) == {"loss", "acc", "_odd", "$x^2$"}
    assert all(name in found["loss"] for name in ("train_loss", "val_loss", "loss_epoch"))
    assert "$x^2$" in found["$x^2$"], "a name is no formula"
    assert set(dict(plots.plots([run, run]))) == set(found)


_MEASURE = """<script>
const boxes = [...document.querySelectorAll("figure svg")].map(svg => {
  const lines = [...svg.querySelectorAll("path[clip-path], g[clip-path] path, path")].map(path => path.getBBox());
  return [svg.getBoundingClientRect().width, Math.max(...lines.map(box => box.width)),
          [...svg.querySelectorAll("text")].map(text => text.textContent)];
});
document.title = JSON.stringify([boxes, document.documentElement.scrollWidth <= window.innerWidth]);
</script></body>"""


@pytest.mark.parametrize("width", [420, 1200])
def test_chromium_draws_the_page(runs, tmp_path, width):
    """The curves are drawn, their text can be read, and the page is no wider than the window."""
    pytest.importorskip("matplotlib")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium")
    page = tmp_path / "page.html"
    page.write_text(html_page(read_runs(runs)).replace("</body>", _MEASURE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [browser, *options, f"--window-size={width},900", "--dump-dom", page.as_uri()],
        check=False, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    title = re.search(r"<title>(\[.*?)</title>", shown.stdout)
    assert title is not None, shown.stderr
    (plot, *_), fits = json.loads(title[1].replace("&lt;", "<").replace("&amp;", "&"))
    assert plot[0] > 250 and plot[1] > 100 and fits
    assert {"loss", "step"} <= set(plot[2]) and any("val_loss" in text for text in plot[2])
