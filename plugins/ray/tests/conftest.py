"""One Ray cluster of two nodes for the tests of a file, in processes of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from limits import scaled

T = TypeVar("T")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "ray.md"

OWN = {
    "RAY_AUTH_MODE": "disabled",  # or it keeps a token in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_TRAIN_V2_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15 by itself: beside other tests they would hardly get a core
}
NODE = {
    "include_dashboard": False,
    "object_store_memory": 100 * 2**20,
    "resources": {"HPU": 0},  # don't look for any: see HIDE
}
HIDE = """
import os, sys

sys.modules["habana_frameworks"] = None
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
"""
"""Ray imports habana_frameworks wherever it is installed; here it is a stub that answers with an ImportError."""


def _started(start: Callable[[], T]) -> T:
    """Start a node of Ray's, which gives itself 30 s for it however slow the machine is; no variable scales that."""
    for _ in range(round(scaled(2))):
        try:
            return start()
        except Exception as error:
            if not isinstance(error, TimeoutError) and "timed out during startup" not in str(error):
                raise
    return start()


class TwoNodes:
    """Nodes with two cores each; they share this machine's address."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self.cluster = _started(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE}))
        self.add_node()
        ray.init(address=self.cluster.address)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self, **resources: float) -> object:
        options = {**NODE, "resources": {**NODE["resources"], **resources}}
        del options["include_dashboard"]
        return _started(lambda: self.cluster.add_node(num_cpus=2, **options))

    def run_from_page(self, name: str, folder: Path) -> str:
        """Run the script NAME of docs/how-to/ray.md as a program of its own; what it says."""
        (script,) = re.findall(rf"<!-- test: file {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (folder / name).write_text(script)
        environ = {**os.environ, "RAY_ADDRESS": self.address, "HOME": str(folder)}
        del environ["RAY_DEDUP_LOGS"]
        done = subprocess.run(
            [sys.executable, name], cwd=folder, env=environ, text=True, capture_output=True, timeout=170, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def is_free(self, cpus: float = 4.0) -> bool:
        """Whether nobody holds a core any more, waiting a moment for it: no actor, no placement group."""
        deadline = time.monotonic() + scaled(20)
        while time.monotonic() < deadline:
            if self.ray.available_resources().get("CPU", 0.0) == cpus:
                return not [one for one in self._groups() if one["state"] == "CREATED"]
            time.sleep(0.1)
        return False

    def _groups(self) -> list[dict[str, str]]:
        return list(self.ray.util.placement_group_table().values())


@pytest.fixture(scope="module")  # other plugins' tests in the same process want what is hidden here
def variables(tmp_path_factory):
    """What every process of Ray gets, these tests' own among them."""
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join(filter(None, [str(hidden), os.environ.get("PYTHONPATH", "")]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OWN, "PYTHONPATH": path}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def two_nodes(variables):
    made = TwoNodes()
    try:
        yield made
    finally:
        made.ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture
def by_value(two_nodes, request):
    """Classes of the test's own module travel whole: a worker couldn't import it."""
    module = sys.modules[request.module.__name__]
    two_nodes.ray.cloudpickle.register_pickle_by_value(module)
    yield
    two_nodes.ray.cloudpickle.unregister_pickle_by_value(module)
