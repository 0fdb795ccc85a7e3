"""Loggers: what is in the files, and what happens when writing them goes wrong."""

import argparse
import builtins
import csv
import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap

import hardware
import pytest
import quiet_trainer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhal import Callback, LearningRateMonitor, Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.trainer.loggers import CSVLogger, Logger, TensorBoardLogger, as_pixels
from torchhal.trainer.loggers.base import is_rank_zero


def table(logger):
    with open(logger.metrics_path, newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows):
    return [{name: float(value) for name, value in row.items() if value != ""} for row in rows]


class TestFolders:
    def test_nothing_created_before_first_write(self, tmp_path):
        """Nothing is created before there is something to write."""
        logger = CSVLogger(tmp_path / "a")
        assert logger.log_dir == str(tmp_path / "a" / "torchhal_logs" / "version_0") and logger.version == 0
        logger.save()
        logger.finalize("success")
        assert os.listdir(tmp_path) == []

    def test_versions(self, tmp_path):
        for name in ("version_0", "version_10", "version_x", "other"):
            (tmp_path / "torchhal_logs" / name).mkdir(parents=True)
        logger = CSVLogger(tmp_path)
        assert logger.version == 11
        (tmp_path / "torchhal_logs" / "version_30").mkdir()
        assert logger.version == 11, "decided once"
        assert CSVLogger(tmp_path, version="mine").log_dir == str(tmp_path / "torchhal_logs" / "mine")
        assert CSVLogger(tmp_path, name="").log_dir == str(tmp_path / "version_0")

    def test_pickled_logger_keeps_run(self, tmp_path):
        """A copy in another process writes to the same run."""
        logger = CSVLogger(tmp_path)
        copy = pickle.loads(pickle.dumps(logger))
        copy.log_metrics({"a": 1.0}, 0)
        copy.save()
        assert logger.log_dir == copy.log_dir

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"save_dir": 1}, "'save_dir' must be a path"),
            ({"save_dir": "x", "name": 1}, "'name' must be a str or None"),
            ({"save_dir": "x", "version": True}, "'version' must be"),
            ({"save_dir": "x", "version": -1}, "'version' must be 0 or more"),
            ({"save_dir": "x", "flush_logs_every_n_steps": 0}, "'flush_logs_every_n_steps' must be"),
        ],
    )
    def test_wrong_arguments(self, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            CSVLogger(**options)

    def test_only_rank_zero_writes(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        assert not is_rank_zero()
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
        logger.log_metrics({"a": 1.0})
        logger.log_hyperparams({"b": 1})
        logger.finalize("success")
        board = TensorBoardLogger(tmp_path)
        board.log_metrics({"a": 1.0})
        board.experiment.add_histogram("x", torch.ones(3))
        board.finalize("success")
        assert os.listdir(tmp_path) == []


rows = st.lists(
    st.dictionaries(
        st.text("abc,\"'\n é", min_size=1, max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=4
    ),
    max_size=12,
)


class TestCSV:
    @settings(deadline=None, max_examples=60)
    @given(rows, st.integers(1, 5), st.integers(0, 12))
    def test_the_table_holds_what_was_logged(self, tmp_path_factory, logged, flush, cut):
        """With columns that appear later, any buffering, and a second run that goes on in the same file."""
        folder = tmp_path_factory.mktemp("csv")
        for part, first in ((logged[:cut], 0), (logged[cut:], cut)):
            logger = CSVLogger(folder, version=0, flush_logs_every_n_steps=flush)
            for step, metrics in enumerate(part, start=first):
                logger.log_metrics(metrics, step)
            logger.finalize("success")
        got = numbers(table(logger)) if logged else []
        assert got == [{"step": float(step), **metrics} for step, metrics in enumerate(logged)]

    def test_text(self, tmp_path):
        logger = CSVLogger(tmp_path)
        logger.log_metrics({"loss": 0.1, "epoch": 0}, 10)
        logger.log_metrics({"acc": float("nan")}, None)
        logger.save()
        with open(logger.metrics_path) as file:
            assert file.read() == "step,loss,epoch,acc\n10,0.1,0,\n,,,nan\n"

    def test_rows_wait_in_memory(self, tmp_path):
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
        for step in range(4):
            logger.log_metrics({"a": step}, step)
        assert len(table(logger)) == 3
        logger.finalize("failed")
        assert len(table(logger)) == 4

    def test_torn_last_row_is_cut_off(self, tmp_path):
        """The row that a killed run was writing is cut off."""
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"a": 1.0, "b": 2.0}, 0)
        logger.save()
        with open(logger.metrics_path, "a") as file:
            file.write("1,3.")
        again = CSVLogger(tmp_path, version=0)
        again.log_metrics({"a": 5.0}, 1)
        again.log_metrics({"c": 6.0}, 2)
        again.save()
        assert numbers(table(again)) == [{"step": 0, "a": 1, "b": 2}, {"step": 1, "a": 5}, {"step": 2, "c": 6}]

    def test_a_kill_at_any_moment_leaves_whole_rows(self, tmp_path):
        script = textwrap.dedent(
            """
            import sys
            from torchhal.trainer.loggers import CSVLogger
            logger = CSVLogger(sys.argv[1], version=0, flush_logs_every_n_steps=1)
            for step in range(10**6):
                logger.log_metrics({"a": 1.0, f"c{step // 50}": float(step)}, step)
                if step == 20:
                    print("running", flush=True)
            """
        )
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "running\n"
        for _ in range(20):  # a reader never sees half a header
            with open(tmp_path / "torchhal_logs" / "version_0" / "metrics.csv") as file:
                assert file.readline().startswith("step,a,c0")
        process.kill()
        process.wait()
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"a": 2.0}, -1)
        logger.save()
        got = numbers(table(logger))
        assert [row["step"] for row in got[:-1]] == list(range(len(got) - 1)) and len(got) > 20
        assert all(row[f"c{int(row['step']) // 50}"] == row["step"] for row in got[:-1])

    def test_hyperparameters(self, tmp_path):
        logger = CSVLogger(tmp_path)
        logger.log_hyperparams({"lr": 1e-05, "act": torch.nn.ReLU})
        logger.log_hyperparams(argparse.Namespace(depth=3))
        with open(os.path.join(logger.log_dir, "hparams.json")) as file:
            assert json.load(file) == {"lr": 1e-05, "act": str(torch.nn.ReLU), "depth": 3}
        with pytest.raises(TypeError, match="'params' must be"):
            logger.log_hyperparams(3)

    def test_full_disk_keeps_written_rows(self, tmp_path):
        """A limit on the size of files stands for the disk."""
        script = textwrap.dedent(
            """
            import errno, resource, signal, sys
            from torchhal.trainer.loggers import CSVLogger
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            logger = CSVLogger(sys.argv[1], version=0)
            logger.log_metrics({"a": 1.0}, 0)
            logger.save()
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
            for new in ({"a": 2.0}, {"b": 3.0}):
                for step in range(30):
                    logger.log_metrics(new, step)
                try:
                    logger.save()
                except OSError as error:
                    assert error.errno == errno.EFBIG and "metrics.csv" in str(error), error
                else:
                    raise AssertionError("no error")
            """
        )
        assert resource.RLIMIT_FSIZE is not None
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
        folder = tmp_path / "torchhal_logs" / "version_0"
        assert os.listdir(folder) == ["metrics.csv"]
        assert (folder / "metrics.csv").read_text() == "step,a\n0,1.0\n"


class TestTensorBoard:
    @staticmethod
    def scalars(folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(folder)
        events.Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_values(self, tmp_path):
        logger = TensorBoardLogger(tmp_path, prefix="p")
        logger.log_hyperparams({"lr": 0.5, "layers": [1, 2]})
        for step in (0, 5):
            logger.log_metrics({"a": 1.0 + step}, step)
        logger.finalize("success")
        logger.log_metrics({"a": 9.0}, 9)  # a call after fit, such as test, goes on
        logger.finalize("success")
        assert self.scalars(logger.log_dir) == {"p-a": [(0, 1.0), (5, 6.0), (9, 9.0)]}

    def test_one_file_for_all_calls_of_a_run(self, tmp_path):
        logger = TensorBoardLogger(tmp_path)
        options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = Trainer(accelerator="cpu", max_epochs=1, logger=logger, log_every_n_steps=1, **options)
        batches = [torch.ones(2, 2)] * 3
        model = Net()
        trainer.fit(model, batches, batches)
        trainer.validate(model, batches, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches)
        trainer.validate(model, batches, verbose=False)
        assert sum(name.startswith("events.") for name in os.listdir(logger.log_dir)) == 1
        assert {"loss_step", "val_loss"} <= set(self.scalars(logger.log_dir))

    @pytest.mark.slow
    def test_fork_writes_own_file(self, tmp_path):
        """It has no thread that would write to its parent's, and waits for none."""
        logger = TensorBoardLogger(tmp_path)
        logger.log_metrics({"a": 1.0}, 0)
        child = os.fork()
        if not child:
            logger.log_metrics({"b": 2.0}, 0)
            logger.finalize("success")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        logger.finalize("success")
        assert self.scalars(logger.log_dir) == {"a": [(0, 1.0)], "b": [(0, 2.0)]}

    def test_nothing_created_before_first_write(self, tmp_path):
        """Nothing is created before there is something to write."""
        logger = TensorBoardLogger(tmp_path)
        logger.save()
        logger.finalize("success")
        assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir
        assert os.listdir(tmp_path) == []

    def test_a_full_disk_is_an_error(self, tmp_path):
        script = textwrap.dedent(
            """
            import errno, resource, signal, sys
            from torchhal.trainer.loggers import TensorBoardLogger
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            logger = TensorBoardLogger(sys.argv[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            try:
                for step in range(200):
                    logger.log_metrics({"a": 1.0}, step)
                logger.finalize("success")
            except OSError as error:
                assert error.errno == errno.EFBIG, error
            else:
                raise AssertionError("no error")
            """
        )
        # the limit holds for a file in stderr's place, too: the traceback of the writer's thread goes to a pipe
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)

    def test_a_missing_package_says_what_to_install(self, tmp_path, monkeypatch):
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.startswith("tensorboard"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ModuleNotFoundError, match=r"pip install torchhal\[tensorboard\]"):
            TensorBoardLogger(tmp_path)


def test_a_logger_needs_only_log_metrics():
    with pytest.raises(NotImplementedError, match="must define log_metrics"):
        Logger().log_metrics({})
    logger = Logger()
    logger.log_hyperparams({})
    logger.finalize("success")
    assert logger.log_dir is None and logger.name is None and logger.experiment is logger


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        self.log("rate", 0.1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("accelerator")
def test_in_a_run(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    trainer = Trainer(
        accelerator=hardware.name(),
        devices=1,
        max_epochs=2,
        logger=loggers,
        log_every_n_steps=2,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = [torch.ones(3, 2)] * 4
    trainer.fit(Net(), data, data[:1])
    rows = numbers(table(loggers[0]))
    assert [row["step"] for row in rows if "loss_step" in row] == [2, 4, 6, 8]
    assert [row["rate"] for row in rows if "rate" in row] == [0.1] * 4
    assert (
        [row["epoch"] for row in rows if "val_loss" in row]
        == [0, 1]
        == [row["epoch"] for row in rows if "loss_epoch" in row]
    )
    assert "val_loss" not in rows[0], "the sanity check is not logged"
    scalars = TestTensorBoard.scalars(loggers[1].log_dir)
    assert [step for step, _ in scalars["loss_step"]] == [2, 4, 6, 8] and len(scalars["val_loss"]) == 2
    trainer.validate(dataloaders=data, verbose=False)
    assert len(table(loggers[0])) == len(rows) + 1


class Told(Logger):
    """Notes how a run ended."""

    def __init__(self):
        self.statuses = []

    def log_metrics(self, metrics, step=None):
        pass

    def finalize(self, status):
        self.statuses.append(status)


class Raises(Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise self.error


@pytest.mark.parametrize(("error", "status"), [
    (ValueError("a fault"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted"),
])  # fmt: skip
def test_loggers_are_told_how_a_run_ended(error, status):
    logger = Told()
    trainer = quiet_trainer.make(Raises(error), logger=logger)
    with pytest.raises(type(error)):
        trainer.fit(Net(), [torch.ones(2, 2)] * 2)
    assert logger.statuses == [status]


class Fails(Told):
    """Fails in one method, and notes what is called."""

    def __init__(self, method, **options):
        super().__init__()
        self.method, self.calls = method, []
        self.__dict__.update(options)

    def _called(self, name):
        self.calls.append(name)
        if name == self.method:
            raise ConnectionError(f"{name} {len(self.calls)}")

    def log_metrics(self, metrics, step=None):
        self._called("log_metrics")

    def log_hyperparams(self, params, *args, **kwargs):
        self._called("log_hyperparams")

    def save(self):
        self._called("save")

    def after_save_checkpoint(self, checkpoint_callback):
        self._called("after_save_checkpoint")

    def finalize(self, status):
        self.statuses.append(status)
        self._called("finalize")


METHODS = pytest.mark.parametrize(
    "method", ["log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "finalize"]
)


class WithHyperparameters(Net):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()


def fit_with(loggers, tmp_path):
    trainer = quiet_trainer.make(
        LearningRateMonitor(), logger=loggers, log_every_n_steps=1, enable_checkpointing=True, max_epochs=3,
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(WithHyperparameters(), [torch.ones(2, 2)] * 2)
    return trainer


@METHODS
def test_a_logger_that_fails_ends_no_training(tmp_path, method):
    """It is named once, and called again: what it writes to may come back."""
    fails, written = Fails(method), CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match=f"Fails.{method} failed") as caught:
        trainer = fit_with([fails, written], tmp_path)
    assert trainer.state.status == "finished" and trainer.global_step == 6 and len(table(written)) >= 6
    said = [str(each.message) for each in caught if "failed" in str(each.message)]
    assert len(said) == 1 and f"{method} " in said[0] and "on_error='raise'" in said[0]
    assert fails.statuses == ["success"] and method in fails.calls


@METHODS
def test_a_logger_that_is_asked_to_raise_ends_it(tmp_path, method):
    other, fails, written = Told(), Fails(method, on_error="raise"), CSVLogger(tmp_path)
    with pytest.raises(ConnectionError, match=method):
        fit_with([fails, written, other], tmp_path)
    assert other.statuses[0] == ("success" if method == "finalize" else "failed"), "each is told the end"


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_on_error(tmp_path, kind):
    pytest.importorskip("tensorboard")
    assert kind(tmp_path).on_error == "warn" and kind(tmp_path, on_error="raise").on_error == "raise"
    with pytest.raises(ValueError, match="'on_error' must be 'warn' or 'raise'"):
        kind(tmp_path, on_error="ignore")


def test_loggers_of_one_run_have_one_folder(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "torchhal_logs" / "version_0").mkdir(parents=True)
    trainer = quiet_trainer.make(logger=["csv", "tensorboard", {"csv": {"name": "b"}}], default_root_dir=str(tmp_path))
    trainer.fit(Net(), [torch.ones(2, 2)] * 2)
    assert [logger.version for logger in trainer.loggers] == [1, 1, 0]
    assert {name.partition(".")[0] for name in os.listdir(trainer.log_dir)} >= {"metrics", "events"}
    trainer = quiet_trainer.make(logger=["csv", "csv"], default_root_dir=str(tmp_path))
    trainer.fit(Net(), [torch.ones(2, 2)] * 2)
    assert [logger.version for logger in trainer.loggers] == [2, 3], "two of a kind would write to one file"


def test_two_loggers_on_one_file_are_refused(tmp_path):
    trainer = quiet_trainer.make(logger=[{"csv": {"version": "a"}}] * 2, default_root_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"two CSVLoggers that write to '.*/torchhal_logs/a'"):
        trainer.fit(Net(), [torch.ones(2, 2)] * 2)


def test_a_folder_that_cannot_be_made_is_said_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = quiet_trainer.make(logger=True, default_root_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"can't be created .*default_root_dir"):
        trainer.fit(Net(), [torch.ones(2, 2)] * 2)


def test_jobs_started_together_take_different_folders(tmp_path):
    loggers = [CSVLogger(tmp_path) for _ in range(3)]
    assert {logger.version for logger in loggers[:2]} == {0}  # looked up, not taken
    fresh = [CSVLogger(tmp_path) for _ in range(3)]
    for logger in fresh:
        logger._next_version = lambda: 0  # what a job sees that looked before the others made theirs
    fresh[0].reserve()
    del fresh[1]._next_version, fresh[2]._next_version
    fresh[1].reserve()
    fresh[2].reserve()
    assert [logger.version for logger in fresh] == [0, 1, 2]


@pytest.mark.usefixtures("accelerator")
def test_rows_of_a_finished_epoch_survive_a_kill(tmp_path):
    class Die(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                assert (tmp_path / "torchhal_logs" / "version_0" / "metrics.csv").exists()
                raise KeyboardInterrupt

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).sum()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(KeyboardInterrupt):
        Trainer(
            accelerator=hardware.name(),
            devices=1,
            max_epochs=3,
            callbacks=[Die()],
            default_root_dir=tmp_path,
            enable_progress_bar=False,
        ).fit(Net(), [torch.ones(1, 2)])


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_texts_images_and_figures(tmp_path, name):
    """A logger shows what it has a place for, under its names, and leaves out the rest."""
    pytest.importorskip("tensorboard")
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = CSVLogger(tmp_path) if name == "csv" else TensorBoardLogger(tmp_path, prefix="p")
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    logger.log_text("note", "hello", 3)
    logger.log_image("one", torch.rand(3, 4, 6), 3)
    logger.log_image("two", [torch.zeros(4, 6), torch.zeros(1, 4, 6)], 3)
    logger.log_figure("curve", figure, 3)
    logger.save()
    if name == "tensorboard":
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        assert set(events.Tags()["images"]) == {"p-one", "p-two/0", "p-two/1", "p-curve"}
        shown = events.Images("p-one")[0]
        assert (shown.step, shown.width, shown.height) == (3, 6, 4)
        assert events.Tensors("p-note/text_summary")[0].tensor_proto.string_val == [b"hello"]
    else:
        assert not os.listdir(tmp_path)


class TestPixels:
    def test_floats_are_cut_off_at_their_ends(self):
        values = torch.tensor([[-1.0, 0.0, 0.5], [1.0, 2.0, float("nan")]])
        assert as_pixels(values).tolist() == [[0, 0, 128], [255, 255, 0]]

    @pytest.mark.parametrize(
        ("shape", "becomes"),
        [((3, 4, 6), (4, 6, 3)), ((4, 4, 6), (4, 6, 4)), ((1, 4, 6), (4, 6))],
    )
    def test_channels_come_last(self, shape, becomes):
        assert as_pixels(torch.zeros(shape, dtype=torch.uint8)).shape == becomes

    def test_low_precision_gradients_and_truth_values(self):
        assert as_pixels(torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)).max() == 255
        assert as_pixels(torch.tensor([[True, False]])).tolist() == [[255, 0]]

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (torch.zeros(2, 4, 6), "must have the shape"),
            (torch.zeros(2, 3, 4, 6), "must have the shape"),
            (torch.zeros(4, 6, dtype=torch.int32), "must be of uint8"),
            ("picture.png", "must be a tensor, an array or an image of PIL"),
        ],
    )
    def test_what_is_no_image(self, image, message):
        with pytest.raises((TypeError, ValueError), match=message):
            as_pixels(image)
