"""The Trainer takes any sequence where several are taken, and any mapping: OmegaConf's, which Hydra hands over, too."""

from collections import UserDict, deque
from datetime import timedelta

import pytest
from omegaconf import OmegaConf

from torchhal import EarlyStopping, Trainer
from torchhal.errors import ConfigurationError
from torchhal.resolve._alias_options import read_alias
from torchhal.trainer.callbacks import EMAWeightAveraging, StochasticWeightAveraging, Timer

FORMS = {
    "plain": lambda value: value,
    "omegaconf": OmegaConf.create,
    "other": lambda value: UserDict(value) if isinstance(value, dict) else deque(value),
}


def make(**options):
    return Trainer(**{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, **options})


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def test_callbacks(form):
    trainer = make(callbacks=form(["ema", {"early_stopping": {"monitor": "x", "patience": 7}}]))
    stopping, average = (
        next(each for each in trainer.callbacks if type(each) is cls) for cls in (EarlyStopping, EMAWeightAveraging)
    )
    assert (stopping.monitor, stopping.patience) == ("x", 7) and average
    assert type(make(callbacks=form({"timer": {"duration": "00:01:00:00"}})).callbacks[0]) is Timer


def test_loggers(form):
    trainer = make(logger=form(["csv", {"csv": {"name": "mine"}}]))
    assert [logger.name for logger in trainer.loggers] == ["torchhal_logs", "mine"]
    assert make(logger=form({"csv": {"name": "mine"}})).logger.name == "mine"


def test_hardware_arguments(form):
    options = form({"ddp": {"static_graph": True}})
    trainer = make(devices=form([0, 1]), plugins=form(["bf16-true"]), strategy=options)
    assert (trainer.num_devices, trainer.precision, trainer.strategy.static_graph) == (2, "bf16-true", True)


def test_durations(form):
    trainer = make(max_time=form({"minutes": 90}), val_check_interval=form({"minutes": 5}))
    assert (trainer.max_time, trainer.val_check_interval) == (timedelta(minutes=90), timedelta(minutes=5))
    with pytest.raises(ConfigurationError, match="'max_time' must be a positive timedelta"):
        make(max_time=form({"minute": 90}))


def test_rates(form):
    StochasticWeightAveraging(swa_lrs=form([0.1, 0.2]))
    with pytest.raises(ValueError, match="'swa_lrs' must be a positive finite number, or a list of them"):
        StochasticWeightAveraging(swa_lrs=form([0.1, -0.2]))


def test_options_within_options_are_plain():
    """They go on to libraries that write them as JSON, which OmegaConf's can't be."""
    given = read_alias("strategy", OmegaConf.create({"some": {"config": {"betas": [0.9, 0.99]}}}))
    assert type(given.options["config"]) is dict and type(given.options["config"]["betas"]) is list


def test_hydra_makes_a_trainer():
    instantiate = pytest.importorskip("hydra.utils").instantiate
    config = OmegaConf.create(
        {
            "_target_": "torchhal.Trainer",
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [{"_target_": "torchhal.EarlyStopping", "monitor": "x"}, "ema"],
            "max_time": {"hours": 1},
        }
    )
    trainer = instantiate(config)
    assert {EarlyStopping, EMAWeightAveraging} <= {type(each) for each in trainer.callbacks}
    assert trainer.max_time == timedelta(hours=1)
