"""Run the conformance suites of the core's own components."""

from pathlib import Path
from typing import Any

import pytest
from environment_tables import ENV, NODES
from logger_rows import read_csv, read_tensorboard
from sound_callbacks import Careful

from torchhal import registry
from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.precision import Precision
from torchhal.strategies import SingleDeviceStrategy
from torchhal_conformance import ComponentUnderTest, Session, checks_for, conformance_suite
from torchhal_conformance import _report as reports
from torchhal_conformance._launcher_env import TABLES

TestCPU = conformance_suite("accelerator", "cpu")
Test32True = conformance_suite("precision", "32-true", features={"fused"})
Test64True = conformance_suite("precision", "64-true", features={"fused"})
TestBF16True = conformance_suite("precision", "bf16-true", features={"fused"})
Test16True = conformance_suite("precision", "16-true")
TestBF16Mixed = conformance_suite("precision", "bf16-mixed", features={"fused"})
Test16Mixed = conformance_suite("precision", "16-mixed", features={"fused"})
TestTorch = conformance_suite("checkpoint_io", "torch", golden=Path(__file__).parent / "golden")
TestSingleDevice = conformance_suite("strategy", "single_device", features={"portable"})
TestDDP = pytest.mark.slow(
    conformance_suite("strategy", "ddp", features={"groups", "launches", "portable", "sync_grads"})
)
TestDDPSpawn = pytest.mark.slow(
    conformance_suite("strategy", "ddp_spawn", features={"spawn"}, only={"STR-33", "STR-34"})
)
TestTorchElastic = pytest.mark.slow(
    conformance_suite("cluster_environment", "torchelastic", features={"elastic", "launches"})
)
TestLocal = conformance_suite("cluster_environment", "local", features={"launches"})
TestCSV = conformance_suite("logger", "csv", read=read_csv)
TestTensorBoard = conformance_suite("logger", "tensorboard", read=read_tensorboard)
TestEarlyStopping = conformance_suite("callback", "early_stopping", arguments={"monitor": "loss"})
TestModelCheckpoint = conformance_suite("callback", "model_checkpoint")
TestTimer = conformance_suite("callback", "timer")
TestEMA = conformance_suite("callback", "ema")
TestWeightAveraging = conformance_suite("callback", "weight_averaging")
TestSWA = conformance_suite("callback", "swa", arguments={"swa_lrs": 0.01, "swa_epoch_start": 3})
CALLBACKS = {one.id for one in checks_for("callback") if one.id.startswith("CBK")}
TestCareful = conformance_suite("callback", Careful, only=CALLBACKS)
TestSWAFromStart = conformance_suite(  # CBK-06 saves when the fit has ended, and the model has the average
    "callback",
    "swa",
    arguments={"swa_lrs": 0.01, "swa_epoch_start": 1},
    only=CALLBACKS - {"CBK-06"},
)
TestLearningRateMonitor = conformance_suite("callback", "lr_monitor")
TestProgressBar = conformance_suite("callback", "progress_bar")
TestModelSummary = conformance_suite("callback", "model_summary")
TestRichProgress = conformance_suite("callback", "rich_progress")
TestRichSummary = conformance_suite("callback", "rich_summary")
TestDeviceStats = conformance_suite("callback", "device_stats")
TestOnExceptionCheckpoint = conformance_suite(
    "callback", "on_exception_checkpoint", arguments={"dirpath": "on_exception"}
)
TestGradientAccumulationScheduler = conformance_suite(
    "callback", "gradient_accumulation_scheduler", arguments={"scheduling": {0: 1, 1: 2}}
)
TestSlurm = conformance_suite("cluster_environment", "slurm", features={"host_lists"})


class BarePrecision(Precision):
    """Precision with its contract's defaults alone."""


class BareIO(CheckpointIO):
    """Checkpoint IO with the two abstract methods alone, and no feature."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return TorchCheckpointIO().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def recognizes(self, path):
        return TorchCheckpointIO().recognizes(path)


class BareStrategy(SingleDeviceStrategy):
    """Strategy with its contract's defaults alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [("precision", BarePrecision), ("checkpoint_io", BareIO), ("strategy", BareStrategy)],
)
def test_component_without_features_is_conformant(kind: str, part: type[Any]) -> None:
    component = ComponentUnderTest.of(kind, part)
    with Session(component) as session:
        report = reports.build(component, [session.run(one) for one in checks_for(kind)])
    failed = [(one["id"], one["reason"]) for one in report["checks"] if one["outcome"] == "failed"]
    assert not failed
    assert report["verdict"] == "conformant"
    assert report["features"] == []
    assert report["levels"]["extended"]["passed"] == 0


def with_nodes(launcher: str) -> list[dict[str, str]]:
    return [{**row, **nodes} for row, nodes in zip(TABLES[launcher], NODES, strict=True)]


ALONE = {one.id for one in checks_for("cluster_environment") if one.id.startswith("ENV") and one.id < "ENV-50"}
TestEnvWithNodes = conformance_suite("cluster_environment", "env", tables=ENV, only=ALONE)
TestOpenMPIWithNodes = conformance_suite("cluster_environment", "openmpi", tables=with_nodes("openmpi"), only=ALONE)
TestMPICHWithNodes = conformance_suite("cluster_environment", "mpich", tables=with_nodes("mpich"), only=ALONE)
TestLSFWithNodes = conformance_suite("cluster_environment", "lsf", tables=with_nodes("lsf"), only=ALONE)
TestEnv = conformance_suite("cluster_environment", "env")
TestOpenMPI = conformance_suite("cluster_environment", "openmpi")
TestMPICH = conformance_suite("cluster_environment", "mpich")
TestLSF = conformance_suite("cluster_environment", "lsf")
TestFlux = conformance_suite("cluster_environment", "flux")
TestKubeflow = conformance_suite("cluster_environment", "kubeflow")
TestSageMaker = conformance_suite("cluster_environment", "sagemaker")


def test_every_environment_of_the_core_is_checked_in_other_layouts() -> None:
    """Two nodes with two ranks, three with one, one with four, and nodes of two ranks and of one, where they can be."""
    own = {
        entry.component.alias for entry in registry.entries("cluster_environment") if entry.distribution == "torchhal"
    }
    layouts = {alias: set(ComponentUnderTest.of("cluster_environment", alias).worlds) for alias in own}
    of_all = {"2+2", "1+1+1", "4", "2+1", "3+1"}
    cannot = {"local": {"2+1", "3+1"}, "sagemaker": {"4", "2+1", "3+1"}, "kubeflow": {"2+2", "4", "2+1", "3+1"}}
    assert {alias: of_all - found for alias, found in layouts.items() if of_all - found} == cannot
