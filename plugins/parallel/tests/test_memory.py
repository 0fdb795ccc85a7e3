"""Estimates of memory against what the ranks of a run hold."""

import gc
import json
import os

import models
import pytest
import torch
import training
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Trainer, cli
from torchhal.memory_estimate import build_model, model_memory
from torchhal.trainer._configure_optimizers import configure_optimizers

pytestmark = pytest.mark.timeout(170)


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Weigh(Callback):
    def __init__(self):
        self.bytes = {}

    def on_before_optimizer_step(self, trainer, module, optimizer):
        held = [parameter for parameter in module.parameters() if not parameter.is_meta]
        self.bytes["parameters"] = sum(local(parameter).nbytes for parameter in held)
        self.bytes["gradients"] = sum(local(parameter.grad).nbytes for parameter in held if parameter.grad is not None)
        self.bytes["buffers"] = sum(buffer.nbytes for buffer in module.buffers() if not buffer.is_meta)

    def on_train_end(self, trainer, module):
        self.bytes["optimizer"] = sum(
            local(value).nbytes
            for entry in trainer.optimizers[0].state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )


class Momentum(models.ConvNet):
    def __init__(self):
        super().__init__()
        self.body[1].register_buffer("mean", torch.zeros(3, 5))
        self.narrow = torch.nn.Parameter(torch.ones(64, 3, dtype=torch.bfloat16))  # fully_shard keeps it whole

    def forward(self, images):
        return super().forward(images) * self.narrow.float().mean()

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


MODELS = {"Adam": models.Transformer, "Momentum": Momentum}


def weigh(strategy, arguments, devices, name):
    if arguments:
        from torchhal_parallel.hybrid import HybridStrategy

        strategy = HybridStrategy(**arguments)
    model, watch = MODELS[name](), Weigh()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, max_steps=2, callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    share = 2 if strategy in ("ddp", "zero1", "zero2", "zero3") else 1
    model.train_dataloader = lambda: DataLoader(
        TensorDataset(*models.data(models.Transformer if name == "Adam" else models.ConvNet, 4)), models.BATCH // share
    )
    trainer.fit(model)
    return watch.bytes


def estimate(strategy, name, world_size):
    module = build_model(MODELS[name])
    return strategy.memory_per_rank(model_memory(module, configure_optimizers(module)[0]), world_size)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alias", ["ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline"])
def test_two_ranks(world2, alias, name):
    from torchhal import registry

    ranks = world2.run(weigh, alias, None, 2, name, timeout=100)
    found = estimate(registry.find("strategy", alias).create(), name, 2).to_dict()
    heaviest = max(ranks, key=lambda rank: sum(rank.values()))
    if alias == "zero1":
        heaviest["optimizer"] = max(rank["optimizer"] for rank in ranks)
    assert {key: found[key] for key in heaviest} == heaviest
    assert found["peak"] >= found["total"] == sum(heaviest.values())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2, "shard": 2}, {"pipeline": 2, "shard": 2}, {"pipeline": 2, "tensor": 2}])
def test_four_ranks(world4, axes):
    from torchhal_parallel.hybrid import HybridStrategy

    ranks = world4.run(weigh, "hybrid", axes, 4, "Adam", timeout=120)
    found = estimate(HybridStrategy(**axes), "Adam", 4).to_dict()
    heaviest = max(ranks, key=lambda rank: sum(rank.values()))
    assert {key: found[key] for key in heaviest} == heaviest


def test_every_strategy_by_command(capfd, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("from models import Transformer\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "--accelerator", "cpu", "--devices", "4", "--model", "mine:Transformer", "--json"]) == 0
    memory = json.loads(capfd.readouterr().out)["memory"]
    rows = {row["strategy"]: row for row in memory["strategies"]}
    assert {"single_device", "ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline"} <= set(rows)
    assert not {"ddp_spawn", "ddp_sharded_spawn"} & set(rows), "as ddp and zero2"
    totals = [rows[name]["total"] for name in ("ddp", "zero1", "zero2")]
    assert totals == sorted(totals, reverse=True) and rows["zero2"]["total"] == rows["zero3"]["total"]
    assert rows["zero3"]["total"] < rows["zero3"]["peak"] < rows["zero2"]["peak"] < rows["ddp"]["peak"]
    count = sum(parameter.numel() for parameter in models.Transformer().parameters())
    assert rows["ddp"]["optimizer"] == 8 * count == 2 * memory["bytes"]


def test_equal_estimates_have_own_rows(capfd):
    """A small model, which one unit holds: zero2 and zero3 gather the same."""
    command = ["explain", "--accelerator", "cpu", "--devices", "2", "--model", "models:Single", "--json"]
    assert cli.main(command) == 0
    rows = {row["strategy"]: row for row in json.loads(capfd.readouterr().out)["memory"]["strategies"]}
    assert rows["zero2"]["peak"] == rows["zero3"]["peak"]


def test_what_a_strategy_can_not_divide(capfd):
    command = ["explain", "--accelerator", "cpu", "--devices", "3", "--model", "models:Transformer"]
    assert cli.main(command) == 0
    out = capfd.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("tensor_parallel"))
    assert "not possible: " in line and "can't divide evenly" in line
    rows = out.partition("strategy  ")[2].splitlines()[1:]
    possible = ["not possible" not in row for row in rows]
    assert possible == sorted(possible, reverse=True), "what is possible comes first"
    assert not any(row.startswith(("hpu", "xla")) for row in rows), "nothing that is made for other hardware"
    assert cli.main([*command[:-3], "2", "--strategy", "pipeline", "--model", "wrong:Tied"]) == 0
    assert "not possible: 'embed.weight' is used in the stages 0, 1" in capfd.readouterr().out


def test_unsupported_precision_names_the_strategy(capfd):
    """A precision that a strategy cannot have is refused in its own name."""
    command = ["explain", "--accelerator", "cpu", "--devices", "2", "--model", "models:Transformer"]
    assert cli.main([*command, "--precision", "16-mixed", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["memory"]["strategies"]
    reasons = {row["strategy"]: row.get("reason", "") for row in rows}
    for alias in ("pipeline", "tensor_parallel"):
        assert f"strategy {alias!r} can't compute in precision '16-mixed'" in reasons[alias]


def threads_after_fits():
    counts = []
    for arguments in ({"data": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}):
        training.train("hybrid", 2, "Transformer", arguments)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads in /proc")
def test_no_thread_of_a_mesh_outlives_its_fit(world2):
    for counts in world2.run(threads_after_fits, timeout=100):
        assert counts[1:] == counts[:1] * 3, "torch's caches keep meshes, and those kept their process groups' threads"
