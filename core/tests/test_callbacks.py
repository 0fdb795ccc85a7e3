"""Callbacks by themselves: arguments, names, decisions. With a Trainer: test_callbacks_trainer.py."""

import os
import pickle
import shutil
from datetime import timedelta

import pytest
import torch
from torch import nn

from torchhal._overrides import overrides
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.trainer._shared_clock import SharedClock
from torchhal.trainer.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)
from torchhal.trainer.callbacks._checkpoint_files import earlier_runs, normal_folder
from torchhal.trainer.callbacks.summary import summarize


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": True}, "'save_top_k' must be an int"),
        ({"save_top_k": -2}, "'save_top_k' must be"),
        ({"save_top_k": 1.5}, "'save_top_k' must be"),
        ({"save_top_k": 2}, "'save_top_k' must be -1, 0 or 1 without 'monitor'"),
        ({"mode": "lowest"}, "'mode' must be 'min' or 'max'.*lowest"),
        ({"monitor": 3}, "'monitor' must be a non-empty str or None"),
        ({"monitor": ""}, "'monitor' must be"),
        ({"every_n_epochs": -1}, "'every_n_epochs' must be"),
        ({"every_n_train_steps": True}, "'every_n_train_steps' must be"),
        ({"train_time_interval": 3}, "'train_time_interval' must be"),
        ({"train_time_interval": timedelta(0)}, "'train_time_interval' must be"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "at most one of .*every_n_train_steps, every_n_epochs"),
        ({"filename": "a/b"}, "'filename' must be a name without folders"),
        ({"filename": "{epoch"}, "'filename' must have its keys in braces"),
        ({"filename": "{}"}, "'filename' must have its keys in braces"),
        ({"filename": ""}, "'filename' must be"),
        ({"filename": "last", "save_last": True}, "'filename' must not be 'last'"),
        ({"save_last": "link"}, "'save_last' must be a bool"),
        ({"save_weights_only": 1}, "'save_weights_only' must be a bool"),
        ({"dirpath": 3}, "'dirpath' must be a path"),
    ],
)
def test_wrong_arguments_of_model_checkpoint(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ModelCheckpoint(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(None), "'monitor' must be a non-empty str "),
        (lambda: EarlyStopping("x", patience=True), "'patience' must be"),
        (lambda: EarlyStopping("x", patience=-1), "'patience' must be"),
        (lambda: EarlyStopping("x", min_delta=-1.0), "'min_delta' must be 0 or more"),
        (lambda: EarlyStopping("x", min_delta="1"), "'min_delta' must be a number"),
        (lambda: EarlyStopping("x", mode="auto"), "'mode' must be"),
        (lambda: EarlyStopping("x", stopping_threshold=float("nan")), "'stopping_threshold' must be"),
        (lambda: LearningRateMonitor("batch"), "'logging_interval' must be 'step', 'epoch' or None"),
        (lambda: ProgressBar(refresh_rate=-1), "'refresh_rate' must be"),
        (lambda: ModelSummary(max_depth=True), "'max_depth' must be"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_batch_hooks_only_for_triggers():
    """No hook of a callback is called per batch unless a trigger needs it."""

    def per_batch(callback):
        return {name for name in dir(Callback) if "batch" in name and overrides(callback, Callback, name)}

    assert per_batch(ModelCheckpoint()) == per_batch(EarlyStopping("x")) == per_batch(ModelSummary()) == set()
    assert per_batch(ModelCheckpoint(every_n_epochs=2)) == set()
    assert per_batch(ModelCheckpoint(every_n_train_steps=2)) == {"on_train_batch_end"}
    assert per_batch(ModelCheckpoint(train_time_interval=timedelta(1))) == {"on_train_batch_end"}
    assert per_batch(LearningRateMonitor("epoch")) == set()
    assert per_batch(LearningRateMonitor("step")) == {"on_train_batch_start"}


def test_callbacks_travel_to_other_processes():
    for callback in (ModelCheckpoint(every_n_train_steps=2), LearningRateMonitor(), ProgressBar(), EarlyStopping("x")):
        copy = pickle.loads(pickle.dumps(callback))
        hook = getattr(copy, "on_train_batch_end", None)
        assert hook is None or hook.__self__ is copy


def test_state_keys_tell_callbacks_apart():
    keys = {
        ModelCheckpoint(monitor="a").state_key,
        ModelCheckpoint(monitor="a", mode="max").state_key,
        ModelCheckpoint(monitor="b").state_key,
        ModelCheckpoint(every_n_train_steps=3).state_key,
        ModelCheckpoint(filename="x").state_key,
        EarlyStopping("a").state_key,
        EarlyStopping("b").state_key,
    }
    assert len(keys) == 7
    assert ModelCheckpoint(monitor="a").state_key == ModelCheckpoint(monitor="a").state_key


class TestNames:
    values = {"epoch": 3, "step": 120, "val/loss": torch.tensor(0.123456), "acc": torch.tensor(2)}

    @pytest.mark.parametrize(
        ("pattern", "name"),
        [
            (None, "epoch=3-step=120.ckpt"),
            ("{epoch:03d}-{val/loss:.2f}", "epoch=003-val_loss=0.12.ckpt"),
            ("best {acc}", "best acc=2.ckpt"),
            ("plain", "plain.ckpt"),
        ],
    )
    def test_patterns(self, pattern, name):
        assert ModelCheckpoint(filename=pattern).format_checkpoint_name(self.values) == name

    def test_names_may_be_left_out(self):
        callback = ModelCheckpoint(filename="m-{epoch}-{val/loss:.1f}", auto_insert_metric_name=False)
        assert callback.format_checkpoint_name(self.values) == "m-3-0.1.ckpt"
        assert callback.format_checkpoint_name(self.values, ver=2) == "m-3-0.1-v2.ckpt"

    def test_an_unknown_key_lists_the_known(self):
        with pytest.raises(ConfigurationError, match=r"'val_loss'.*not known.*'acc', 'epoch', 'step', 'val/loss'"):
            ModelCheckpoint(filename="{val_loss}").format_checkpoint_name(self.values)

    def test_a_format_that_does_not_fit(self):
        with pytest.raises(ConfigurationError, match="can't format epoch=3 with '%Y'"):
            ModelCheckpoint(filename="{epoch:%Y}").format_checkpoint_name(self.values)

    def test_folders(self, tmp_path):
        assert normal_folder("s3://bucket/x/") == "s3://bucket/x"
        assert normal_folder("x") == os.path.abspath("x")
        for version in (0, 1, 3, 12):
            (tmp_path / f"version_{version}").mkdir()
        found = earlier_runs(str(tmp_path / "version_12" / "checkpoints"))
        assert found == [str(tmp_path / f"version_{version}" / "checkpoints") for version in (3, 1, 0)]
        assert earlier_runs(str(tmp_path)) == []


def test_link_checkpoint_is_atomic(tmp_path, monkeypatch):
    """A link replaces its target in one step and leaves nothing behind."""
    io = TorchCheckpointIO()
    source, target = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    source.write_text("new")
    target.write_text("old")
    assert io.link_checkpoint(source, target) and io.link_checkpoint(source, target)
    assert target.read_text() == "new" and os.path.samefile(source, target)
    source.unlink()
    assert target.read_text() == "new"
    assert not io.link_checkpoint(tmp_path / "missing", target)
    assert not io.link_checkpoint("memory://a", "memory://b") and not io.link_checkpoint(target, "memory://b")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    # a file system without links, and then one that is full
    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError("no links here")))
    assert io.link_checkpoint(target, tmp_path / "b.ckpt")
    assert not os.path.samefile(target, tmp_path / "b.ckpt") and (tmp_path / "b.ckpt").read_text() == "new"
    monkeypatch.setattr(shutil, "copyfile", lambda *names: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(CheckpointError, match=r"b\.ckpt' could not become a second name .*disk is full"):
        io.link_checkpoint(tmp_path / "last.ckpt", tmp_path / "b.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.ckpt", "last.ckpt"]


class TestPlaces:
    """Which of a sequence of scores are kept."""

    @staticmethod
    def keep(callback, scores):
        for index, score in enumerate(scores):
            save, evicted = callback._kept.place(score, callback.mode, callback.save_top_k)
            if save:
                callback.current_score = torch.tensor(score)
                callback._keep(f"{index}", evicted)
        return sorted(callback.best_k_models), callback.best_model_path, callback._kept.superseded

    def test_min_and_max(self):
        scores = [3.0, 1.0, 2.0, 5.0, 0.0]
        assert self.keep(ModelCheckpoint(monitor="x", save_top_k=2), scores) == (["1", "4"], "4", ["0", "2"])
        assert self.keep(ModelCheckpoint(monitor="x", save_top_k=2, mode="max"), scores) == (
            ["0", "3"],
            "3",
            ["1", "2"],
        )
        assert self.keep(ModelCheckpoint(monitor="x", save_top_k=-1), scores)[0] == list("01234")

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_nan_is_never_best_and_goes_first(self, mode):
        nan = float("nan")
        assert self.keep(ModelCheckpoint(monitor="x", mode=mode), [nan]) == (["0"], "", [])
        assert self.keep(ModelCheckpoint(monitor="x", mode=mode), [nan, 1.0, nan]) == (["1"], "1", ["0"])
        two = ModelCheckpoint(monitor="x", mode=mode, save_top_k=2)
        assert self.keep(two, [1.0, nan, 2.0])[0] == ["0", "2"]

    def test_the_first_of_equals_stays(self):
        assert self.keep(ModelCheckpoint(monitor="x"), [1.0, 1.0]) == (["0"], "0", [])


class TestJudging:
    def judge(self, values, **options):
        callback = EarlyStopping("x", **options)
        return [bool(callback._judge(value)) for value in values], callback

    def test_patience(self):
        assert self.judge([1.0, 2.0, 0.5, 0.6, 0.7], patience=2)[0] == [False] * 4 + [True]
        assert self.judge([1.0, 1.0], patience=1)[0] == [False, True]
        assert self.judge([1.0, 2.0, 3.0, 2.0], patience=1, mode="max")[0] == [False, False, False, True]

    def test_min_delta(self):
        stops, callback = self.judge([1.0, 0.95, 0.5], patience=2, min_delta=0.1)
        assert stops == [False, False, False] and callback.best_score == 0.5

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, value):
        assert self.judge([value])[0] == [True]
        assert self.judge([value], check_finite=False)[0] == [False]

    def test_thresholds(self):
        stops, callback = self.judge([1.0, 0.1], stopping_threshold=0.2)
        assert stops == [False, True] and callback.best_score == pytest.approx(0.1)
        assert self.judge([1.0, 9.0], divergence_threshold=5.0)[0] == [False, True]
        assert self.judge([1.0, 0.5], divergence_threshold=0.7, mode="max")[0] == [False, True]


def test_a_clock_asks_seldom_and_all_ranks_alike(monkeypatch):
    """A step takes a second, the interval is 1000: rank 0's answers decide on both ranks."""
    now = 0.0
    monkeypatch.setattr("torchhal.trainer._shared_clock.time.monotonic", lambda: now)

    class Rank:
        world_size = 2
        said: list = []

        def __init__(self, rank):
            self.rank, self.heard = rank, 0

        def broadcast(self, value):
            if self.rank == 0:
                self.said.append(value)
            self.heard += 1
            return self.said[self.heard - 1]

    ranks = [(SharedClock(1000.0), Rank(0)), (SharedClock(1000.0), Rank(1))]
    due_at = [[], []]
    for clock, _ in ranks:
        clock.start(0)
    for step in range(1, 1100):
        for index, (clock, rank) in enumerate(ranks):
            now = float(step) * (1 + 0.3 * index)  # the second rank's clock runs fast and has no say
            if not due_at[index] and step >= clock.next_look and clock.is_due(step, rank):
                due_at[index].append(step)
    assert due_at == [[1000], [1000]] and ranks[0][1].heard < 15


def test_summary():
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 1))
    model.head = nn.Linear(1, 1)
    model.head.requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(3))
    text = summarize(model)
    assert "body   Sequential       1,201" in text and "(own)  " in text and "body.0" not in text
    assert text.endswith("1,204 trainable parameters, 2 frozen, 4.7 KiB")
    assert summarize(nn.Linear(1, 1)) == "2 trainable parameters, 0 frozen, 8 bytes"
    assert "body.0" in summarize(model, 2)


def test_summary_of_shared_and_lazy_layers():
    """The summary counts shared layers once and lazy ones not at all."""
    shared = nn.Linear(3, 3)
    assert summarize(nn.Sequential(shared, shared)).splitlines()[-1].startswith("12 trainable")
    lazy = summarize(nn.Sequential(nn.LazyLinear(3)))
    assert "?" in lazy and "first batch" in lazy
