"""Scripts that import Lightning run where it isn't installed, and do what they do under Lightning."""

import inspect
import os
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import Request
from torchhal_lightning import stand_in
from torchhal_lightning._translated_parts import translated

HAS_LIGHTNING = util.find_spec("lightning") is not None
mine_pl = stand_in.pytorch


@pytest.fixture
def theirs_pl():
    if not HAS_LIGHTNING:
        pytest.skip("Lightning is not installed: make test-lightning")
    return import_module("lightning.pytorch")


# -- modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "OwnLog", "Plain", "Scheduled", "Plateau", "Manual", "ManualOne", "OwnStep", "OwnHooks", "Skips", "Everything",
        "ClosureInside", "LogsEverywhere", "WithMetric",
    ],
)  # fmt: skip
def test_a_fit_equals_lightnings(theirs_pl, name):
    theirs, mine = made(models(theirs_pl)[name]), made(models(mine_pl)[name])
    reference, trainer = fit(theirs_pl.Trainer, theirs), fit(mine_pl.Trainer, mine)
    same(mine, theirs)
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == pytest.approx(
        {k: v.item() for k, v in reference.callback_metrics.items()}
    )
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.1},
        {"val_check_interval": 2},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"fast_dev_run": True},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_arguments(theirs_pl, options):
    theirs, mine = made(models(theirs_pl)["Plain"]), made(models(mine_pl)["Plain"])
    fit(theirs_pl.Trainer, theirs, **options)
    fit(mine_pl.Trainer, mine, **options)
    same(mine, theirs)


def test_evaluation_and_prediction(theirs_pl):
    results = []
    for pl in (theirs_pl, mine_pl):
        module = made(models(pl)["Plain"])
        module.forward = lambda batch, module=module: module.body(batch[0])
        trainer = fit(pl.Trainer, module)
        loader = DataLoader(dataset(16, 9), 8)
        validated = trainer.validate(module, loader, verbose=False)
        tested = trainer.test(module, loader, verbose=False)
        results.append((validated, tested, torch.cat(trainer.predict(module, loader)).tolist()))
    assert results[0][0] == [pytest.approx(each) for each in results[1][0]]
    assert results[0][1] == [pytest.approx(each) for each in results[1][1]]
    assert results[0][2] == results[1][2]
