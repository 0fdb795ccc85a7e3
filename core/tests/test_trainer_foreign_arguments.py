"""Test that names and values of other trainers are refused with what torchhal has in their place."""

import inspect

import pytest
import torch
from minimal_net import Net
from quiet_trainer import QUIET, make
from torch import nn
from torch.utils.data import DataLoader

import torchhal
from torchhal import Trainer
from torchhal.errors import (
    ConfigurationError,
    UnknownAliasError,
    UnknownArgumentError,
)
from torchhal.trainer.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar
from torchhal.trainer.loggers import CSVLogger, TensorBoardLogger

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
    ({"auto_lr_find": True}, "torchhal.tuning"),
    ({"stochastic_weight_avg": True}, "StochasticWeightAveraging(swa_lrs=...)"),
    ({"profile": True}, "Trainer(profiler=...)"),
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
    ({"auto_lr_find": True}, "find_learning_rate(trainer, model, ...)"),
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
def test_unknown_argument_of_method(call, message):
    """A method refuses an argument that it does not take, and says where it belongs."""
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
def test_unknown_argument_of_callback_or_logger(make, message):
    """A callback or logger refuses an argument that it does not take."""
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
     ("device", "trainer.strategy.root_device"), ("tune", "torchhal.tuning has"), ("epoch", "trainer.current_epoch")],
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
        ({"strategy": "fully_sharded_data_parallel"}, "did you mean 'fsdp'?"),
        ({"strategy": nn.parallel.DistributedDataParallel}, "write strategy='ddp'"),
        ({"strategy": None}, "leave it out, or write strategy='auto'"),
        ({"accelerator": None}, "leave it out, or write accelerator='auto'"),
        ({"accelerator": "cuda:1"}, "write accelerator='cuda', devices=[1]"),
        ({"accelerator": torch.device("cpu")}, "write accelerator='cpu'"),
        ({"accelerator": torch.device("cuda", 1)}, "write accelerator='cuda', devices=[1]"),
        ({"accelerator": "cpus"}, "did you mean 'cpu'?"),
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


def test_foreign_name_in_import():
    """The error for an import of another library's name says what torchhal has."""
    with pytest.raises(ImportError, match=r"there is torchhal\.Module"):
        exec("from torchhal import LightningModule")
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        exec("from torchhal import Trainr")
    assert __import__("torchhal", fromlist=["any"]) is torchhal  # as old code imports a submodule by its name
