"""Scripts that import Lightning run where it isn't installed, and do what they do under Lightning."""

import copy
import inspect
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import Request
from torchhal_lightning import stand_in
from torchhal_lightning._translated_parts import translated

HAS_LIGHTNING = util.find_spec("lightning") is not None
mine_pl = stand_in.pytorch


@pytest.fixture
def theirs_pl():
    if not HAS_LIGHTNING:
        pytest.skip("Lightning is not installed: make test-lightning")
    return import_module("lightning.pytorch")


# -- modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "OwnLog", "Plain", "Scheduled", "Plateau", "Manual", "ManualOne", "OwnStep", "OwnHooks", "Skips", "Everything",
        "ClosureInside", "LogsEverywhere", "WithMetric",
    ],
)  # fmt: skip
def test_a_fit_equals_lightnings(theirs_pl, name):
    theirs, mine = made(models(theirs_pl)[name]), made(models(mine_pl)[name])
    reference, trainer = fit(theirs_pl.Trainer, theirs), fit(mine_pl.Trainer, mine)
    same(mine, theirs)
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == pytest.approx(
        {k: v.item() for k, v in reference.callback_metrics.items()}
    )
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.1},
        {"val_check_interval": 2},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"fast_dev_run": True},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_arguments(theirs_pl, options):
    theirs, mine = made(models(theirs_pl)["Plain"]), made(models(mine_pl)["Plain"])
    fit(theirs_pl.Trainer, theirs, **options)
    fit(mine_pl.Trainer, mine, **options)
    same(mine, theirs)


def test_evaluation_and_prediction(theirs_pl):
    results = []
    for pl in (theirs_pl, mine_pl):
        module = made(models(pl)["Plain"])
        module.forward = lambda batch, module=module: module.body(batch[0])
        trainer = fit(pl.Trainer, module)
        loader = DataLoader(dataset(16, 9), 8)
        validated = trainer.validate(module, loader, verbose=False)
        tested = trainer.test(module, loader, verbose=False)
        results.append((validated, tested, torch.cat(trainer.predict(module, loader)).tolist()))
    assert results[0][0] == [pytest.approx(each) for each in results[1][0]]
    assert results[0][1] == [pytest.approx(each) for each in results[1][1]]
    assert results[0][2] == results[1][2]


def test_data_modules_made_of_datasets():
    data = mine_pl.LightningDataModule.from_datasets(dataset(), {"a": dataset(16)}, [dataset(8)] * 2, batch_size=4)
    assert len(data.train_dataloader()) == 12 and len(data.val_dataloader()["a"]) == 4
    assert [len(each) for each in data.test_dataloader()] == [2, 2] and not hasattr(data, "predict_dataloader")


# -- callbacks -------------------------------------------------------------------------------------------------

CALLBACKS = {
    "accumulation": lambda callbacks, folder: [callbacks.GradientAccumulationScheduler({0: 1, 1: 3})],
    "averages": lambda callbacks, folder: [callbacks.EMAWeightAveraging(decay=0.5)],
    "swa": lambda callbacks, folder: [callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    "stops": lambda callbacks, folder: [callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)],
    "saves": lambda callbacks, folder: [
        callbacks.ModelCheckpoint(folder, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last="link")
    ],
    "times": lambda callbacks, folder: [callbacks.Timer(interval="epoch")],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_lightnings_do(theirs_pl, tmp_path, name):
    models_of, files = {}, {}
    for pl in (theirs_pl, mine_pl):
        folder = tmp_path / pl.__name__
        module = models_of[pl] = made(models(pl)["Plain"])
        callbacks = CALLBACKS[name](pl.callbacks, folder)
        fit(pl.Trainer, module, max_epochs=4, callbacks=callbacks, enable_checkpointing=name == "saves")
        files[pl] = sorted(path.name for path in folder.glob("*.ckpt"))
    same(models_of[mine_pl], models_of[theirs_pl])
    assert files[mine_pl] == files[theirs_pl] and bool(files[mine_pl]) == (name == "saves")
    for key, value in models_of[theirs_pl].state_dict().items():
        assert torch.allclose(models_of[mine_pl].state_dict()[key], value), key


def test_a_backbone_that_is_trained_later(theirs_pl):
    def module(pl):
        class Net(models(pl)["Plain"]):
            def __init__(self):
                super().__init__()
                self.backbone, self.body = self.body[0], self.body[1:]

            def loss(self, batch):
                return torch.nn.functional.cross_entropy(self.body(self.backbone(batch[0])), batch[1])

            def configure_optimizers(self):
                return torch.optim.SGD(filter(lambda each: each.requires_grad, self.parameters()), lr=0.1)

        return made(Net)

    theirs, mine = module(theirs_pl), module(mine_pl)
    for pl, net in ((theirs_pl, theirs), (mine_pl, mine)):
        fit(pl.Trainer, net, max_epochs=4, callbacks=[pl.callbacks.BackboneFinetuning(1, lambda epoch: 1.5)])
    same(mine, theirs)


def test_predictions_that_are_written(theirs_pl):
    def write(pl):
        notes = []

        class Writer(pl.callbacks.BasePredictionWriter):
            def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, *numbers):
                notes.append((trainer.state.fn, numbers, list(batch_indices), prediction.shape))

            def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
                notes.append((len(predictions), [[list(each) for each in loader] for loader in batch_indices]))

        module = made(models(pl)["Plain"])
        module.forward = lambda batch: module.body(batch[0])
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, callbacks=[Writer("batch_and_epoch")], enable_progress_bar=False
        )
        trainer.predict(module, DataLoader(dataset(16, 9), 4), return_predictions=False)
        return notes

    found = write(mine_pl)
    assert found == write(theirs_pl) and len(found) == 5


def test_a_callback_of_ones_own_gets_the_trainer(tmp_path):
    class Saver(mine_pl.callbacks.ModelCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainers.append(trainer)
            super().on_train_epoch_end(trainer, pl_module)

    trainers, saver = [], Saver(tmp_path, every_n_epochs=1)
    trainer = fit(mine_pl.Trainer, made(models(mine_pl)["Plain"]), callbacks=[saver], enable_checkpointing=True)
    assert trainers == [trainer] * 3 and Path(saver.best_model_path).exists()


# -- checkpoints -----------------------------------------------------------------------------------------------


def test_checkpoints_are_read_both_ways(theirs_pl, tmp_path):
    paths = {}
    for pl in (theirs_pl, mine_pl):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / pl.__name__, monitor="val_loss", save_last=True)
        fit(pl.Trainer, made(models(pl)["Plain"], 5), callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        paths[pl] = saver.last_model_path
    mine = models(mine_pl)["Plain"].load_from_checkpoint(paths[theirs_pl])
    theirs = models(theirs_pl)["Plain"].load_from_checkpoint(paths[mine_pl])
    assert dict(mine.hparams) == dict(theirs.hparams) == {"width": 5}
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key
    # what Lightning began goes on as under Lightning
    again = made(models(mine_pl)["Plain"], 5)
    torch.manual_seed(3)
    trainer = mine_pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3
    )
    trainer.fit(again, DataLoader(dataset(), 8), DataLoader(dataset(24, 6), 8), ckpt_path=paths[theirs_pl])
    assert [note[2] for note in again.notes if note[0] == "train"] == [*range(12, 18)]


def test_a_checkpoint_of_an_old_version_is_refused(tmp_path):
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": {}, "pytorch-lightning_version": "1.9.0", "epoch": 1, "global_step": 2}, path)
    trainer = mine_pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=2)
    with pytest.raises(Exception, match=r"Lightning 1\.9\.0, and without Lightning only those of 2\.0"):
        trainer.fit(made(models(mine_pl)["Plain"]), DataLoader(dataset(), 8), ckpt_path=path)


# -- parts -----------------------------------------------------------------------------------------------------


def strategies(pl):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    strategies = pl.strategies
    return {
        "ddp": strategies.DDPStrategy(find_unused_parameters=True, start_method="spawn", process_group_backend="gloo"),
        "hook": strategies.DDPStrategy(ddp_comm_hook=fp16_compress_hook),
        "fsdp": strategies.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True, state_dict_type="sharded"),
        "wrapped": strategies.FSDPStrategy(auto_wrap_policy={torch.nn.Linear}),
        "single": strategies.SingleDeviceStrategy("cpu"),
        "io": strategies.DDPStrategy(checkpoint_io=pl.plugins.AsyncCheckpointIO()),
    }


@pytest.mark.parametrize("name", ["ddp", "hook", "fsdp", "wrapped", "single", "io"])
def test_strategies_become_what_lightnings_become(theirs_pl, name):
    mine, theirs = (translated(Request(strategy=strategies(pl)[name])) for pl in (mine_pl, theirs_pl))
    assert mine == theirs


def test_a_strategy_of_ones_own_is_refused():
    class Mine(mine_pl.strategies.DDPStrategy):
        def barrier(self, name=None):
            raise AssertionError

    with pytest.raises(ConfigurationError, match=r"would not call what it changes of Lightning's DDPStrategy: barrier"):
        mine_pl.Trainer(strategy=Mine(), logger=False)


def test_registered_strategies():
    registry = mine_pl.strategies._StrategyRegistry()
    registry.register("mine", mine_pl.strategies.DDPStrategy, find_unused_parameters=True)
    assert registry.get("mine")._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(ConfigurationError, match="registered already"):
        registry.register("mine", mine_pl.strategies.DDPStrategy)
    with pytest.raises(KeyError, match="there are mine"):
        registry.get("other")


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_combined_loaders(theirs_pl, mode):
    loaders = {"a": range(3), "b": [range(5), range(2)]}
    found = [list(iter(pl.utilities.CombinedLoader(loaders, mode))) for pl in (mine_pl, theirs_pl)]
    assert found[0] == [tuple(each) for each in found[1]]
    theirs = theirs_pl.utilities.CombinedLoader(loaders, mode)
    iter(theirs)
    assert len(mine_pl.utilities.CombinedLoader(loaders, mode)) == len(theirs)


@pytest.mark.parametrize("word", ["simple", "advanced", "pytorch"])
def test_profilers(word, tmp_path, capsys):
    fit(mine_pl.Trainer, made(models(mine_pl)["Plain"]), profiler=word, max_epochs=1, default_root_dir=tmp_path)
    said = capsys.readouterr().out
    assert "FIT Profiler Report" in said and "SingleDeviceStrategy.training_step" in said


def test_what_has_no_counterpart_says_so():
    with pytest.raises(ConfigurationError, match=r"stand-in for Lightning has no WandbLogger\. Write it in nine lines"):
        mine_pl.loggers.WandbLogger()
    with pytest.raises(ConfigurationError, match=r"has no ModelPruning\. torch\.nn\.utils\.prune needs no Trainer"):

        class Mine(mine_pl.callbacks.ModelPruning):
            pass


# -- names -----------------------------------------------------------------------------------------------------

PUBLIC = ("callbacks", "loggers", "strategies", "plugins", "accelerators", "profilers", "utilities", "core", "trainer")
LEFT_OUT = {
    "utilities": {"is_shared_filesystem", "measure_flops", "set_shared_parameters"},
}


@pytest.mark.parametrize("package", PUBLIC)
def test_it_has_the_public_names(theirs_pl, package):
    names = set(getattr(theirs_pl, package).__all__) - LEFT_OUT.get(package, set())
    assert not {name for name in names if not hasattr(getattr(mine_pl, package), name)}


IGNORED = {
    "ModelCheckpoint": {"*"},  # passed on to torchhal's
    "DeepSpeedStrategy": {"*"},  # into DeepSpeed's own configuration
    "XLAStrategy": {"debug", "sync_module_states"},
    "SingleDeviceXLAStrategy": {"debug"},
    "PyTorchProfiler": {"emit_nvtx", "record_module_names"},
}


@pytest.mark.parametrize("package", PUBLIC[:-1])
def test_constructors_take_lightnings_arguments(theirs_pl, package):
    wrong = []
    for name in getattr(theirs_pl, package).__all__:
        theirs, mine = getattr(getattr(theirs_pl, package), name), getattr(getattr(mine_pl, package), name, None)
        if not inspect.isclass(theirs) or mine is None or mine.__init__.__qualname__.startswith("missing."):
            continue
        given = inspect.signature(theirs.__init__).parameters
        taken = inspect.signature(mine.__init__).parameters
        names = {each.name for each in given.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        left = names - taken.keys() - IGNORED.get(name, set())
        if left and "*" not in IGNORED.get(name, ()):
            wrong.append((name, left))
    assert not wrong


SCRIPT = """
import lightning, lightning as L, lightning.pytorch as pl, pytorch_lightning, lightning_fabric
from lightning import Fabric, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.plugins.io import TorchCheckpointIO as again
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.types import _MAP_LOCATION_TYPE, _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.callbacks.early_stopping import EarlyStopping
from lightning.pytorch.callbacks.progress import ProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar as bar
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.core.module import LightningModule as same
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.tuner.tuning import Tuner as tuner
from lightning.pytorch.utilities import rank_zero_only as only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.parsing import AttributeDict
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS, OptimizerLRScheduler
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from lightning_fabric.utilities.seed import seed_everything as seed
from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint as saver

assert pl is pytorch_lightning and lightning.pytorch is pl and L is lightning and same is LightningModule
assert saver is ModelCheckpoint and pytorch_lightning.Trainer is L.Trainer is Trainer and only is rank_zero_only
assert TrainerFn.FITTING == "fit" and {"fit": 1}[TrainerFn.FITTING] == 1 and RunningStage.SANITY_CHECKING.evaluating
for name in ("lightning.nothing", "lightning.pytorch.nothing", "pytorch_lightning.nothing"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error
    else:
        raise AssertionError(name)
try:
    Trainer(max_epochs="many")
except MisconfigurationException as error:
    print(type(error).__name__, L.__version__)
"""


def run(*arguments, cwd):
    """Run the interpreter; ``arguments`` are its own."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, text=True, capture_output=True, check=False)


def test_the_names_that_libraries_import(tmp_path):
    Path(tmp_path, "names.py").write_text(SCRIPT)
    done = run("-m", "torchhal_lightning", "--stand-in", "names.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ConfigurationError 2.6.6\n"


TRAIN = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

if __name__ == "__main__":
    L.seed_everything(3)
    inputs = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=STRATEGY, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir="runs", use_distributed_sampler=False,
    )
    net = Net()
    trainer.fit(net, loader)
    if trainer.is_global_zero:
        print(type(trainer).__module__, f"{float(trainer.callback_metrics['loss_epoch']):.6f}")
"""


def losses(tmp_path, strategy, *options):
    Path(tmp_path, "train.py").write_text(TRAIN.replace("STRATEGY", repr(strategy)))
    done = run(*options, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].split()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_script_on_two_processes(theirs_pl, tmp_path, strategy):
    where, mine = losses(tmp_path, strategy, "-m", "torchhal_lightning", "--stand-in")
    assert where == "torchhal_lightning.stand_in.pytorch.trainer"
    assert [mine] == losses(tmp_path, strategy)[1:]


SUBCLASS = """
import lightning as L
from train import Net
import torch
from torch.utils.data import DataLoader, TensorDataset

class Mine(L.Trainer):
    def __init__(self, note, **options):
        super().__init__(**options)
        self.note = note
        self.left_behind = lambda: None

class Says(Net):
    def on_train_start(self):
        found = [type(self.trainer).__name__, self.trainer.note, self.trainer.max_epochs]
        with open(f"says{self.global_rank}", "w") as file:
            print(*found, self.trainer.enable_autolog_hparams, end="", file=file)
        assert not hasattr(self.trainer, "left_behind")

if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 4)
    trainer = Mine(
        "mine", enable_autolog_hparams=False, accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir="runs",
    )
    trainer.fit(Says(), loader)
"""


@pytest.mark.parametrize("options", [(), ("--stand-in",)], ids=str)
def test_a_trainer_of_ones_own_in_spawned_processes(tmp_path, options):
    Path(tmp_path, "train.py").write_text(TRAIN.replace("STRATEGY", "'ddp'"))
    Path(tmp_path, "own.py").write_text(SUBCLASS)
    done = run("-m", "torchhal_lightning", *options, "own.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [Path(tmp_path, f"says{rank}").read_text() for rank in range(2)] == ["Mine mine 1 False"] * 2


def test_where_lightning_is_not_installed(tmp_path):
    """It is what is found, without asking for it."""
    if HAS_LIGHTNING:
        pytest.skip("Lightning is installed")
    assert losses(tmp_path, "ddp", "-m", "torchhal_lightning")[0] == "torchhal_lightning.stand_in.pytorch.trainer"
    done = run("-c", "import torchhal_lightning, lightning", cwd=tmp_path)
    assert "No module named 'lightning'" in done.stderr  # nothing happens without asking for it
    done = run("-c", "import torchhal_lightning as t; t.install(stand_in=False)", cwd=tmp_path)
    assert "Lightning is not installed: pip install lightning" in done.stderr


def test_lightning_that_is_imported_is_not_replaced(theirs_pl, tmp_path):
    text = "import lightning, torchhal_lightning as t; t.install(stand_in=True)"
    assert "'lightning' is imported already" in run("-c", text, cwd=tmp_path).stderr


# -- the rest --------------------------------------------------------------------------------------------------


def test_hyperparameters_as_they_were_saved():
    module = models(mine_pl)["Plain"](5)
    module.hparams.width = 9
    module.hparams["more"] = 1
    assert dict(module.hparams) == {"width": 9, "more": 1} and module.hparams_initial["width"] == 5


def test_loggers_write_hyperparameters(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for kind in (mine_pl.loggers.CSVLogger, mine_pl.loggers.TensorBoardLogger):
        logger = kind(tmp_path, name=kind.__name__)
        fit(mine_pl.Trainer, made(models(mine_pl)["Plain"]), logger=logger, max_epochs=1)
        assert '"width": 8' in Path(logger.log_dir, "hparams.yaml").read_text()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert "hp_metric" in events.Tags()["scalars"]


def test_a_copy_of_a_trainer():
    """It trains as the one that it was made of, which it shares nothing with, also where it lies in something else."""
    template = mine_pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    first, (second,) = copy.deepcopy(template), copy.deepcopy([template])
    modules = [made(models(mine_pl)["Plain"]) for _ in range(3)]
    for trainer, module in zip((template, first, second), modules, strict=True):
        torch.manual_seed(3)
        trainer.fit(module, DataLoader(dataset(), 8, shuffle=True))
        assert trainer.global_step == 6 and module.trainer is trainer
    same(modules[1], modules[0])
    same(modules[2], modules[0])
    with pytest.raises(TypeError, match="make a new Trainer"):
        copy.deepcopy(template)
    module = modules[0]
    assert copy.deepcopy(module).body[0].weight.equal(module.body[0].weight)


def test_a_script_that_is_not_there(tmp_path):
    done = run("-m", "torchhal_lightning", "nope.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("there is no script 'nope.py'\nusage: ")


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
def test_models_of_bug_reports(theirs_pl, name):
    found = []
    for demos in (import_module("lightning.pytorch.demos.boring_classes"), import_module(f"{mine_pl.__name__}.demos")):
        torch.manual_seed(1)
        module = getattr(demos, name)()
        trainer_of = theirs_pl.Trainer if demos.__name__.startswith("lightning") else mine_pl.Trainer
        trainer = trainer_of(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, datamodule=demos.BoringDataModule())
        trainer.test(module, verbose=False)
        found.append([each.tolist() for each in module.state_dict().values()])
    assert found[1] == found[0]
