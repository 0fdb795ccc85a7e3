"""What a checkpoint of a pipeline holds of state that is no stage's alone, and what may change while it trains."""

import math

import pytest
import torch
from tiers import slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Module, Trainer, registry
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal_parallel.hybrid import HybridStrategy

STEPS = 4


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Staged(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counted(4, 4) for _ in range(4))
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.table
        return x

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.steps += 1  # with each microbatch, where the loss is made
        return nn.functional.mse_loss(out, batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.layers[:2].parameters(), lr=0.01)


def trainer(strategy, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks), **quiet, **options,
    )  # fmt: skip


def data():
    return DataLoader(TensorDataset(torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(1))), 4)


def pipeline():
    return registry.find("strategy", "pipeline").create(split_points=["layers.2"], microbatches=2)


def save(folder, io):
    trainer(pipeline(), ModelCheckpoint(folder, filename="x"), max_epochs=1, plugins=[io]).fit(Staged(), data())
    model = Staged()  # in a new run each rank has what it needs of it
    trainer(pipeline(), max_epochs=1, plugins=[io]).fit(model, data(), ckpt_path=f"{folder}/x.ckpt")
    return [layer.calls for layer in model.layers]


@pytest.mark.parametrize("io", ["torch", "dcp"])
def test_each_entry_is_of_the_rank_that_changes_it(world2, tmp_path, io):
    world2.run(save, str(tmp_path), io)
    saved = registry.find("checkpoint_io", io).create().load_checkpoint(tmp_path / "x.ckpt")["state_dict"]
    calls = {name: value["calls"] for name, value in saved.items() if name.endswith("_extra_state")}
    assert sorted(calls) == [f"layers.{index}._extra_state" for index in range(4)]
    assert set(calls.values()) == {2 * STEPS}  # every stage runs each microbatch once
    assert float(saved["steps"]) == 2 * STEPS


class Thaw(Callback):
    def on_train_epoch_start(self, trainer, module):
        module.table.requires_grad_(trainer.current_epoch > 0)


def thawed():
    trainer(pipeline(), Thaw(), max_epochs=2).fit(Staged(), data())


def test_what_several_stages_have_stays_frozen(world2):
    with pytest.raises(Exception, match=r"'table' is used in the stages 0, 1 of the pipeline"):
        world2.run(thawed)


class AddGroup(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": list(module.layers[2:].parameters()), "lr": 0.02})


class Swap(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.Adam(module.layers.parameters(), lr=0.02)]


def changed(folder, alias, callback):
    strategy = pipeline() if alias == "pipeline" else registry.find("strategy", "hybrid").create(data=2)
    trainer(strategy, callback(), ModelCheckpoint(folder, filename="y"), max_epochs=2).fit(Staged(), data())


@pytest.mark.parametrize("callback", [AddGroup, Swap])
@pytest.mark.parametrize("alias", ["pipeline", slow("hybrid")])
def test_an_optimizer_that_changes_while_training_is_saved(world2, tmp_path, alias, callback):
    world2.run(changed, str(tmp_path), alias, callback)
    path = max(tmp_path.glob("y*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    (state,) = registry.find("checkpoint_io", "torch").create().load_checkpoint(path)["optimizer_states"]
    assert [index for group in state["param_groups"] for index in group["params"]] == list(range(8))
    assert sorted(state["state"]) == list(range(8))


class AllLayers(Staged):
    def configure_optimizers(self):
        return torch.optim.Adam(self.layers.parameters(), lr=0.01)


def saved_after_the_run(folder, strategy, devices, io):
    runner = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, plugins=[io], logger=False,
        callbacks=[ModelCheckpoint(folder, filename="during")], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(AllLayers(), data())
    runner.save_checkpoint(f"{folder}/after.ckpt")


@pytest.mark.parametrize("io", ["torch", slow("dcp")])
@pytest.mark.parametrize("axes", [{"pipeline": 2}, slow({"pipeline": 2, "data": 2}), slow({"pipeline": 2, "shard": 2})])
def test_optimizer_state_of_all_stages_is_saved_after_the_run(request, tmp_path, axes, io):
    devices = math.prod(axes.values())
    strategy = HybridStrategy(**axes, split_points=["layers.2"], microbatches=2)
    request.getfixturevalue(f"world{devices}").run(saved_after_the_run, str(tmp_path), strategy, devices, io)
    load = registry.find("checkpoint_io", io).create().load_checkpoint
    during, after = (load(tmp_path / f"{name}.ckpt")["optimizer_states"] for name in ("during", "after"))
    assert sorted(during[0]["state"]) == sorted(after[0]["state"]) == list(range(8))
    assert after[0]["param_groups"] == during[0]["param_groups"]
    for index, entry in during[0]["state"].items():
        assert sorted(entry) == sorted(after[0]["state"][index])
        for name, value in entry.items():
            torch.testing.assert_close(after[0]["state"][index][name], value, rtol=0, atol=0)


class Heard(Staged):
    heard = 0

    def on_after_backward(self):
        self.heard += 1
        assert all(p.grad is not None for p in self.layers.parameters() if not p.is_meta)


class OwnBackward(Staged):
    def backward(self, loss):
        (10 * loss).backward()


def heard():
    model = Heard()
    trainer(pipeline(), max_epochs=1).fit(model, data())
    return model.heard


def own_backward():
    trainer(pipeline(), max_epochs=1).fit(OwnBackward(), data())


def test_hooks_of_the_backward(world2):
    assert world2.run(heard) == [STEPS, STEPS]
    with pytest.raises(Exception, match="runs the backward passes itself, so backward of OwnBackward"):
        world2.run(own_backward)
