"""Every logger of this package passes the conformance checks, by its service's library without a network."""

import tempfile
from importlib.util import find_spec

import pytest
import service_rows as rows

from torchhal_conformance import conformance_suite

FOLDER = tempfile.mkdtemp(prefix="torchhal-loggers-")

if not find_spec("wandb"):
    pytest.skip("make test-loggers has the services' libraries", allow_module_level=True)

URI = f"sqlite:///{FOLDER}/mlflow.db"


@pytest.fixture(autouse=True)
def _in_folder(monkeypatch):
    monkeypatch.chdir(FOLDER)  # MLflow keeps artifacts in the working folder where its records are in a database


TestMLflow = conformance_suite("logger", "mlflow", arguments={"tracking_uri": URI}, read=rows.of_mlflow)
TestWandb = conformance_suite("logger", "wandb", arguments={"mode": "offline"}, read=rows.of_wandb)
TestComet = conformance_suite("logger", "comet", arguments={"online": False}, read=rows.of_comet)
TestSwanLab = conformance_suite("logger", "swanlab", arguments={"mode": "offline"})
TestTrackio = conformance_suite("logger", "trackio", read=rows.of_trackio)
