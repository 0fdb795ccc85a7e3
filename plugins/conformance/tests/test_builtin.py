"""Run the conformance suites of the core's own components."""

from pathlib import Path
from typing import Any

import pytest

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


# What these launchers don't say the ranks ask each other, which the one process of the kit would wait for in vain; with
# the variables that a job may set for that, all is known. Real jobs without them: tests/test_clusters.py.
NODES = tuple(
    {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "NODE_RANK": str(node), "NNODES": "2"} for node in (0, 0, 1, 1)
)
ENV = tuple(
    {**nodes, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    for rank, nodes in enumerate(NODES)
)
FLUX = tuple(
    {
        **nodes, "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % 2), "FLUX_JOB_SIZE": "4",
        "FLUX_JOB_NNODES": "2", "FLUX_JOB_ID": "ƒ38rBqEWT", "PMI_RANK": str(rank), "PMI_SIZE": "4",
    }
    for rank, nodes in enumerate(NODES)
)  # fmt: skip


def all_but(*ids: str) -> set[str]:
    return {one.id for one in checks_for("cluster_environment")} - set(ids)


def with_nodes(launcher: str) -> list[dict[str, str]]:
    return [{**row, **nodes} for row, nodes in zip(TABLES[launcher], NODES, strict=True)]


TestEnv = conformance_suite("cluster_environment", "env", tables=ENV)
TestOpenMPI = conformance_suite("cluster_environment", "openmpi", tables=with_nodes("openmpi"))
TestMPICH = conformance_suite("cluster_environment", "mpich", tables=with_nodes("mpich"))
TestLSF = conformance_suite("cluster_environment", "lsf", tables=with_nodes("lsf"))
# No variable says how many of Flux's tasks share a host, and its jobs' ids are no numbers, as ENV-07 takes them for.
FLUX_ASKS = {
    "ENV-01", "ENV-02", "ENV-12", "ENV-14",
    *(one.id for one in checks_for("cluster_environment") if not one.id.startswith("ENV")),
}  # fmt: skip
TestFlux = conformance_suite("cluster_environment", "flux", tables=FLUX, only=FLUX_ASKS)
# A pod has one process, so the four ranks are on four nodes, and the checks want them on two.
A_POD = all_but("ENV-03", "ENV-04", "ENV-06", "ENV-09", "ENV-11", "ENV-15", "ENV-16", "ENV-42")
TestKubeflow = conformance_suite("cluster_environment", "kubeflow", only=A_POD)
SAGEMAKER = [
    {**row, "SM_HOSTS": '["n2", "n1"]', "SM_CURRENT_HOST": f"n{1 + int(row['NODE_RANK'])}"} for row in TABLES["local"]
]
TestSageMaker = conformance_suite("cluster_environment", "sagemaker", tables=SAGEMAKER, launcher=())
