"""Lightning's strategies, accelerators, precisions, checkpoint IOs and cluster environments as arguments."""

from datetime import timedelta
from functools import partial
from importlib import import_module

import pytest
import torch
from lightning_models import dataset, fit, made, models
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_wrapper
from torch.distributed.fsdp import wrap
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.precision import MixedPrecision
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal_lightning import Trainer

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def chosen(**options):
    """Return the strategy that a Trainer composes of ``options``."""
    return torchhal.Trainer(**{**QUIET, **options}).strategy


def environments(pl):
    return import_module(f"{pl.__name__}.plugins.environments")


def test_ddp_with_its_options(pl):
    theirs = pl.strategies.DDPStrategy(
        find_unused_parameters=True, bucket_cap_mb=3, timeout=timedelta(seconds=40), start_method="fork"
    )
    strategy = chosen(strategy=theirs, devices=2, accelerator=pl.accelerators.CPUAccelerator())
    assert type(strategy) is DDPStrategy and strategy.find_unused_parameters and strategy.start_method == "fork"
    assert strategy.ddp_options == {"bucket_cap_mb": 3} and strategy.timeout == timedelta(seconds=40)
    assert strategy.accelerator.name == "cpu" and len(strategy.devices) == 2


def test_what_is_not_named_is_the_default_here(pl):
    strategy = chosen(strategy=pl.strategies.DDPStrategy(), devices=2, accelerator="cpu")
    assert strategy.timeout == DDPStrategy().timeout and strategy.start_method == "subprocess"


def test_a_communication_hook(pl):
    theirs = pl.strategies.DDPStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=bf16_compress_wrapper)
    strategy = chosen(strategy=theirs, devices=2, accelerator="cpu")
    assert strategy.comm_hook is not None and strategy.comm_hook is not allreduce_hook


def test_the_parts_inside_of_a_strategy(pl):
    plugins = pl.plugins
    theirs = pl.strategies.DDPStrategy(
        accelerator=pl.accelerators.CPUAccelerator(), parallel_devices=[torch.device("cpu")] * 2,
        precision_plugin=plugins.MixedPrecision("bf16-mixed", "cpu"), checkpoint_io=plugins.AsyncCheckpointIO(),
        cluster_environment=environments(pl).LightningEnvironment(),
    )  # fmt: skip
    strategy = chosen(strategy=theirs)
    assert strategy.precision.alias == "bf16-mixed" and "async" in strategy.checkpoint_io.features
    assert strategy.cluster_environment.name == "local" and len(strategy.devices) == 2


def test_fsdp(pl):
    linear = {nn.Linear}
    for policy, expected in (
        (linear, [nn.Linear]),
        (wrap.ModuleWrapPolicy(linear), [nn.Linear]),
        (partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=linear), [nn.Linear]),
        (partial(wrap.size_based_auto_wrap_policy, min_num_params=7), 7),
        (None, "none"),
    ):
        theirs = pl.strategies.FSDPStrategy(auto_wrap_policy=policy, activation_checkpointing_policy=linear)
        strategy = chosen(strategy=theirs, devices=2, accelerator="cpu")
        assert strategy.wrap_policy == expected and strategy.activation_checkpointing == [nn.Linear]
        assert strategy.reshard_after_forward and not strategy.cpu_offload
    theirs = pl.strategies.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True, state_dict_type="sharded")
    strategy = chosen(strategy=theirs, devices=2, accelerator="cpu")
    assert not strategy.reshard_after_forward and strategy.cpu_offload
    assert "sharded" in strategy.checkpoint_io.features
    with pytest.raises(ConfigurationError, match=r"'ignored_states' can't be given to torchhal's 'zero3'"):
        chosen(strategy=pl.strategies.FSDPStrategy(ignored_states=[]), devices=2, accelerator="cpu")


def asks_for_large_ones(module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel >= 30


def test_any_policy_of_torch(pl):
    strategy = chosen(
        strategy=pl.strategies.FSDPStrategy(auto_wrap_policy=asks_for_large_ones), devices=2, accelerator="cpu"
    )
    assert [strategy.wrap_policy("name", nn.Linear(size, 5)) for size in (4, 5)] == [False, True]


def test_one_device(pl):
    strategy = chosen(strategy=pl.strategies.SingleDeviceStrategy("cpu"))
    assert type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"


@pytest.mark.parametrize("given_as", ["precision", "plugins"])
def test_precisions(pl, given_as):
    plugins = pl.plugins
    for theirs, alias in (
        (plugins.Precision(), "32-true"),
        (plugins.DoublePrecision(), "64-true"),
        (plugins.HalfPrecision("bf16-true"), "bf16-true"),
        (plugins.MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (plugins.MixedPrecision("16-mixed", "cpu"), "16-mixed"),
    ):
        assert chosen(accelerator="cpu", **{given_as: theirs}).precision.alias == alias
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = chosen(accelerator="cpu", plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler)]).precision
    assert isinstance(precision, MixedPrecision) and precision.scaler is scaler


def test_a_subclass_is_taken_where_it_changes_nothing(pl):
    class Named(pl.strategies.DDPStrategy):
        def __init__(self):
            super().__init__(static_graph=True)

    assert chosen(strategy=Named(), devices=2, accelerator="cpu").static_graph

    class Changed(pl.strategies.DDPStrategy):
        def backward(self, *args, **options): ...

    with pytest.raises(ConfigurationError, match=r"Changed under.*changes of Lightning's DDPStrategy: backward"):
        chosen(strategy=Changed(), devices=2, accelerator="cpu")


def test_what_has_no_counterpart_is_refused(pl):
    class Board(pl.accelerators.CPUAccelerator):
        def setup_device(self, device): ...

    class Scaled(pl.plugins.MixedPrecision):
        def pre_backward(self, *args): ...

    for options, why in (
        ({"strategy": pl.strategies.ModelParallelStrategy()}, "ModelParallelStrategy, which has no counterpart"),
        (
            {"strategy": pl.strategies.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 2))},
            "'HYBRID_SHARD'.*'hybrid'",
        ),
        ({"strategy": pl.strategies.DDPStrategy(model_averaging_period=4)}, "model_averaging_period"),
        ({"accelerator": Board()}, r"Board under.*: setup_device\. Write a subclass of torchhal\.accelerators"),
        ({"precision": Scaled("bf16-mixed", "cpu")}, "Scaled under.*: pre_backward"),
        ({"plugins": [pl.plugins.TorchSyncBatchNorm()]}, "sync_batchnorm=True"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            chosen(**{"accelerator": "cpu", "devices": 2, **options})


def test_the_facade_takes_its_words_and_layers(pl):
    trainer = Trainer(strategy="fsdp_cpu_offload", devices=2, accelerator="cpu", **QUIET)
    assert trainer.strategy.cpu_offload and isinstance(trainer.strategy, pl.strategies.FSDPStrategy)
    trainer = Trainer(
        strategy="ddp_spawn", devices=2, accelerator="cpu", plugins=pl.plugins.TorchSyncBatchNorm(), **QUIET
    )
    assert trainer.trainer.sync_batchnorm and isinstance(trainer.strategy, pl.strategies.DDPStrategy)
    assert not isinstance(trainer.strategy, pl.strategies.FSDPStrategy)


def test_float16_is_bfloat16_on_a_cpu(pl):
    for accelerator in ("cpu", "auto", pl.accelerators.CPUAccelerator()):
        with pytest.warns(UserWarning, match="'16-mixed' is 'bf16-mixed' on a CPU"):
            trainer = Trainer(accelerator=accelerator, precision="16-mixed", **QUIET)
        assert trainer.precision_plugin.alias == "bf16-mixed"


def recording(pl):
    """Return a checkpoint IO as users write one, which notes its calls."""

    class Recording(pl.plugins.TorchCheckpointIO):
        calls: list

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.calls.append("save")
            super().save_checkpoint(checkpoint, path, storage_options)

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            self.calls.append("load")
            return super().load_checkpoint(path, map_location, weights_only)

        def remove_checkpoint(self, path):
            self.calls.append("remove")
            super().remove_checkpoint(path)

    Recording.calls = []
    return Recording()


@pytest.mark.parametrize("trainer_of", [torchhal.Trainer, Trainer])
def test_a_checkpoint_io_of_ones_own(pl, tmp_path, trainer_of):
    io = recording(pl)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1)
    module = made(models(pl)["Plain"])
    options = {"plugins": [io], "callbacks": [saver], "enable_checkpointing": True}
    fit(trainer_of, module, max_epochs=4, **options)
    assert io.calls.count("save") >= 2 and io.calls.count("remove") == io.calls.count("save") - 1
    trainer = trainer_of(**{**QUIET, **options}, accelerator="cpu", max_epochs=5)
    trainer.fit(made(models(pl)["Plain"]), DataLoader(dataset(), 8), ckpt_path=saver.best_model_path)
    assert io.calls.count("load") == 1 and trainer.current_epoch == 5


def test_an_io_that_fails_says_which(pl, tmp_path):
    class Full(pl.plugins.TorchCheckpointIO):
        def save_checkpoint(self, *args, **options):
            raise OSError(28, "No space left on device")

    trainer = fit(torchhal.Trainer, made(models(pl)["Plain"]), max_epochs=1, plugins=Full())
    with pytest.raises(CheckpointError, match=r"Full can't save .*No space left"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


def environment(pl):
    """Return a cluster environment as users write one, over the variables of another launcher."""

    class Named(environments(pl).ClusterEnvironment):
        creates_processes_externally = True
        main_address = "127.0.0.1"
        main_port = 1

        @staticmethod
        def detect():
            return True

        def world_size(self):
            return 1

        def set_world_size(self, size): ...

        def global_rank(self):
            return 0

        def set_global_rank(self, rank): ...

        def local_rank(self):
            return 0

        def node_rank(self):
            return 0

    return Named


def test_a_cluster_environment_of_ones_own(pl):
    trainer = fit(torchhal.Trainer, made(models(pl)["Plain"]), devices=1, strategy="ddp", plugins=[environment(pl)()])
    assert trainer.world_size == 1 and trainer.global_step
    with pytest.raises(ConfigurationError, match=r"Named has 1 process\(es\), and devices=2"):
        chosen(accelerator="cpu", devices=2, strategy="ddp", plugins=environment(pl)())

    class Starts(environment(pl)):
        creates_processes_externally = False

    with pytest.raises(ConfigurationError, match=r"Starts, whose processes the Trainer has to start"):
        chosen(accelerator="cpu", plugins=Starts())


@pytest.mark.parametrize(
    ("name", "ours"),
    [("SLURMEnvironment", "slurm"), ("TorchElasticEnvironment", "torchelastic"), ("KubeflowEnvironment", "kubeflow")],
)
def test_known_cluster_environments(pl, name, ours):
    from torchhal_lightning._translated_parts import translated

    theirs = getattr(environments(pl), name)()
    (found,) = translated(torchhal.resolve.Request(plugins=[theirs])).plugins
    assert found == ours or set(found) == {ours}


def train(tree, kind):
    pl = import_module(tree)
    module = made(models(pl)["Plain"])
    strategy = {"theirs": pl.strategies.DDPStrategy(static_graph=True), "ours": {"ddp": {"static_graph": True}}}[kind]
    torch.manual_seed(1)
    trainer = torchhal.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(dataset(), 4))
    return {key: value.clone() for key, value in module.state_dict().items()}


def test_both_spellings_train_the_same(pl, world2):
    theirs, ours = (world2.run(train, pl.__name__, kind)[0] for kind in ("theirs", "ours"))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
