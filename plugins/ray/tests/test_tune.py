"""Ray Tune: one trial is one fit, in the trial's process and in workers of it, with a scheduler that ends one early."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal.errors import ConfigurationError, ModelError
from torchhal_ray import RayEnvironment, TuneReportCallback

pytestmark = pytest.mark.slow


class Counts(torchhal.Module):
    """Its validation metric is ``level`` times the number of epochs."""

    def __init__(self, level):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.level = level

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("score", self.level * (self.trainer.current_epoch + 1.0), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trial(space):
    from ray import tune

    config = space["config"]

    report = TuneReportCallback({"level": "score"}, save_checkpoints=True)
    trainer = torchhal.Trainer(
        accelerator="cpu", devices="auto", plugins=RayEnvironment(num_workers=2) if config["workers"] else None,
        max_epochs=3, callbacks=report, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tune.get_context().get_trial_dir(),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), 2)
    trainer.fit(Counts(config["level"]), loader, loader)


@pytest.mark.timeout(400)  # starts eight processes, most of which import torch
@pytest.mark.usefixtures("by_value")
def test_trials_report_and_the_scheduler_ends_one(two_nodes, tmp_path):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    # one after the other: what is worse than half of those before it at its second report ends there
    grid = [{"level": 1.0, "workers": False}, {"level": 0.5, "workers": True}]

    def room(space):
        return tune.PlacementGroupFactory([{"CPU": 1.0}] * (3 if space["config"]["workers"] else 1))

    tuner = tune.Tuner(
        tune.with_resources(trial, room),
        param_space={"config": tune.grid_search(grid)},
        tune_config=tune.TuneConfig(
            metric="level", mode="max", max_concurrent_trials=1,
            scheduler=ASHAScheduler(max_t=3, grace_period=2, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="digits", verbose=0),
    )  # fmt: skip
    results = tuner.fit()
    assert not results.errors
    ended = {one.config["config"]["level"]: one for one in results}
    assert {level: one.metrics["training_iteration"] for level, one in ended.items()} == {1.0: 3, 0.5: 2}
    assert ended[1.0].metrics["level"] == 3.0
    for one in ended.values():
        with one.checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/checkpoint.ckpt", weights_only=False)
        assert saved["epoch"] == one.metrics["training_iteration"] - 1
    assert two_nodes.is_free()


def test_the_search_of_the_page(two_nodes, tmp_path):
    said = two_nodes.run_from_page("search.py", tmp_path)
    assert "best with lr 0.1: weight 2." in said, said
    assert two_nodes.is_free()


def test_without_a_trial_it_says_so(tmp_path):
    trainer = torchhal.Trainer(accelerator="cpu", devices=1, callbacks=TuneReportCallback(), logger=False, max_epochs=1)
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), 2)
    with pytest.raises(ConfigurationError, match="no trial to report to"):
        trainer.fit(Counts(1.0), loader, loader)


def test_a_metric_that_was_not_logged_is_named():
    callback = TuneReportCallback(["score", "loss"])
    trainer = torchhal.Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.callback_metrics["score"] = torch.tensor(1.0)
    with pytest.raises(ModelError, match="'loss', but after this validation there is 'score'"):
        callback._metrics(trainer)
