"""Test that arguments of the Trainer and of its methods outside their domain are refused by name."""

import pytest
import torch
from minimal_net import BATCHES, INF, NAN, Net, refuse_to_start
from quiet_trainer import QUIET, make

from torchhal import Callback, Trainer
from torchhal.errors import (
    ConfigurationError,
    UnknownAliasError,
)
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.loggers import CSVLogger

COUNT = (True, False, 1.5, -2, "", "3", NAN, INF, [1])
LIMIT = (True, False, 1.5, -2, -0.5, "", NAN, INF, "all")
BOOL_OR_NONE = (0, 1, "", "yes", 1.0)
BOOL = (*BOOL_OR_NONE, None)
OUT_OF_DOMAIN = {
    "max_epochs": COUNT,
    "min_epochs": (*COUNT, -1),
    "max_steps": (*COUNT, None),
    "min_steps": (*COUNT, -1),
    "max_time": (True, 5, 1.5, -2, "", "1:2", "00:00:00:00", "0:0:0:-5", {}, {"hours": -1}, {"weeks_": 1},
                 {"hours": "x"}, {"hours": NAN}, {"days": 1e30}, NAN),
    "limit_train_batches": LIMIT,
    "limit_val_batches": LIMIT,
    "limit_test_batches": LIMIT,
    "limit_predict_batches": LIMIT,
    "overfit_batches": (*LIMIT, None),
    "fast_dev_run": (1.5, -2, "", NAN, None, "yes"),
    "val_check_interval": (*LIMIT, 0, 0.0),
    "check_val_every_n_epoch": (*COUNT, 0, -1),
    "num_sanity_val_steps": COUNT,
    "accumulate_grad_batches": (*COUNT, 0, None, {0: 2}),
    "gradient_clip_val": (True, -1, NAN, INF, "", "0.5"),
    "gradient_clip_algorithm": (True, "", "Norm", 2),
    "log_every_n_steps": (*COUNT, -1),
    "enable_checkpointing": BOOL_OR_NONE,
    "enable_progress_bar": BOOL_OR_NONE,
    "enable_model_summary": BOOL_OR_NONE,
    "use_distributed_sampler": BOOL,
    "inference_mode": BOOL,
    "detect_anomaly": BOOL,
    "reload_dataloaders_every_n_epochs": (*COUNT, None, -1),
    "deterministic": (0, 1, 1.0, "", "Warn"),
    "benchmark": (0, 1, "", "yes"),
    "default_root_dir": (True, 5, "", b"x", 1.5),
    "logger": (5, 1.5, [True], ...),
    "callbacks": (5, [None], Callback, [Callback], ...),
    "num_nodes": (True, 1.5, -2, 0, "", NAN, None),
    "devices": (True, 1.5, -2, 0, "", "x", NAN, [], [-1], [0, 0], [True], None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in OUT_OF_DOMAIN.items() for value in values],
    ids=lambda part: repr(part) if not isinstance(part, str) else part or "''",
)
def test_an_argument_out_of_its_domain(name, value):
    with pytest.raises(ConfigurationError) as caught:
        Trainer(**{"accelerator": "cpu", **QUIET, name: value})
    message = str(caught.value)
    shown = value[0] if name in ("logger", "callbacks") and isinstance(value, list) else value
    assert f"'{name}'" in message or f"{name}=" in message, message
    assert repr(shown) in message, message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_epochs": 3, "max_epochs": 2}, r"'min_epochs' must be at most 'max_epochs' \(got 3 and 2\)"),
        ({"min_steps": 3, "max_steps": 2}, r"'min_steps' must be at most 'max_steps' \(got 3 and 2\)"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, r"'val_check_interval' must be a number"),
        ({"nonsense": 1}, r"unexpected keyword argument 'nonsense'"),
        (
            {"enable_checkpointing": False, "callbacks": ModelCheckpoint()},
            r"'enable_checkpointing' is False, but 'callbacks' holds a ModelCheckpoint: leave one out",
        ),
    ],
)
def test_arguments_that_exclude_each_other(options, message):
    with pytest.raises((ConfigurationError, TypeError), match=message):
        Trainer(**{"accelerator": "cpu", **QUIET, **options})


def test_none_and_zero_as_lightning_takes_them():
    trainer = Trainer(
        accelerator="cpu", logger=None, enable_checkpointing=None, enable_progress_bar=None, enable_model_summary=None,
        deterministic=None, benchmark=None, gradient_clip_val=None, gradient_clip_algorithm=None, precision=None,
        plugins=None, callbacks=None, max_time=None, num_sanity_val_steps=None, log_every_n_steps=None,
    )  # fmt: skip
    default = Trainer(accelerator="cpu")
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert [type(callback) for callback in trainer.callbacks] == [type(callback) for callback in default.callbacks]
    assert (trainer.deterministic, trainer.gradient_clip_val) == (False, None)
    assert make(gradient_clip_val=0).gradient_clip_val is None is make(gradient_clip_val=0.0).gradient_clip_val


@pytest.mark.usefixtures("accelerator")
def test_a_clip_of_zero_clips_nothing():
    """It is no clip to a norm of zero, with which nothing would move."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    for model, clip in zip(models, (None, 0), strict=True):
        make(gradient_clip_val=clip).fit(model, BATCHES)
    assert torch.equal(models[0].layer.weight, models[1].layer.weight)


def test_numbers_of_numpy_are_numbers():
    import numpy

    trainer = make(max_epochs=numpy.int64(2), limit_train_batches=numpy.float64(0.5), max_steps=numpy.int32(9))
    assert (trainer.max_epochs, trainer.limit_train_batches, trainer.max_steps) == (2, 0.5, 9)
    assert type(trainer.max_epochs) is int
    with pytest.raises(ConfigurationError, match="'max_epochs'"):
        make(max_epochs=numpy.bool_(True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.save_checkpoint(3), r"'filepath' must be a path \(got 3\)"),
        (lambda t: Net().clip_gradients(None, "1"), r"'gradient_clip_val' must be a positive number.*\(got '1'\)"),
        (lambda t: Net().clip_gradients(None, -1.0), r"'gradient_clip_val' must be a positive number.*\(got -1.0\)"),
        (lambda t: Net().clip_gradients(None, 1.0, "l2"), r"'gradient_clip_algorithm' must be 'norm' or 'value'"),
        (lambda t: t.save_checkpoint(b"x"), r"'filepath' must be a path \(got b'x'\)"),
        (lambda t: t.save_checkpoint(""), r"'filepath' must be a path \(got ''\)"),
        (lambda t: t.save_checkpoint("x", 3), r"'weights_only' must be a bool \(got 3\)"),
        (lambda t: t.save_checkpoint("x", True, 3), r"'storage_options' must be a dict .*\(got 3\)"),
        (lambda t: t.save_checkpoint("x", True, {1: 2}), r"'storage_options' must be a dict .*\(got \{1: 2\}\)"),
        (lambda t: t.validate(Net(), BATCHES, verbose=3), r"'verbose' must be a bool \(got 3\)"),
        (lambda t: t.predict(Net(), BATCHES, return_predictions=None), r"'return_predictions' must be a bool"),
        (lambda t: Net.load_from_checkpoint(3), r"'checkpoint_path' must be a path \(got 3\)"),
        (lambda t: Net.load_from_checkpoint("x", strict=3), r"'strict' must be a bool \(got 3\)"),
        (lambda t: Net.load_from_checkpoint("x", weights_only=None), r"'weights_only' must be a bool \(got None\)"),
        (
            lambda t: Net.load_from_checkpoint("x", checkpoint_io="dcp"),
            r"'checkpoint_io' must be a CheckpointIO.*'dcp'",
        ),
        (lambda t: Net().save_hyperparameters({}, logger=1), r"'logger' must be a bool \(got 1\)"),
    ],
)
def test_method_arguments_out_of_domain(monkeypatch, call, message):
    """Arguments of methods are checked as the Trainer's own are."""
    refuse_to_start(monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        call(make())


@pytest.mark.parametrize(("name", "value"), [("precision", "bf16-true"), ("accelerator", "gpu")])
def test_what_a_trainer_was_made_with_stays(name, value):
    with pytest.raises(ConfigurationError, match=rf"can't become '{value}'.*new one, Trainer\({name}='{value}'\)"):
        setattr(make(), name, value)


@pytest.mark.parametrize("path", [5, True, "", b"x", 1.5])
def test_a_ckpt_path_that_is_none(monkeypatch, path):
    refuse_to_start(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"'ckpt_path' must be a path, 'last', 'best' or None \(got"):
        make().fit(Net(), BATCHES, ckpt_path=path)


def test_unknown_aliases_and_too_many_devices(monkeypatch):
    refuse_to_start(monkeypatch)
    with pytest.raises(UnknownAliasError, match=r"'cpuu'.*'cpu'"):
        make(accelerator="cpuu")
    with pytest.raises(UnknownAliasError, match=r"'dpp'.*'ddp'"):
        make(strategy="dpp")
    with pytest.raises(UnknownAliasError, match=r"'bf16-mixd'.*'bf16-mixed'"):
        make(precision="bf16-mixd")

    from torchhal.accelerators import CPUAccelerator

    class One(CPUAccelerator):
        name = "one"
        oversubscribable = False

        def device_count(self):
            return 1

    with pytest.raises(ConfigurationError, match=r"'devices' must be at most 1 for accelerator 'one' \(got 3\)"):
        make(accelerator=One(), devices=3)
