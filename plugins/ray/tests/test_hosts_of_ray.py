"""``ray start`` on two hosts with networks and names of their own, made by ``tests/clusters``: one fit over both, and
the end of it when a host goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_hosts import Cluster, cluster_of

pytestmark = pytest.mark.slow

HEAD = "10.99.0.101"

SCRIPT = """
import sys
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal
from torchhal.errors import RankFailedError


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if trouble and batch_idx == 1:
            print("in the midst", self.trainer.global_rank, flush=True)
            time.sleep(120)
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Hosts(torchhal.Callback):
    seen = ()

    def on_fit_start(self, trainer, module):
        import socket

        strategy = trainer.strategy
        self.seen = strategy.all_gather_object((strategy.node_rank, strategy.local_rank, socket.gethostname()))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


trouble = sys.argv[1] == "trouble"
torch.manual_seed(1)
x = torch.randn(96, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model, hosts = Net(), Hosts()
trainer = torchhal.Trainer(
    accelerator="cpu", strategy="ddp", devices=1, num_nodes=2, plugins="ray", max_epochs=1, callbacks=hosts,
    default_root_dir="runs", enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(model, DataLoader(data, 12))
except RankFailedError as error:
    print("ENDED", error.rank, str(error).replace("\\n", " "), flush=True)
    sys.exit(3)
expected = Net()
optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
for xs, ys in DataLoader(data, 24):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(expected.layers(xs), ys).backward()
    optimizer.step()
for name, value in expected.state_dict().items():
    torch.testing.assert_close(model.state_dict()[name], value)
saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
torch.testing.assert_close(saved["layers.0.weight"], expected.layers[0].weight.data)
print("EQUAL", sorted(hosts.seen), flush=True)
"""


RAY = str(Path(sys.executable).with_name("ray"))


def node(cluster: Cluster, host: str, *where: str) -> subprocess.Popen[str]:
    """``ray start``, for as long as the process lives."""
    process = cluster.start(
        host, RAY, "start", *where, "--num-cpus", "1", "--object-store-memory", "100000000", "--block",
        "--disable-usage-stats",
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "--block" in line:  # what it means is said at the end of the start
            return process
    raise AssertionError("".join(said))


def train(cluster: Cluster, mode: str) -> subprocess.Popen[str]:
    return cluster.start("n1", sys.executable, "-u", "train.py", mode, RAY_ADDRESS=f"{HEAD}:6379")


@pytest.fixture
def cluster(variables):
    with cluster_of(2) as made:
        (made.folder / "train.py").write_text(SCRIPT)
        yield made


@pytest.mark.timeout(400)  # two nodes of Ray, and four processes that import torch
def test_one_fit_over_two_hosts_and_its_end_with_one_of_them(cluster):
    node(
        cluster,
        "n1",
        "--head",
        "--node-ip-address",
        HEAD,
        "--include-dashboard=false",
        "--temp-dir",
        f"{cluster.folder}/r",
    )
    second = node(cluster, "n2", "--address", f"{HEAD}:6379", "--node-ip-address", "10.99.0.102")
    process = train(cluster, "well")
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    assert "EQUAL [(0, 0, 'n1'), (1, 0, 'n2')]" in said
    process = train(cluster, "trouble")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "in the midst" in line and len([one for one in lines if "in the midst" in one]) == 2:
            second.terminate()
    said = "".join(lines)
    assert process.wait(timeout=60) == 3, said
    assert "ENDED 1 rank 1 on node 10.99.0.102 (" in said and "died: " in said, said
    # what each rank prints comes with its name
    assert "(rank 0 pid=" in said and "(rank 1 pid=" in said, said
