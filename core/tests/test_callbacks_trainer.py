"""Callbacks in real runs."""

import contextlib
import os
import re
import signal
import sys
from datetime import timedelta

import hardware
import pytest
import torch
from torch import nn

from torchhal import Module, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.trainer.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)
from torchhal.trainer.loggers import CSVLogger, Logger

pytestmark = pytest.mark.usefixtures("accelerator")


class Net(Module):
    """Logs given values as ``score``, one for each validation."""

    def __init__(self, scores=()):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.scores = list(scores)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        epoch = self.trainer.current_epoch
        self.log("score", self.scores[epoch] if epoch < len(self.scores) else 1.0, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).pow(2).mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(3, 2) for _ in range(4)]


def fit(tmp_path, *callbacks, model=None, scores=(), ckpt_path=None, validate=True, **options):
    options.setdefault("max_epochs", len(scores) or 2)
    options.setdefault("logger", False)
    options.setdefault("num_sanity_val_steps", 0)
    options.setdefault("enable_progress_bar", False)
    options.setdefault("enable_model_summary", False)
    trainer = Trainer(
        accelerator=hardware.name(), devices=1, default_root_dir=tmp_path, callbacks=list(callbacks), **options
    )
    trainer.fit(model or Net(scores), BATCHES, BATCHES[:1] if validate else None, ckpt_path=ckpt_path)
    return trainer


class TestAnotherTrainer:
    """One callback object, several Trainers: the folds of a cross-validation."""

    def test_each_saves_and_finds_its_own_best(self, tmp_path):
        callback = ModelCheckpoint(monitor="score", save_last=True)
        for fold, scores in enumerate([[0.1, 0.2], [0.4, 0.3]]):
            fit(tmp_path / str(fold), callback, scores=scores)
            best = ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"][fold]
            assert names(tmp_path / str(fold) / "checkpoints") == [best, "last.ckpt"]
            assert callback.best_model_path == str(tmp_path / str(fold) / "checkpoints" / best)

    def test_fits_in_one_folder_keep_files(self, tmp_path):
        """Of two fits in one folder neither deletes files of the other."""
        callback = ModelCheckpoint(tmp_path)
        for _ in range(2):
            fit(tmp_path, callback, max_epochs=1)
        assert names(tmp_path) == ["epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt"]
        assert callback.best_model_path == str(tmp_path / "epoch=0-step=4-v1.ckpt")

    def test_patience_begins_anew(self, tmp_path):
        callback = EarlyStopping("score", patience=2)
        for scores in ([0.1, 0.2, 0.3, 0.4], [0.8, 0.9, 0.7, 0.6]):
            epochs = fit(tmp_path, callback, scores=scores).current_epoch
            assert (epochs, callback.stopped_epoch) == ((3, 2) if scores[0] == 0.1 else (4, 0))

    def test_one_whose_fit_is_refused_changes_nothing(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, monitor="score")
        fit(tmp_path, callback, scores=[0.1, 0.2])
        best = callback.best_model_path, callback.best_model_score
        (tmp_path / "other.ckpt").write_bytes(b"no checkpoint")
        with pytest.raises(CheckpointError):
            fit(tmp_path, callback, scores=[0.1], ckpt_path=tmp_path / "other.ckpt")
        assert (callback.best_model_path, callback.best_model_score) == best and os.path.exists(best[0])
        fit(tmp_path / "other", callback, scores=[0.5])
        assert callback.best_model_score == 0.5, "the next Trainer's fit is a new one all the same"

    @pytest.mark.parametrize("served", [False, True])
    def test_refused_fit_is_torn_down(self, tmp_path, served):
        """A refused fit tears down what its set-up made."""

        class Opens(Callback):
            def setup(self, trainer, module, stage):
                self.handle = module.register_forward_hook(lambda *_: None)

            def teardown(self, trainer, module, stage):
                self.handle.remove()
                self.ended = stage

            def on_exception(self, trainer, module, exception):
                self.exception = exception

        callback = Opens()
        if served:
            fit(tmp_path, callback, scores=[0.1])
            del callback.ended
        (tmp_path / "other.ckpt").write_bytes(b"no checkpoint")
        with pytest.raises(CheckpointError):
            fit(tmp_path, callback, scores=[0.1], ckpt_path=tmp_path / "other.ckpt")
        assert callback.ended == "fit" and isinstance(callback.exception, CheckpointError)

    @pytest.mark.slow
    def test_in_workers_too(self, tmp_path):
        callback = ModelCheckpoint(save_top_k=-1)
        for fold in ("0", "1"):
            fit(tmp_path / fold, callback, max_epochs=1, validate=False, strategy="ddp_spawn")
            assert names(tmp_path / fold / "checkpoints") == ["epoch=0-step=4.ckpt"]
            assert os.path.dirname(callback.best_model_path) == str(tmp_path / fold / "checkpoints")

    def test_a_second_fit_of_the_same_goes_on(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, monitor="score")
        model = Net([0.1, 0.2, 0.3])
        trainer = fit(tmp_path, callback, model=model)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, BATCHES, BATCHES[:1])
        assert names(tmp_path) == ["epoch=0-step=4.ckpt"]

    def test_a_checkpoint_that_leads_back_skips_no_save(self, tmp_path):
        model, back = Net(), tmp_path / "back.ckpt"
        fit(tmp_path, max_steps=2, model=model, enable_checkpointing=False).save_checkpoint(back)
        trainer = fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_top_k=-1), max_epochs=1, model=model)
        os.remove(tmp_path / "c" / "epoch=0-step=4.ckpt")
        trainer.fit(model, BATCHES, BATCHES[:1], ckpt_path=back)
        assert names(tmp_path / "c") == ["epoch=0-step=4.ckpt"]


def names(folder):
    """What is in a folder of checkpoints, but for the records of who wrote them."""
    return sorted({*os.listdir(folder)} - {".torchhal"}) if os.path.isdir(folder) else []


class TestModelCheckpoint:
    def test_the_newest_by_default(self, tmp_path):
        trainer = fit(tmp_path)
        callback = trainer.checkpoint_callback
        assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt"]
        assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=1-step=8.ckpt")
        assert callback.best_model_score is None and callback.last_model_path == ""

    @pytest.mark.parametrize(
        ("options", "kept", "best"),
        [
            ({"save_top_k": 1}, ["1"], "1"),
            ({"save_top_k": 2}, ["1", "3"], "1"),
            ({"save_top_k": 2, "mode": "max"}, ["0", "4"], "4"),
            ({"save_top_k": -1}, list("01234"), "1"),
            ({"save_top_k": 0}, [], ""),
            ({"save_top_k": -1, "every_n_epochs": 2}, ["1", "3"], "1"),
            ({"save_top_k": 2, "save_last": True}, ["1", "3", "last"], "1"),
        ],
    )
    def test_top_k(self, tmp_path, options, kept, best):
        scores = [0.5, 0.1, 0.4, 0.2, 0.9]
        callback = ModelCheckpoint(tmp_path / "c", "{epoch}", monitor="score", auto_insert_metric_name=False, **options)
        fit(tmp_path, callback, scores=scores)
        assert names(tmp_path / "c") == [f"{name}.ckpt" for name in kept]
        assert callback.best_model_path == (str(tmp_path / "c" / f"{best}.ckpt") if best else "")
        if best:
            assert float(callback.best_model_score) == pytest.approx(scores[int(best)])
            assert torch.load(callback.best_model_path, weights_only=True)["epoch"] == int(best)
        assert set(callback.best_k_models) == {str(tmp_path / "c" / f"{name}.ckpt") for name in kept if name != "last"}

    def test_save_last_links_or_saves(self, tmp_path):
        """save_last makes a second name of the newest checkpoint or a second save."""
        callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last=True)
        fit(tmp_path, callback, scores=[0.1, 0.05])
        assert os.path.samefile(tmp_path / "last.ckpt", callback.best_model_path)
        fit(
            tmp_path / "b",
            callback := ModelCheckpoint(tmp_path / "b", monitor="score", save_last=True),
            scores=[0.1, 0.5],
        )
        last = torch.load(callback.last_model_path, weights_only=True)
        assert last["epoch"] == 1 and torch.load(callback.best_model_path, weights_only=True)["epoch"] == 0
        assert names(tmp_path / "b") == ["epoch=0-step=4.ckpt", "last.ckpt"]

    def test_remote_folders(self, tmp_path, accelerator):
        import fsspec

        callback = ModelCheckpoint(f"memory://callbacks/{accelerator}", monitor="score", save_last=True)
        fit(tmp_path, callback, scores=[0.5, 0.1, 0.3])
        found = sorted(
            name.rsplit("/", 1)[1] for name in fsspec.filesystem("memory").ls(f"/callbacks/{accelerator}", detail=False)
        )
        assert found == [".torchhal", "epoch=1-step=8.ckpt", "last.ckpt"]

    def test_url_as_default_root_dir(self, tmp_path, accelerator, monkeypatch):
        """A URL for the run is for its checkpoints alone."""
        import fsspec

        monkeypatch.chdir(tmp_path)
        root = f"memory://run-{accelerator}"
        trainer = Trainer(
            accelerator=accelerator, devices=1, max_epochs=1, default_root_dir=root, enable_progress_bar=False
        )
        trainer.fit(Net(), BATCHES)
        folder = f"{root}/torchhal_logs/version_0/checkpoints"
        assert trainer.checkpoint_callback.best_model_path == f"{folder}/epoch=0-step=4.ckpt"
        assert fsspec.filesystem("memory").exists(trainer.checkpoint_callback.best_model_path)
        assert trainer.log_dir == str(tmp_path / "torchhal_logs" / "version_0")  # nobody appends to a file at a URL
        assert os.listdir(tmp_path) == ["torchhal_logs"]
        with pytest.raises(ConfigurationError, match=r"'save_dir' must be a local folder.*'memory://logs'"):
            CSVLogger("memory://logs")

    def test_files_of_other_runs_are_left_alone(self, tmp_path):
        first = ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True)
        fit(tmp_path, first, scores=[0.5, 0.1])
        before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
        assert sorted(before) == ["best.ckpt", "last.ckpt"], "an own file of the same name is replaced"
        second = ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True)
        fit(tmp_path, second, scores=[0.5, 0.1, 0.3])
        assert names(tmp_path) == ["best-v1.ckpt", "best.ckpt", "last-v1.ckpt", "last.ckpt"]
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
        third = ModelCheckpoint(tmp_path, "best", monitor="score", enable_version_counter=False)
        fit(tmp_path, third, scores=[0.5])
        assert third.best_model_path == str(tmp_path / "best.ckpt")

    def test_one_name_for_several(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, "best", monitor="score", save_top_k=2)
        fit(tmp_path, callback, scores=[0.5, 0.4, 0.3, 0.2])
        assert names(tmp_path) == ["best-v1.ckpt", "best.ckpt"]
        assert sorted(map(float, callback.best_k_models.values())) == pytest.approx([0.2, 0.3])

    def test_nan_is_kept_only_while_there_is_room(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score")
        fit(tmp_path, callback, scores=[float("nan"), 0.5, float("nan")])
        assert names(tmp_path) == ["epoch=1.ckpt"] and callback.best_model_score == 0.5

    def test_steps(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
        fit(tmp_path, callback, max_epochs=2, accumulate_grad_batches=1)
        assert names(tmp_path) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]

    def test_steps_of_several_batches_save_once(self, tmp_path):
        saved = []

        class Saver(ModelCheckpoint):
            def on_save_checkpoint(self, trainer, module, checkpoint):
                saved.append(trainer.fit_loop.total_batches)

        fit(tmp_path, Saver(tmp_path, every_n_train_steps=1), max_epochs=2, accumulate_grad_batches=2)
        assert saved == [2, 4, 6, 8]

    def test_time(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
        fit(tmp_path, callback, max_epochs=1)
        assert len(names(tmp_path)) == 4
        callback = ModelCheckpoint(tmp_path / "b", train_time_interval=timedelta(hours=1))
        fit(tmp_path, callback, max_epochs=1)
        assert names(tmp_path / "b") == []

    def test_several_validations_per_epoch(self, tmp_path):
        by_score = ModelCheckpoint(tmp_path / "a", monitor="score", save_top_k=-1)
        newest = ModelCheckpoint(tmp_path / "b", save_top_k=-1)
        fit(tmp_path, by_score, newest, max_epochs=1, val_check_interval=2)
        assert names(tmp_path / "a") == names(tmp_path / "b") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]

    def test_rare_validations(self, tmp_path):
        by_score = ModelCheckpoint(tmp_path / "a", "{epoch}", monitor="score", save_top_k=-1)
        newest = ModelCheckpoint(tmp_path / "b", "{epoch}", save_top_k=-1)
        fit(tmp_path, by_score, newest, max_epochs=3, check_val_every_n_epoch=2)
        assert names(tmp_path / "a") == ["epoch=1.ckpt"]
        assert names(tmp_path / "b") == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]

    def test_without_validation(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, "{epoch}-{loss:.1f}", monitor="loss", save_top_k=-1)
        fit(tmp_path, callback, validate=False)
        assert len(names(tmp_path)) == 2

    def test_weights_only(self, tmp_path):
        fit(tmp_path, ModelCheckpoint(tmp_path, "w", save_weights_only=True))
        assert "optimizer_states" not in torch.load(tmp_path / "w.ckpt", weights_only=True)

    def test_an_unknown_monitor_lists_the_known(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"monitors 'val_score'.*'loss', 'score'"):
            fit(tmp_path, ModelCheckpoint(tmp_path, monitor="val_score"))
        with pytest.raises(ConfigurationError, match=r"monitors 'score'.*'loss'"):
            fit(tmp_path, ModelCheckpoint(tmp_path, monitor="score"), validate=False)
        with pytest.raises(ConfigurationError, match=r"'val'.*not known.*'epoch'"):
            fit(tmp_path, ModelCheckpoint(tmp_path, "{val}"))
        assert names(tmp_path) == []

    def test_a_monitor_that_comes_later(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, monitor="score", every_n_train_steps=3)
        with pytest.warns(UserWarning, match="'score'.*before the first validation"):
            fit(tmp_path, callback, max_epochs=2)
        assert names(tmp_path) == ["epoch=1-step=6.ckpt"]

    def test_a_trial_run_keeps_nothing(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        fit(tmp_path, callback, fast_dev_run=True)
        assert names(tmp_path) == []

    def test_a_sanity_check_saves_nothing(self, tmp_path):
        class Look(Callback):
            def on_sanity_check_end(self, trainer, module):
                assert names(tmp_path) == []

        callback = ModelCheckpoint(tmp_path, monitor="score", save_on_train_epoch_end=False)
        fit(tmp_path, callback, Look(), num_sanity_val_steps=1)
        assert len(names(tmp_path)) == 1

    def test_validate_and_test_save_nothing(self, tmp_path):
        trainer = fit(tmp_path, callback := ModelCheckpoint(tmp_path / "c", save_top_k=-1))
        before = names(tmp_path / "c")
        trainer.validate(dataloaders=BATCHES, verbose=False)
        trainer.test(dataloaders=BATCHES, verbose=False, ckpt_path="best")
        assert names(tmp_path / "c") == before and callback.best_model_path

    def test_loggers_hear_of_it(self, tmp_path):
        heard = []

        class Listener(Logger):
            def log_metrics(self, metrics, step=None): ...

            def after_save_checkpoint(self, checkpoint_callback):
                heard.append(checkpoint_callback.best_model_path)

        fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), logger=Listener())
        assert heard == [str(tmp_path / "epoch=0.ckpt"), str(tmp_path / "epoch=1.ckpt")]


class Failing(TorchCheckpointIO):
    """Raises at the n-th save."""

    def __init__(self, fail_at):
        super().__init__()
        self.saves, self.fail_at = 0, fail_at

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.saves += 1
        if self.saves == self.fail_at:
            raise CheckpointError("disk full")
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


class TestDurability:
    def test_a_failed_save_costs_nothing_that_was_kept(self, tmp_path):
        callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last=True)
        with pytest.raises(CheckpointError, match="disk full"):
            fit(tmp_path, callback, scores=[0.5, 0.4, 0.3], plugins=[Failing(3)])
        assert names(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]
        assert callback.best_model_path == str(tmp_path / "epoch=1.ckpt")
        assert os.path.samefile(callback.last_model_path, callback.best_model_path)

    def test_the_old_goes_after_the_new_is_there(self, tmp_path):
        seen = []

        class Watching(TorchCheckpointIO):
            def remove_checkpoint(self, path):
                seen.append((os.path.basename(path), names(tmp_path)))
                super().remove_checkpoint(path)

        fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=3, plugins=[Watching()])
        assert seen == [
            ("epoch=0.ckpt", ["epoch=0.ckpt", "epoch=1.ckpt"]),
            ("epoch=1.ckpt", ["epoch=1.ckpt", "epoch=2.ckpt"]),
        ]

    def test_failed_removal_is_retried(self, tmp_path):
        """The removal of an old file that failed is tried again."""
        with pytest.warns(UserWarning, match="busy"):
            fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=3, plugins=[Stubborn()])
        assert names(tmp_path) == ["epoch=2.ckpt"]

    def test_async_save_replaces_when_durable(self, tmp_path):
        """An asynchronous save replaces nothing before it is durable."""
        log = []

        class Later(TorchCheckpointIO):
            """Writes when waited for, as one whose disk is slow."""

            features = TorchCheckpointIO.features | {"async"}

            def __init__(self):
                super().__init__()
                self.pending = []

            def save_checkpoint(self, checkpoint, path, *, storage_options=None):
                self.pending.append((checkpoint, path))

            def wait(self):
                for checkpoint, path in self.pending:
                    log.append(f"durable {os.path.basename(path)}")
                    super().save_checkpoint(checkpoint, path)
                self.pending.clear()

            def remove_checkpoint(self, path):
                log.append(f"remove {os.path.basename(path)}")
                super().remove_checkpoint(path)

        fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=3, plugins=[Later()])
        assert log == [
            "durable epoch=0.ckpt",
            "durable epoch=1.ckpt",
            "remove epoch=0.ckpt",
            "durable epoch=2.ckpt",
            "remove epoch=1.ckpt",
        ]


class TestResume:
    scores = [0.5, 0.4, 0.3, 0.6, 0.2]

    def callbacks(self, folder):
        return ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True), EarlyStopping("score")

    def test_resumed_run_keeps_own_files(self, tmp_path):
        """A resumed run continues with its own files."""
        whole, stopper = self.callbacks(tmp_path / "whole")
        fit(tmp_path, whole, stopper, scores=self.scores)
        first, _ = self.callbacks(tmp_path / "parts")
        fit(tmp_path, first, EarlyStopping("score"), scores=self.scores, max_epochs=3)
        second, resumed_stopper = self.callbacks(tmp_path / "parts")
        fit(tmp_path, second, resumed_stopper, scores=self.scores, ckpt_path="last")
        assert names(tmp_path / "parts") == names(tmp_path / "whole") == ["epoch=2.ckpt", "epoch=4.ckpt", "last.ckpt"]
        assert [os.path.basename(path) for path in second.best_k_models] == ["epoch=2.ckpt", "epoch=4.ckpt"]
        assert second.best_model_score == whole.best_model_score
        assert resumed_stopper.state_dict() == stopper.state_dict()

    def test_in_another_folder_nothing_is_deleted(self, tmp_path):
        first, _ = self.callbacks(tmp_path / "a")
        fit(tmp_path, first, scores=self.scores, max_epochs=3)
        before = names(tmp_path / "a")
        second, _ = self.callbacks(tmp_path / "b")
        fit(tmp_path, second, scores=[0.5, 0.4, 0.3, 0.6, 0.7], ckpt_path=first.last_model_path)
        assert names(tmp_path / "a") == before
        assert names(tmp_path / "b") == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]
        assert second.best_model_path == str(tmp_path / "a" / "epoch=2.ckpt"), "still the best of the run"

    def test_doomed_file_removed_after_resume(self, tmp_path):
        """A file that a killed run could not delete is deleted by the run that resumes it."""

        class Killed(BaseException):
            pass

        class Dies(TorchCheckpointIO):
            def remove_checkpoint(self, path):
                raise Killed

        with contextlib.suppress(Killed):
            fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=3, plugins=[Dies()])
        assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=3, ckpt_path=tmp_path / "epoch=1.ckpt")
        assert names(tmp_path) == ["epoch=2.ckpt"]

    @pytest.mark.parametrize("save_last", [False, True])
    def test_a_signal_leaves_one_to_resume_from(self, tmp_path, save_last):
        class Interrupt(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if trainer.global_step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)

        def saver():
            return ModelCheckpoint(tmp_path, "{epoch}", save_last=save_last)

        with pytest.raises(SystemExit) as exit:
            fit(tmp_path, saver(), Interrupt())
        assert exit.value.code == 128 + signal.SIGTERM
        extra = "last.ckpt" if save_last else "interrupted-epoch=1-step=6.ckpt"
        assert names(tmp_path) == ["epoch=0.ckpt", extra]
        assert torch.load(tmp_path / extra, weights_only=True)["global_step"] == 6
        trainer = fit(tmp_path, saver(), ckpt_path="last")
        assert trainer.global_step == 8
        assert names(tmp_path) == ["epoch=1.ckpt", *(["last.ckpt"] if save_last else [])]


class TestEarlyStopping:
    def test_it_ends_training(self, tmp_path):
        callback = EarlyStopping("score", patience=2)
        trainer = fit(tmp_path, callback, scores=[0.5, 0.6, 0.4, 0.4, 0.7, 0.1, 0.0])
        assert (trainer.current_epoch, callback.stopped_epoch, callback.wait_count) == (5, 4, 2)
        assert float(callback.best_score) == pytest.approx(0.4) and trainer.should_stop

    def test_after_validations(self, tmp_path):
        callback = EarlyStopping("score", patience=2, check_on_train_epoch_end=False)
        trainer = fit(tmp_path, callback, scores=[0.5] * 9, val_check_interval=2)
        assert trainer.current_epoch == 1 and callback.wait_count >= 2

    def test_min_epochs_wins(self, tmp_path):
        trainer = fit(tmp_path, EarlyStopping("score", patience=1), scores=[0.5] * 9, min_epochs=4)
        assert trainer.current_epoch == 4

    def test_missing_values(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"EarlyStopping monitors 'nope'.*'loss', 'score'"):
            fit(tmp_path, EarlyStopping("nope"))
        with pytest.warns(UserWarning, match="'nope' was not logged"):
            assert fit(tmp_path, EarlyStopping("nope", strict=False)).current_epoch == 2

    def test_it_says_why(self, tmp_path, capsys):
        fit(tmp_path, EarlyStopping("score", verbose=True), scores=[0.5, float("nan")])
        assert capsys.readouterr().out.splitlines() == [
            "score: improved to 0.5",
            "score: stopping, as it is nan; the best was 0.5",
        ]


class Recording(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


class TestLearningRateMonitor:
    def test_an_interval_decides_when(self, tmp_path):
        for interval, steps in (("step", [0, 2, 4, 6]), ("epoch", [0, 4]), (None, [0, 4])):
            logger = Recording()
            fit(tmp_path, LearningRateMonitor(interval), logger=logger, log_every_n_steps=2, enable_checkpointing=False)
            assert [step for step, row in logger.rows if "lr-SGD" in row] == steps

    def test_names_and_values(self, tmp_path):
        logger = Recording()
        monitor = LearningRateMonitor("step", log_momentum=True)
        trainer = fit(
            tmp_path,
            monitor,
            model=Grouped(),
            logger=logger,
            log_every_n_steps=1,
            max_epochs=1,
            enable_checkpointing=False,
        )
        rows = [row for _, row in logger.rows if "lr-SGD/pg1" in row]
        assert [row["lr-SGD/pg1"] for row in rows] == pytest.approx([0.5, 0.25, 0.5 / 3, 0.125])
        assert rows[0]["lr-SGD/pg1-momentum"] == 0.9 and rows[0]["lr-SGD/pg2-momentum"] == 0.0
        assert float(trainer.callback_metrics["lr-SGD/pg2"]) == pytest.approx(0.1 / 4)

    def test_the_name_of_a_schedule(self, tmp_path):
        logger = Recording()
        fit(
            tmp_path,
            LearningRateMonitor(),
            model=Grouped(name="rate"),
            logger=logger,
            log_every_n_steps=1,
            max_epochs=1,
        )
        assert any("rate/pg1" in row for _, row in logger.rows)

    def test_without_a_logger(self, tmp_path):
        with pytest.raises(ConfigurationError, match="LearningRateMonitor needs a logger"):
            fit(tmp_path, LearningRateMonitor())


class Grouped(Net):
    """Two parameter groups with a schedule per step."""

    def __init__(self, name=None):
        super().__init__()
        self.name = name

    def configure_optimizers(self):
        weight = {"params": [self.layer.weight], "lr": 0.5, "momentum": 0.9}
        optimizer = torch.optim.SGD([weight, {"params": [self.layer.bias]}], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": self.name}]


class TestProgressBar:
    def test_text(self, tmp_path, capsys):
        trainer = fit(tmp_path, enable_progress_bar=True, num_sanity_val_steps=1, scores=[0.25, 0.125])
        trainer.validate(dataloaders=BATCHES, verbose=False)
        trainer.test(dataloaders=BATCHES, verbose=False)
        trainer.predict(dataloaders=BATCHES)
        text = capsys.readouterr().err
        assert "\r" not in text and "\x1b" not in text, "whole lines, for a file"
        lines = [line for line in text.splitlines() if not line.startswith("torchhal: ")]
        titles = ["Epoch 0", "Epoch 1", "Validating", "Testing", "Predicting"]
        assert [line.partition(": 100% 4/4, ")[0] for line in lines] == titles, "none for a fit's validations"
        last_epoch = lines[1]
        assert "batches/s" in last_epoch and "score=0.125" in last_epoch and "loss=" in last_epoch

    def test_values_fetched_per_drawing(self, tmp_path):
        """Values are fetched from the device only when the bar is drawn."""
        fetched = []

        class Counting(Net):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                fetched.append(self.trainer.progress_bar_callback._next_draw)
                return loss

        fit(tmp_path, enable_progress_bar=True, model=Counting(), validate=False, max_epochs=1)
        assert len(set(fetched)) == 1, "four batches within an interval draw nothing"

    def test_bars_on_a_terminal(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        fit(tmp_path, enable_progress_bar=True, num_sanity_val_steps=1)
        text = capsys.readouterr().err
        for title in ("Sanity check", "Epoch 0", "Epoch 1", "Validating"):
            assert f"{title}: 100%" in text, title
        assert "\r" in text

    def test_lines_come_more_and_more_seldom(self, tmp_path, capsys, monkeypatch):
        """A line at 5, 10, 20, 40 and 80 s, then each minute."""
        now = [0.0]
        monkeypatch.setattr("torchhal.trainer.callbacks.progress.time.monotonic", lambda: now[0])

        class Slow(Net):
            def training_step(self, batch, batch_idx):
                now[0] += 1
                return super().training_step(batch, batch_idx)

        where = {"accelerator": hardware.name(), "devices": 1, "default_root_dir": tmp_path, "logger": False}
        Trainer(callbacks=ProgressBar(), max_epochs=1, enable_checkpointing=False, **where).fit(Slow(), BATCHES * 75)
        done = re.findall(r"(\d+)/300", capsys.readouterr().err)
        assert done == ["5", "10", "20", "40", "80", "140", "200", "260", "300"]

    def test_switched_off(self, tmp_path, capsys):
        bar = ProgressBar()
        bar.disable()
        fit(tmp_path, bar)
        fit(tmp_path, ProgressBar(refresh_rate=0))
        assert capsys.readouterr().err == ""

    def test_an_error_closes_it(self, tmp_path):
        class Breaks(Net):
            def training_step(self, batch, batch_idx):
                raise RuntimeError("broken")

        bar = ProgressBar()
        with pytest.raises(RuntimeError, match="broken"):
            fit(tmp_path, bar, model=Breaks())
        assert bar._train is None and bar._evaluation is None

    def test_prints_go_above(self, tmp_path, capsys):
        class Talks(Net):
            def training_step(self, batch, batch_idx):
                self.print("hello", batch_idx)
                return super().training_step(batch, batch_idx)

        fit(tmp_path, enable_progress_bar=True, model=Talks(), max_epochs=1)
        assert [line for line in capsys.readouterr().out.splitlines() if line] == [
            f"hello {index}" for index in range(4)
        ]

    def test_a_loader_without_length(self, tmp_path, capsys):
        trainer = Trainer(accelerator=hardware.name(), devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
        trainer.fit(Net(), Stream())
        assert "Epoch 0: 4it" in capsys.readouterr().err


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(BATCHES)


def test_summary_once(tmp_path, capsys):
    fit(tmp_path, ModelSummary())
    out = capsys.readouterr().out
    assert out.count("3 trainable parameters") == 1 and "layer  Linear" in out


class OnRanks(Net):
    """What each rank sees differs; what they do must not."""

    def validation_step(self, batch, batch_idx):
        rank = self.trainer.global_rank
        scores = [[0.5, 0.4, 0.45, 0.46, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5]][rank]
        self.log("score", scores[self.trainer.current_epoch], sync_dist=False)


class Stubborn(TorchCheckpointIO):
    """The first removal fails."""

    refused = 0

    def remove_checkpoint(self, path):
        self.refused += 1
        if self.refused == 1:
            raise CheckpointError("busy")
        super().remove_checkpoint(path)


def test_ranks_never_disagree(tmp_path):
    callback = ModelCheckpoint(
        tmp_path / "c", "{epoch}", monitor="score", save_last=True, train_time_interval=None, every_n_epochs=1
    )
    timed = ModelCheckpoint(tmp_path / "t", train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    trainer = Trainer(
        accelerator=hardware.name(),
        strategy="ddp_spawn",
        devices=2,
        max_epochs=5,
        default_root_dir=tmp_path,
        logger=CSVLogger(tmp_path),
        callbacks=[callback, timed, EarlyStopping("score", patience=2)],
        plugins=[Stubborn()],  # only rank 0 removes files, and every rank knows which are still there
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=4)
    trainer.fit(OnRanks(), data, data)
    assert trainer.current_epoch == 4, "rank 0's values decide"
    assert names(tmp_path / "c") == ["epoch=1.ckpt", "last.ckpt"]
    assert float(callback.best_model_score) == pytest.approx(0.4)
    assert len(names(tmp_path / "t")) == 8
    assert names(trainer.logger.log_dir) == ["metrics.csv", "run.json"]


def test_two_model_checkpoints_in_two_folders(tmp_path):
    savers = [ModelCheckpoint(tmp_path / name) for name in "ab"]
    trainer = Trainer(callbacks=savers, accelerator="cpu", logger=False)
    assert trainer.checkpoint_callbacks == savers
    with pytest.raises(ConfigurationError, match="differ in nothing"):
        Trainer(callbacks=[ModelCheckpoint(tmp_path), ModelCheckpoint(tmp_path)], accelerator="cpu", logger=False)
