"""What can't work is refused by name, before it costs anything; what fails leaves nothing worse than before."""

import contextlib
import errno
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import termios
import textwrap
import warnings
import weakref
from pathlib import Path

import hardware
import pytest
import torch
from tiers import slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Callback, DataModule, Module, Trainer
from torchhal.errors import (
    CheckpointError,
    ConfigurationError,
    ModelError,
    NonFiniteLossError,
    UnknownAliasError,
    UnknownArgumentError,
)
from torchhal.trainer.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar
from torchhal.trainer.loggers import CSVLogger, TensorBoardLogger

NAN, INF = float("nan"), float("inf")

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def make(*callbacks, **options):
    where = {
        "accelerator": hardware.name(), "devices": 1,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**QUIET, **where, "max_epochs": 1, **options})


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(2, 1), torch.ones(2, 1)]


# -- arguments ---------------------------------------------------------------------------------------------------

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
    "logger": ("csv", "", 5, 1.5, [True], ...),
    "callbacks": ("x", 5, [None], Callback, [Callback], ...),
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


# -- words of other trainers ---------------------------------------------------------------------------------------

LOADER = DataLoader(torch.ones(4, 1))
FOREIGN_ARGUMENTS = [
    # Lightning, of 1.x and today
    ({"gpus": 2}, "write Trainer(accelerator='gpu', devices=2)"),
    ({"gpus": 0}, "write Trainer(accelerator='gpu', devices=...), or accelerator='cpu' for none"),
    ({"tpu_cores": 8}, "write Trainer(accelerator='tpu', devices=8)"),
    ({"ipus": 4}, "write Trainer(accelerator='ipu', devices=4)"),
    ({"num_processes": 2}, "write Trainer(devices=2)"),
    ({"distributed_backend": "ddp"}, "write Trainer(strategy='ddp')"),
    ({"resume_from_checkpoint": "a.ckpt"}, "write trainer.fit(..., ckpt_path='a.ckpt')"),
    ({"checkpoint_callback": True}, "write Trainer(enable_checkpointing=True)"),
    ({"progress_bar_refresh_rate": 0}, "write Trainer(enable_progress_bar=False)"),
    ({"weights_summary": "top"}, "write Trainer(enable_model_summary='top')"),
    ({"replace_sampler_ddp": False}, "write Trainer(use_distributed_sampler=...)"),
    ({"terminate_on_nan": True}, "write Trainer(detect_anomaly=True)"),
    ({"track_grad_norm": 2}, "on_before_optimizer_step"),
    ({"auto_lr_find": True}, "configure_optimizers"),
    ({"stochastic_weight_avg": True}, "torch.optim.swa_utils"),
    ({"profiler": "simple"}, "torch.profiler"),
    ({"barebones": True}, "write Trainer(logger=False, enable_checkpointing=False"),
    ({"amp_backend": "native"}, "write Trainer(precision='16-mixed')"),
    # Keras
    ({"epochs": 5}, "write Trainer(max_epochs=5)"),
    ({"steps_per_epoch": 10}, "write Trainer(limit_train_batches=10)"),
    ({"validation_freq": 2}, "write Trainer(check_val_every_n_epoch=2)"),
    ({"verbose": 1}, "enable_progress_bar"),
    ({"clipnorm": 1.0}, "write Trainer(gradient_clip_val=1.0)"),
    ({"metrics": ["accuracy"]}, "self.log(name, value)"),
    # Hugging Face's Trainer and Accelerate
    ({"num_train_epochs": 3}, "write Trainer(max_epochs=3)"),
    ({"output_dir": "out"}, "write Trainer(default_root_dir='out')"),
    ({"gradient_accumulation_steps": 4}, "write Trainer(accumulate_grad_batches=4)"),
    ({"max_grad_norm": 1.0}, "write Trainer(gradient_clip_val=1.0)"),
    ({"learning_rate": 1e-3}, "configure_optimizers"),
    ({"per_device_train_batch_size": 8}, "DataLoader(dataset, batch_size=...)"),
    ({"fp16": True}, "write Trainer(precision='16-mixed')"),
    ({"bf16": True}, "write Trainer(precision='bf16-mixed')"),
    ({"mixed_precision": "fp16"}, "write Trainer(precision='bf16-mixed') or '16-mixed'"),
    ({"auto_select_gpus": True}, "write Trainer(accelerator='gpu', devices='auto')"),
    ({"auto_lr_find": True}, "torchhal looks for none"),
    ({"truncated_bptt_steps": 2}, "automatic_optimization = False"),
    ({"eval_strategy": "epoch"}, "check_val_every_n_epoch"),
    ({"save_total_limit": 2}, "callbacks=[ModelCheckpoint(...)]"),
    ({"logging_steps": 10}, "write Trainer(log_every_n_steps=10)"),
    ({"seed": 1}, "torchhal.seed_everything"),
    ({"no_cuda": True}, "write Trainer(accelerator='cpu')"),
    ({"model": None, "train_dataset": None}, "write trainer.fit(model"),
    # loops of one's own
    ({"num_epochs": 3}, "write Trainer(max_epochs=3)"),
    ({"n_gpu": 1}, "write Trainer(accelerator='gpu', devices=1)"),
    ({"device": "cuda"}, "write Trainer(accelerator='cuda')"),
    ({"patience": 3}, "callbacks=[EarlyStopping(...)]"),
    ({"lr": 0.1}, "configure_optimizers"),
    ({"log_dir": "logs"}, "write Trainer(default_root_dir='logs')"),
    ({"sync_bn": True}, "write Trainer(sync_batchnorm=True)"),
    # ours, misspelt or in the wrong place
    ({"max_epoch": 3}, "did you mean 'max_epochs'?"),
    ({"ckpt_path": "last"}, "it is an argument of Trainer.fit()"),
    ({"train_dataloaders": LOADER}, "it is an argument of Trainer.fit()"),
]


@pytest.mark.parametrize(
    ("given", "message"), FOREIGN_ARGUMENTS, ids=lambda part: " ".join(part) if isinstance(part, dict) else ""
)
def test_an_argument_of_another_trainer(given, message):
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(**given)
    said = str(caught.value)
    assert caught.value.names == tuple(given) and message in said
    assert all(f"Trainer() got an unexpected keyword argument {name!r}" in said for name in given)
    assert isinstance(caught.value, ConfigurationError) and isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.fit(Net(), LOADER, epochs=5),
            "Trainer.fit() got an unexpected keyword argument 'epochs': write Tr",
        ),
        (lambda t: t.fit(Net(), LOADER, max_epochs=5), "'max_epochs': it is an argument of Trainer()"),
        (lambda t: t.fit(Net(), train_dataloader=LOADER), "write trainer.fit(model, train_dataloaders=...)"),
        (lambda t: t.fit(Net(), train_loader=LOADER), "write trainer.fit(model, train_dataloaders=...)"),
        (lambda t: t.fit(Net(), LOADER, validation_data=LOADER), "val_dataloaders=..."),
        (lambda t: t.fit(Net(), LOADER, batch_size=32), "DataLoader(dataset, batch_size=...)"),
        (lambda t: t.fit(Net(), LOADER, resume_from_checkpoint="x"), "write trainer.fit(..., ckpt_path='x')"),
        (lambda t: t.test(Net(), test_dataloaders=LOADER), "write trainer.test(model, dataloaders=...)"),
        (lambda t: t.validate(Net(), val_dataloaders=LOADER), "'val_dataloaders': it is an argument of Trainer.fit()"),
        (lambda t: t.predict(Net(), dataloader=LOADER), "did you mean 'dataloaders'|write dataloaders=..."),
        (
            lambda t: t.fit(Net(), LOADER, quickly=True),
            "it takes model, train_dataloaders, val_dataloaders, datamodule",
        ),
    ],
)
def test_an_argument_that_a_call_does_not_take(call, message):
    with pytest.raises(UnknownArgumentError) as caught:
        call(make())
    assert any(each in str(caught.value) for each in message.split("|"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelCheckpoint(save_topk=3), "ModelCheckpoint() got an unexpected keyword argument 'save_topk'; did "
                                               "you mean 'save_top_k'?"),
        (lambda: EarlyStopping("loss", min_dleta=0.1), "did you mean 'min_delta'?"),
        (lambda: ModelCheckpoint(patience=3), "it is an argument of EarlyStopping()"),
        (lambda: ModelCheckpoint(filepath="x"), "'filepath': write ModelCheckpoint(dirpath=..., filename=...)"),
        (lambda: ModelCheckpoint(save_best_only=True), "write ModelCheckpoint(monitor=..., save_top_k=1)"),
        (lambda: LearningRateMonitor(interval="step"), "did you mean 'logging_interval'?"),
        (lambda: ProgressBar(refreshrate=2), "did you mean 'refresh_rate'?"),
        (lambda: ModelSummary(depth=2), "did you mean 'max_depth'?"),
        (lambda: CSVLogger("logs", versoin=3), "did you mean 'version'?"),
        (lambda: TensorBoardLogger("logs", versoin=3), "did you mean 'version'?"),
        (lambda: TensorBoardLogger("logs", flush_sec=3), "did you mean 'flush_secs'?"),
        (lambda: TensorBoardLogger("logs", log_dir="here"), "TensorBoardLogger() got an unexpected keyword argument"),
    ],
)  # fmt: skip
def test_an_argument_that_a_callback_or_logger_does_not_take(make, message):
    with pytest.raises(UnknownArgumentError) as caught:
        make()
    assert message in str(caught.value)


def test_arguments_go_by_name():
    with pytest.raises(UnknownArgumentError, match=r"Trainer\(\) takes its arguments by name \(got Net"):
        Trainer(Net())


def test_signatures_stay_readable():
    """Libraries, and command lines made from it, read the Trainer's own arguments."""
    assert {"accelerator", "max_epochs"} < set(inspect.signature(Trainer.__init__).parameters)
    assert "kwargs" not in inspect.signature(Trainer).parameters
    assert next(iter(inspect.signature(make().fit).parameters)) == "model"

    class Own(Trainer):
        def __init__(self, width, **options):
            super().__init__(**options)

    assert Own(3, max_epochs=2, accelerator="cpu").max_epochs == 2
    with pytest.raises(UnknownArgumentError, match="max_epochs=2"):
        Own(3, epochs=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [("train", "call trainer.fit(model"), ("evaluate", "trainer.validate"), ("save_model", "trainer.save_checkpoint"),
     ("device", "trainer.strategy.root_device"), ("tune", "no tuner"), ("epoch", "trainer.current_epoch")],
)  # fmt: skip
def test_an_attribute_of_another_trainer(name, message):
    trainer = make()
    with pytest.raises(AttributeError, match=f"'Trainer' object has no attribute '{name}'") as caught:
        getattr(trainer, name)
    assert message in str(caught.value)
    assert not hasattr(trainer, name)  # as libraries ask


def test_a_class_method_of_another_trainer():
    with pytest.raises(AttributeError, match=r"'Trainer' has no attribute 'from_argparse_args': write Trainer\("):
        Trainer.from_argparse_args(None)
    assert not hasattr(Trainer, "add_argparse_args")


def test_what_a_property_lacks_is_said():
    """Not that the Trainer has no such property."""

    class Own(Trainer):
        @property
        def broken(self):
            return object().missing

    with pytest.raises(AttributeError, match="'object' object has no attribute 'missing'"):
        _ = Own(accelerator="cpu").broken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "did you mean '16-mixed' or '16-true'?"),
        ({"precision": "float16"}, "did you mean '16-mixed' or '16-true'?"),
        ({"precision": "mixed_float16"}, "did you mean '16-mixed'?"),
        ({"precision": "bfloat16"}, "did you mean 'bf16-mixed' or 'bf16-true'?"),
        ({"precision": "FP32"}, "did you mean '32-true'?"),
        ({"precision": "no"}, "did you mean '32-true'?"),
        ({"precision": torch.float16}, "write precision='16-mixed' or '16-true'"),
        ({"precision": torch.float64}, "write precision='64-true'"),
        ({"strategy": "dpp"}, "did you mean 'ddp'?"),
        ({"strategy": "dddp"}, "did you mean 'ddp'?"),
        ({"strategy": "ddp_spwan"}, "did you mean 'ddp_spawn'?"),
        ({"strategy": "mirrored"}, "did you mean 'ddp'?"),
        ({"strategy": "horovod"}, "did you mean 'ddp'?"),
        ({"strategy": "fully_sharded_data_parallel"}, "did you mean 'fsdp'?"),
        ({"strategy": nn.parallel.DistributedDataParallel}, "write strategy='ddp'"),
        ({"strategy": None}, "leave it out, or write strategy='auto'"),
        ({"accelerator": None}, "leave it out, or write accelerator='auto'"),
        ({"accelerator": "cuda:1"}, "write accelerator='cuda', devices=[1]"),
        ({"accelerator": torch.device("cpu")}, "write accelerator='cpu'"),
        ({"accelerator": torch.device("cuda", 1)}, "write accelerator='cuda', devices=[1]"),
        ({"accelerator": "cpus"}, "did you mean 'cpu'?"),
        ({"logger": "csv"}, "make an object, as torchhal.trainer.loggers.CSVLogger(...)"),
        ({"logger": "tensorboard"}, "make an object, as torchhal.trainer.loggers.TensorBoardLogger(...)"),
        ({"logger": TensorBoardLogger}, "make an object, as TensorBoardLogger(...)"),
        ({"logger": [CSVLogger]}, "make an object, as CSVLogger(...)"),
        ({"callbacks": ModelCheckpoint}, "make an object, ModelCheckpoint(...)"),
    ],
    ids=str,
)
def test_a_value_of_another_trainer(options, message):
    with pytest.raises((ConfigurationError, UnknownAliasError)) as caught:
        Trainer(**{"accelerator": "cpu", **QUIET, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LightningModule", "there is torchhal.Module"),
        ("loggers", "there is torchhal.trainer.loggers"),
        ("TensorBoardLogger", "there is torchhal.trainer.loggers.TensorBoardLogger"),
        ("Trainr", "did you mean 'Trainer'?"),
    ],
)
def test_a_name_of_another_library(name, message):
    with pytest.raises(AttributeError, match=f"module 'torchhal' has no attribute '{name}'") as caught:
        getattr(torchhal, name)
    assert message in str(caught.value)


def test_a_name_of_another_library_in_an_import():
    with pytest.raises(ImportError, match=r"there is torchhal\.Module"):
        exec("from torchhal import LightningModule")
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        exec("from torchhal import Trainr")
    assert __import__("torchhal", fromlist=["any"]) is torchhal  # as old code imports a submodule by its name


def test_numbers_of_numpy_are_numbers():
    import numpy

    trainer = make(max_epochs=numpy.int64(2), limit_train_batches=numpy.float64(0.5), max_steps=numpy.int32(9))
    assert (trainer.max_epochs, trainer.limit_train_batches, trainer.max_steps) == (2, 0.5, 9)
    assert type(trainer.max_epochs) is int
    with pytest.raises(ConfigurationError, match="'max_epochs'"):
        make(max_epochs=numpy.bool_(True))


# -- before any process starts -----------------------------------------------------------------------------------


def refuse_to_start(monkeypatch):
    from torchhal.launchers import ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher

    def launch(self, *args, **kwargs):
        raise AssertionError("a process was started")

    for launcher in (ExternalLauncher, MultiprocessingLauncher, SubprocessScriptLauncher):
        monkeypatch.setattr(launcher, "launch", launch)


class NoStep(Module):
    configure_optimizers = Net.configure_optimizers


class NoOptimizers(Module):
    def training_step(self, batch, batch_idx):
        pass


class Empty(Module):
    """No evaluation steps."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.fit(NoStep(), BATCHES),
            r"NoStep can't be fitted: it has no training_step\. Define one that takes",
        ),
        (lambda t: t.fit(NoOptimizers(), BATCHES), r"it has no configure_optimizers\. Define one that returns"),
        (lambda t: t.fit(nn.Linear(1, 1), BATCHES), r"Linear can't be fitted: it has no training_step"),
        (lambda t: t.fit(Net, BATCHES), r"'model' must be a torch\.nn\.Module \(got <class .*Net'>\)"),
        (lambda t: t.fit(None, BATCHES), r"'model' must be a torch\.nn\.Module \(got None\)"),
        (lambda t: t.fit(lambda x: x, BATCHES), r"'model' must be a torch\.nn\.Module"),
        (lambda t: t.fit(Net()), r"fit needs training data: pass train_dataloaders or a datamodule, or define"),
        (lambda t: t.fit(Net(), 5), r"'train_dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.fit(Net(), "path"), r"'train_dataloaders' must be an iterable of batches.*\(got 'path'\)"),
        (lambda t: t.fit(Net(), DataLoader), r"'train_dataloaders' must be an iterable of batches"),
        (lambda t: t.fit(Net(), TensorDataset(torch.ones(3))), r"'train_dataloaders' must be an iterable of batches"),
        (
            lambda t: t.fit(Net(), {"a": DataLoader(torch.ones(3, 1))}),
            r"'train_dataloaders' must be an iterable .*combine the loaders in one",
        ),
        (
            lambda t: t.fit(Net(), [DataLoader(torch.ones(3, 1))] * 2),
            r"must be one iterable of batches \(got a list of 2 loader\(s\)\): combine them in one",
        ),
        (
            lambda t: t.fit(Net(), [DataLoader(torch.ones(3, 1))]),
            r"\(got a list of 1 loader\(s\)\): pass that loader itself",
        ),
        (lambda t: t.fit(Net(), BATCHES, 5), r"'val_dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.fit(Net(), datamodule=3), r"'datamodule' must be a DataModule, or have one of .*\(got 3\)"),
        (lambda t: t.fit(Net(), datamodule=DataLoader(torch.ones(3, 1))), r"must be .*; loaders go into the arguments"),
        (lambda t: t.fit(Net(), datamodule=DataModule), r"'datamodule' must be a DataModule .*: make an object"),
        (lambda t: t.test(Net(), datamodule=3), r"'datamodule' must be a DataModule"),
        (lambda t: t.validate(), r"validate needs a model: pass one, or fit one with this Trainer first"),
        (lambda t: t.test(Net(), BATCHES), r"Net has no test_step: define it to test"),
        (lambda t: t.validate(Empty(), BATCHES), r"Empty has no validation_step: define it to validate"),
        (lambda t: t.predict(Empty(), BATCHES), r"Empty has no predict_step: define it to predict"),
        (lambda t: t.validate(Net()), r"validate needs data: pass dataloaders or a datamodule"),
        (lambda t: t.validate(Net(), 5), r"'dataloaders' must be an iterable of batches.*\(got 5\)"),
        (lambda t: t.save_checkpoint("x"), r"save_checkpoint needs a model"),
    ],
)
def test_a_model_or_data_that_lacks_something(monkeypatch, call, message):
    refuse_to_start(monkeypatch)
    with pytest.raises(ModelError, match=message):
        call(make())


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
def test_arguments_of_methods_are_checked_as_the_trainers_own(monkeypatch, call, message):
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


# -- data that gives nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader",
    [[], DataLoader(torch.ones(0, 1)), DataLoader(torch.ones(3, 1), batch_size=9, drop_last=True), iter([])],
    ids=["list", "empty", "drop_last", "iterator"],
)
@pytest.mark.usefixtures("accelerator")
def test_a_loader_that_yields_nothing(loader):
    model = Net()
    with pytest.raises(ModelError, match=r"the training loader.* gave no batch: "):
        make().fit(model, loader)
    if isinstance(loader, DataLoader):
        with pytest.raises(ModelError, match=r"the loader of 'val_dataloaders' gave no batch: is the dataset empty"):
            make().fit(model, BATCHES, loader)
        with pytest.raises(ModelError, match="the loader of 'dataloaders' gave no batch"):
            make().validate(model, loader)
        with pytest.raises(ModelError, match="a loader of 'dataloaders' gave no batch"):
            make().validate(model, [DataLoader(torch.ones(1, 1)), loader])


def test_a_loader_hook_that_returns_nothing():
    class Nothing(Net):
        def train_dataloader(self):
            pass

        val_dataloader = train_dataloader

    with pytest.raises(ModelError, match=r"train_dataloader returned None"):
        make().fit(Nothing())
    with pytest.raises(ModelError, match=r"validate needs data: its loader is None"):
        make().validate(Nothing())


@pytest.mark.usefixtures("accelerator")
def test_a_compiled_model_is_compiled_in_place():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    class Called(Net):
        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            return self(batch).pow(2).mean()

    model = Called()
    with pytest.raises(ModelError, match=r"must be the Called itself.*model\.compile"):
        make().fit(torch.compile(model, backend=backend), BATCHES)
    weight = model.layer.weight.detach().clone()
    model.compile(backend=backend)
    make().fit(model, BATCHES)
    assert graphs and list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert not torch.equal(weight, model.layer.weight.cpu())


def test_validation_data_without_a_validation_step_is_said():
    model = Net()
    model.validation_step = None
    with pytest.warns(UserWarning, match="Net has no validation_step, so val_dataloaders is not used") as caught:
        make().fit(model, BATCHES, BATCHES)
    assert caught[0].filename == __file__, "the line that called"


# -- losses ------------------------------------------------------------------------------------------------------


def step(function, **options):
    model = type("Bad", (Net,), {"training_step": lambda self, batch, batch_idx: function(self, batch)})()
    make(**options).fit(model, BATCHES)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, b: m.layer(b), r"Bad\.training_step must return one number.*\(2, 1\)\): take its mean"),
        (lambda m, b: {"loss": m.layer(b)}, r"must return one number.*\(2, 1\)"),
        (lambda m, b: torch.tensor(1.0), r"depends on no trainable parameter: nothing requires grad"),
        (lambda m, b: m.layer(b).mean().detach(), r"depends on no trainable parameter"),
        (lambda m, b: {"losses": 1}, r"must return a tensor, a dict with 'loss', or None \(got a dict with 'losses'\)"),
        (lambda m, b: {}, r"\(got a dict with nothing\)"),
        (lambda m, b: 3.5, r"must return a tensor, a dict with 'loss', or None \(got 3\.5\)"),
        (lambda m, b: "loss", r"\(got 'loss'\)"),
        (lambda m, b: [m.layer(b).mean()], r"must return a tensor, a dict with 'loss', or None \(got \["),
    ],
)
@pytest.mark.usefixtures("accelerator")
def test_what_training_step_may_not_return(function, message):
    with pytest.raises(ModelError, match=message):
        step(function)


def loss_after(act):
    def training_step(model, batch):
        loss = model.layer(batch).pow(2).mean()
        act(model, loss)
        return loss

    return training_step


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m, loss: m.optimizers().step(), r"Bad steps SGD by hand, and the Trainer steps it too"),
        (lambda m, loss: m.manual_backward(loss), r"Bad\.manual_backward needs manual optimization"),
        (lambda m, loss: loss.backward(), r"leave loss\.backward\(\) out of training_step.* a second time"),
    ],
    ids=["step", "manual_backward", "backward"],
)
@pytest.mark.usefixtures("accelerator")
def test_what_the_trainer_does_is_not_done_by_hand_too(act, message):
    with pytest.raises(ModelError, match=message):
        step(loss_after(act))


def test_what_is_kept_from_an_earlier_batch_is_to_be_detached():
    class Recurrent(Net):
        kept = 0.0

        def training_step(self, batch, batch_idx):
            self.kept = self.layer(batch).pow(2).mean() + self.kept
            return self.kept

    with pytest.raises(ModelError, match=r"graph of the loss .* has been used up: .*detach\(\) what is kept"):
        make().fit(Recurrent(), BATCHES)


def test_an_object_is_not_loaded_by_what_makes_a_new_one(tmp_path):
    trainer, model = make(), Net()
    trainer.fit(model, BATCHES)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    with pytest.raises(ModelError, match=r"leaves this one as it is: write model = Net\.load_from_checkpoint"):
        model.load_from_checkpoint(tmp_path / "net.ckpt")

    class Own(Net):
        @classmethod
        def load_from_checkpoint(cls, path):
            return super().load_from_checkpoint(path)

    assert type(Own.load_from_checkpoint(tmp_path / "net.ckpt")) is Own


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("accelerator")
def test_a_loss_that_is_not_finite(value, accumulate):
    class Explodes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * value if (self.current_epoch, batch_idx) == (1, 3) else loss

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    model = Explodes()
    with pytest.raises(NonFiniteLossError) as caught:
        make(detect_anomaly=True, **options).fit(model, BATCHES * 3)
    found = re.search(r"the loss is (\S+) at epoch 1, batch 3, optimizer step (\d+), rank 0", str(caught.value))
    assert found is not None and found[1] in ("nan", "inf", "-inf") and int(found[2]) == (9 if accumulate == 1 else 4)
    assert torch.isfinite(model.layer.weight).all()  # before the step that would have spread it
    make(**options).fit(Explodes(), BATCHES * 3)  # nobody asked


@pytest.mark.usefixtures("accelerator")
def test_an_optimizer_with_a_closure_does_not_accumulate():
    class Closure(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match=r"'accumulate_grad_batches' must be 1 for LBFGS.*\(got 2\)"):
        make(accumulate_grad_batches=2).fit(Closure(), BATCHES)

    class Skips(Closure):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ModelError, match=r"Skips\.training_step must return a loss for LBFGS.*\(got None\)"):
        make().fit(Skips(), BATCHES)


class Forgets(Net):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)  # and no return


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limits", [{"max_epochs": 1000}, {"max_epochs": -1, "max_steps": 10}], ids=["epochs", "steps"])
def test_a_training_step_that_never_returns_a_loss_ends_soon(limits, accumulate):
    said = r"Forgets\.training_step has returned None.* for each of the {} batch\(es\) since fit began.*return the loss"
    with (
        pytest.warns(UserWarning, match=said.format(2)),
        pytest.raises(ModelError, match=said.format(4)),
    ):
        make(**limits, accumulate_grad_batches=accumulate).fit(Forgets(), BATCHES)


def test_in_a_long_epoch_it_is_said_before_the_end():
    batches, seen = [], []

    class Counts(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(list(caught))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [torch.ones(2, 1)] * 120
        make(Counts()).fit(Forgets(), batches)
    assert [bool(any("for each of the 100" in str(w.message) for w in then)) for then in seen].index(True) == 99


def test_some_batches_without_a_loss_are_left_out_in_silence():
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.current_epoch == 1 and batch_idx == 1 else None

    with pytest.warns(UserWarning, match="for each of the 2 batch"):  # the first epoch had none
        trainer = make(max_epochs=6)
        trainer.fit(Sometimes(), BATCHES)
    assert (trainer.global_step, trainer.current_epoch) == (1, 6)


# -- checkpoints that can't be written ---------------------------------------------------------------------------


@pytest.mark.usefixtures("accelerator")
def test_a_full_disk_surfaces_and_costs_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    trainer = make()
    trainer.fit(Net(), BATCHES)
    trainer.save_checkpoint(path)
    old = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"(?i)a\.ckpt.*no space left"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["a.ckpt"]
    saver = make(ModelCheckpoint(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"(?i)no space left"):
        saver.fit(Net(), BATCHES)
    assert saver.state.status == "interrupted" and saver.checkpoint_callback.best_model_path == ""
    monkeypatch.undo()
    assert Net.load_from_checkpoint(path).layer.weight.shape == (1, 1)


SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torchhal import Callback, Module, Trainer
from torchhal.trainer.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    predict_step = test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def teardown(self, stage):
        print("torn down", stage, flush=True)

class At(Callback):
    def __init__(self, hook, act):
        setattr(self, hook, lambda trainer, *args: act(trainer))

def trainer(*callbacks, **options):
    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                 num_sanity_val_steps=0)
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})

BATCHES = [torch.ones(2, 1)] * 4
folder = sys.argv[1]
"""


def script(tmp_path, body, timeout=60):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(body))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(path), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=timeout, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_no_success(tmp_path):
    target = tmp_path / "out"
    target.mkdir(mode=0o500)
    done = script(tmp_path, "trainer(ModelCheckpoint(folder), max_epochs=1).fit(Net(), BATCHES)")
    assert done.returncode == 1 and "CheckpointError" in done.stderr and str(target) in done.stderr


def test_a_folder_that_is_a_file_is_no_success(tmp_path):
    (tmp_path / "out").write_text("in the way")
    done = script(
        tmp_path,
        """
        announce = At("on_train_batch_start", lambda trainer: print("a step"))
        trainer(announce, ModelCheckpoint(os.path.join(folder, "below")), max_epochs=1).fit(Net(), BATCHES)
        """,
    )
    assert done.returncode == 1 and "CheckpointError" in done.stderr and str(tmp_path / "out") in done.stderr
    assert "a step" not in done.stdout
    assert (tmp_path / "out").read_text() == "in the way"


# -- signals -----------------------------------------------------------------------------------------------------


def test_a_stop_whose_state_can_t_be_saved_says_so(tmp_path):
    done = script(
        tmp_path,
        """
        import errno

        def act(trainer):
            if trainer.global_step == 6:
                def full(descriptor):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync = full
                os.kill(os.getpid(), signal.SIGTERM)

        trainer(ModelCheckpoint(folder, every_n_train_steps=4), At("on_train_batch_end", act), max_epochs=9).fit(
            Net(), BATCHES
        )
        """,
    )
    assert done.returncode == 1 and "No space left" in done.stderr, done.stderr
    said = "fit stopped on SIGTERM at step 6, which could not be saved, so no scheduler is asked for another life"
    assert said in done.stderr, done.stderr
    assert re.search(r"The newest checkpoint is \S+step=4\.ckpt", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("hook", "save_last"),
    [("on_train_batch_end", False), ("on_train_batch_start", True), ("on_validation_start", False)],
)
def test_sigterm_leaves_a_loadable_checkpoint(tmp_path, hook, save_last):
    done = script(
        tmp_path,
        f"""
        def act(trainer):
            if trainer.global_step >= 4:
                os.kill(os.getpid(), signal.SIGTERM)
        trainer(At({hook!r}, act), ModelCheckpoint(folder, save_last={save_last}), max_epochs=99).fit(
            Net(), BATCHES, BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == "torn down fit\n" and "Traceback" not in done.stderr
    written = sorted(Path(tmp_path / "out").glob("*.ckpt"), key=os.path.getmtime)
    steps = torch.load(written[-1], weights_only=True)["global_step"]
    assert steps == {"on_train_batch_start": 5}.get(hook, 4)
    resumed = make(ModelCheckpoint(tmp_path / "out"), max_epochs=2)
    resumed.fit(Net(), BATCHES * 2, ckpt_path="last")
    assert resumed.global_step > steps or resumed.current_epoch == 2


def test_a_stop_at_a_step_that_was_just_saved_names_that_file(tmp_path):
    done = script(
        tmp_path,
        """
        def act(trainer):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        trainer(At("on_train_batch_end", act), ModelCheckpoint(folder, every_n_train_steps=2), max_epochs=99).fit(
            Net(), BATCHES * 2)
        """,
    )
    assert done.returncode == 143, done.stderr
    (saved,) = (tmp_path / "out").glob("*.ckpt")
    assert f"saved {saved}, continue with ckpt_path='last'" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_sigterm_in_an_evaluation(tmp_path, fn):
    word = {"validate": "validation"}.get(fn, fn)
    done = script(
        tmp_path,
        f"""
        def act(trainer):
            print("batch", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        trainer(At("on_{word}_batch_end", act)).{fn}(Net(), BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == f"batch\ntorn down {fn}\n"


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown", "setup", "on_fit_start"])
def test_sigterm_outside_the_loop_is_not_forgotten(tmp_path, hook):
    done = script(
        tmp_path,
        f"""
        trainer(At({hook!r}, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)), max_epochs=2).fit(Net(), BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, (done.stdout, done.stderr)
    assert done.stdout == "torn down fit\n"


def test_ctrl_c_once_and_twice(tmp_path):
    once = script(
        tmp_path,
        """
        def act(trainer):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)
        t = trainer(At("on_train_batch_end", act), ModelCheckpoint(folder), max_epochs=99)
        try:
            t.fit(Net(), BATCHES)
        except KeyboardInterrupt:
            print("interrupted after", t.global_step, t.state.status)
        t.callbacks.clear()
        t.fit_loop.max_epochs = 1
        t.fit(Net(), BATCHES)
        print("and again", t.global_step)
        """,
    )
    assert once.returncode == 0, once.stderr
    assert once.stdout.splitlines() == [
        "torn down fit", "interrupted after 3 interrupted", "torn down fit", "and again 7",
    ]  # fmt: skip
    assert "press Ctrl-C again" in once.stderr
    assert [path.name for path in Path(tmp_path / "out").glob("*.ckpt")] == ["interrupted-epoch=0-step=3.ckpt"]
    twice = script(
        tmp_path,
        """
        class Slow(Net):
            def training_step(self, batch, batch_idx):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(30)
        trainer(max_epochs=1).fit(Slow(), BATCHES)
        """,
        timeout=25,
    )
    assert twice.returncode in (130, -signal.SIGINT) and "KeyboardInterrupt" in twice.stderr
    assert twice.stdout == "torn down fit\n"


@pytest.mark.parametrize("strategy", ["auto", slow("ddp"), slow("ddp_spawn"), slow("ddp_fork"), slow("ddp_notebook")])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_an_orderly_stop_is_two_lines_of_their_own_and_no_traceback(tmp_path, terminal, strategy):
    """Neither behind a progress bar nor behind the ^C of the terminal, which reaches every process of the job; the code
    is that of the signal."""
    (tmp_path / "script.py").write_text(
        SCRIPT
        + textwrap.dedent(
            f"""
            class Interrupts(Callback):
                def on_train_batch_end(self, trainer, *args):
                    if trainer.global_step == 3 and trainer.is_global_zero:
                        os.killpg(os.getpgrp(), signal.SIGINT)
                    time.sleep(0.05)

            if __name__ == "__main__":
                trainer(Interrupts(), ModelCheckpoint(folder), max_epochs=999, enable_progress_bar=True,
                        strategy={strategy!r}, devices={1 if strategy == "auto" else 2}).fit(Net(), BATCHES)
            """
        )
    )
    reading, writing = os.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writing, (24, 100))
    command = [sys.executable, "script.py", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=writing, start_new_session=True)
    os.close(writing)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while piece := os.read(reading, 4096):
            shown += piece
    os.close(reading)
    assert process.wait(30) in (130, -signal.SIGINT)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+|\x1b\[A", shown.decode())]
    assert "torchhal: stopping after this step; press Ctrl-C again to stop at once" in lines, lines
    (stopped,) = [line for line in lines if "stopped on SIGINT" in line]
    assert stopped.startswith("torchhal: fit stopped on SIGINT at step ") and "ckpt_path='last'" in stopped
    assert any("Epoch" in line for line in lines), "there was a bar"
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines), lines


@pytest.mark.usefixtures("accelerator")
def test_the_handlers_of_the_program_come_back():
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        for model in (Net(), type("Bad", (Net,), {"training_step": lambda self, batch, i: 1 / 0})()):
            try:
                make().fit(model, BATCHES)
            except ZeroDivisionError:
                pass
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("accelerator")
def test_a_fit_outside_the_main_thread():
    import threading

    found = []
    thread = threading.Thread(target=lambda: found.append(make().fit(Net(), BATCHES)))
    thread.start()
    thread.join(60)
    assert found == [None]


def test_a_failed_run_lets_go_of_its_last_batch():
    """The trainer lives on, perhaps to try again with a smaller one: a device would still hold it."""

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            self.batch = weakref.ref(batch)
            raise RuntimeError("out of memory")

    trainer, model = make(), Fails()
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        trainer.fit(model, DataLoader(torch.ones(2, 1)))
    del caught
    gc.collect()
    assert model.batch() is None
