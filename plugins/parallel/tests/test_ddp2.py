"""ddp2 against one device on the same global batch, on two nodes of several devices."""

import functools
import os
import socket
import subprocess
import sys

import models
import pytest
import torch
import torch.utils.checkpoint
from batch_parts import Losses, dataset, greatest, make
from tiers import slow
from torch.utils.data import DataLoader, TensorDataset

from torchhal import ModelCheckpoint, Module
from torchhal.errors import UnsupportedCombinationError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def as_node():
    """This rank of the world as the only process of its node."""
    os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def as_rank():
    os.environ.update(GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])


def on_a_node(accelerator, devices, model, folder=None, ckpt_path=None, options=None):
    as_node()
    try:
        module = model()
        losses = Losses()
        saver = [ModelCheckpoint(dirpath=folder, filename="{step}")] if folder else []
        trainer = make(
            (accelerator, devices), "ddp2", num_nodes=2, callbacks=[losses, *saver], enable_checkpointing=bool(folder),
            **{"accumulate_grad_batches": models.ACCUMULATE, "gradient_clip_val": models.CLIP, **(options or {})},
        )  # fmt: skip
        data = TensorDataset(*models.data(model))
        trainer.fit(
            module,
            DataLoader(data, models.BATCH // 2),
            DataLoader(dataset(model, 3), models.BATCH),
            ckpt_path=ckpt_path,
        )
        strategy = trainer.strategy
        shape = (trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank, len(strategy.devices))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = torch.cat(trainer.predict(module, DataLoader(dataset(model, 3), models.BATCH)))
        return losses.values, module.state_dict(), metrics, shape, predicted
    finally:
        as_rank()


@functools.lru_cache
def alone(model):
    module = model()
    losses = Losses()
    trainer = make(
        ("cpu", 1), callbacks=[losses], accumulate_grad_batches=models.ACCUMULATE, gradient_clip_val=models.CLIP
    )
    trainer.fit(
        module,
        DataLoader(TensorDataset(*models.data(model)), models.BATCH),
        DataLoader(dataset(model, 3), models.BATCH),
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses.values, module.state_dict(), metrics


@pytest.mark.parametrize(("accelerator", "devices"), [("cpu", 2), slow("cpu", 3), slow("sim", 2)])
@pytest.mark.parametrize("model", [slow("Transformer"), "ConvNet"])
def test_two_nodes_equal_one_device(world2, accelerator, devices, model):
    if accelerator == "sim":
        pytest.importorskip("torchhal_simulator")
    losses, state, metrics = alone(getattr(models, model))
    nodes = world2.run(on_a_node, accelerator, devices, getattr(models, model), timeout=90)
    for rank, (_, their_state, their_metrics, shape, _) in enumerate(nodes):
        assert shape == (2, rank, rank, 0, devices)
        assert greatest(their_state, state) < 3e-5
        assert their_metrics["loss_epoch"] == pytest.approx(metrics["loss_epoch"], rel=1e-5)
        assert their_metrics["val_loss"] == pytest.approx(metrics["val_loss"], rel=1e-5)
    mean = [sum(pair) / 2 for pair in zip(nodes[0][0], nodes[1][0], strict=True)]
    assert mean == pytest.approx(losses, abs=3e-5)
    assert len(nodes[0][4]) == len(dataset(models.ConvNet, 3))
    assert greatest(nodes[0][1], nodes[1][1]) == 0


def test_ddp2_checkpoint_resumes_on_either(world2, tmp_path):
    """A checkpoint of two nodes continues on two and on one device."""
    world2.run(on_a_node, "cpu", 2, models.ConvNet, str(tmp_path), None, {"max_steps": 6}, timeout=60)
    [path] = tmp_path.glob("*.ckpt")
    undisturbed = world2.run(on_a_node, "cpu", 2, models.ConvNet, timeout=60)
    resumed = world2.run(on_a_node, "cpu", 2, models.ConvNet, None, str(path), timeout=60)
    for (losses, state, *_), (their_losses, their_state, *_) in zip(undisturbed, resumed, strict=True):
        assert their_losses == losses[6 * models.ACCUMULATE :]
        assert greatest(their_state, state) == 0
    module = models.ConvNet()
    trainer = make(("cpu", 2), accumulate_grad_batches=models.ACCUMULATE, gradient_clip_val=models.CLIP)
    trainer.fit(module, DataLoader(TensorDataset(*models.data(models.ConvNet)), models.BATCH), ckpt_path=path)
    assert trainer.global_step == models.BATCHES // models.ACCUMULATE
    assert greatest(module.state_dict(), alone(models.ConvNet)[1]) < 3e-5


NODE = """
import sys
import torch
import torchhal
from torch.utils.data import DataLoader, TensorDataset


class Line(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.linspace(-1, 1, 64).view(32, 2)
strategy, num_nodes, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
trainer = torchhal.Trainer(
    accelerator="cpu", strategy=strategy, devices=2, num_nodes=num_nodes, max_epochs=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
line = Line()
trainer.fit(line, DataLoader(TensorDataset(x, 3 * x[:, :1] + 1), batch_size))
weights = [round(value, 5) for value in torch.cat([p.flatten() for p in line.parameters()]).tolist()]
print(trainer.world_size, trainer.global_rank, weights, round(float(trainer.callback_metrics["loss_epoch"]), 5))
"""


def test_nodes_that_are_started_by_hand(tmp_path):
    """The same script on two hosts, with NODE_RANK, MASTER_ADDR and MASTER_PORT; dp gives what they must give."""
    script = tmp_path / "node.py"
    script.write_text(NODE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start(*arguments, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )

    by_hand = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start("ddp2", "2", "4", NODE_RANK=str(rank), **by_hand) for rank in range(2)]
    said = [node.communicate(timeout=90)[0].strip() for node in nodes]
    alone = start("dp", "1", "8").communicate(timeout=60)[0].strip()
    assert alone.startswith("1 0 [")
    assert said == [f"2 {rank}{alone.removeprefix('1 0')}" for rank in range(2)]


def test_dp_is_refused_in_one_of_several_processes(monkeypatch):
    variables = {
        "TORCHHAL_LAUNCH_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedCombinationError, match="each of which would train by itself"):
        make(("cpu", 2))


class TwoOptimizers(torch.nn.Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.SGD(self.second.parameters(), lr=0.2)]

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.second(self.first(batch[0]).tanh()), batch[1])

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class ManualModule(TwoOptimizers, Module):
    pass


def regression_data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator))


def manual_on_a_node():
    as_node()
    try:
        module = ManualModule()
        make(("cpu", 1), "ddp2", num_nodes=2).fit(module, DataLoader(regression_data(), 2))
        return module.state_dict()
    finally:
        as_rank()


def test_manual_optimization_equals_one_device(world2):
    nodes = world2.run(manual_on_a_node, timeout=60)
    plain = TwoOptimizers()
    optimizers = plain.configure_optimizers()
    samples = torch.arange(24).view(-1, 2, 2)  # each node has every second sample
    for batch in [regression_data()[rows.T.flatten()] for rows in samples]:
        for optimizer in optimizers:
            optimizer.zero_grad()
            plain.loss(batch).backward()
            optimizer.step()
    for state in nodes:
        assert greatest(state, plain.state_dict()) < 1e-6
