"""Test save_hyperparameters, and models and data modules rebuilt from their checkpoints."""

import argparse

import numpy
import pytest
import torch
from full_net import Data, Net, fit
from quiet_trainer import make
from torch import nn
from torch.utils.data import DataLoader

from torchhal.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
)

pytestmark = pytest.mark.usefixtures("accelerator")


class Params(Net):
    def __init__(self, width, depth=2, *, rate=0.1, **more):
        super().__init__()
        self.save_hyperparameters()


class Derived(Params):
    def __init__(self, width, extra, **more):
        super().__init__(width, **more)


class Ignoring(Net):
    def __init__(self, width, body=None, array=None):
        super().__init__()
        self.save_hyperparameters(ignore=["body"])


class Some(Net):
    def __init__(self, width, depth):
        super().__init__()
        self.save_hyperparameters("width")


class Config(Net):
    def __init__(self, config, other=1):
        super().__init__()
        self.save_hyperparameters(config)


def test_saved_hyperparameters():
    assert Params(3).hparams == {"width": 3, "depth": 2, "rate": 0.1}
    assert Params(3, 4, rate=1.0, colour="red").hparams == {"width": 3, "depth": 4, "rate": 1.0, "colour": "red"}
    assert Derived(3, "e", rate=5).hparams == {"width": 3, "extra": "e", "depth": 2, "rate": 5}
    array = numpy.zeros(3)  # comparing one with anything gives no bool
    assert Ignoring(3, nn.Linear(1, 1), array).hparams == {"width": 3, "array": array}
    assert Some(3, 4).hparams == {"width": 3} and Some(3, 4).hparams.width == 3
    assert Config({"a": 1}).hparams == Config(argparse.Namespace(a=1)).hparams == {"a": 1}
    with pytest.raises(AttributeError, match="no hyperparameter 'nope': there are width"):
        _ = Some(3, 4).hparams.nope
    with pytest.raises(ValueError, match=r"'names' must be arguments of .* width, depth \(got 'wdith'\)"):

        class Wrong(Net):
            def __init__(self, width, depth):
                super().__init__()
                self.save_hyperparameters("wdith")

        Wrong(1, 2)


@pytest.mark.parametrize(
    "model",
    [Params(3, 4, rate=1.0, colour="red"), Derived(3, "e", rate=5), Config({"a": 1}), Config(argparse.Namespace(a=1))],
    ids=lambda model: type(model).__name__,
)
def test_a_model_is_rebuilt_from_its_checkpoint(tmp_path, model):
    trainer, _ = fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = type(model).load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.hparams == model.hparams and torch.equal(again.layer.weight, model.layer.weight)


def test_load_from_incomplete_checkpoint(tmp_path):
    """Arguments that a checkpoint lacks and weights that don't fit are refused by name."""
    trainer, _ = fit(Params(3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Params.load_from_checkpoint(tmp_path / "a.ckpt", width=9).hparams.width == 9
    assert type(Net.load_from_checkpoint(tmp_path / "a.ckpt")) is Net  # takes none of them

    class Other(Net):
        def __init__(self, width, needed):
            super().__init__()

    with pytest.raises(CheckpointMismatchError, match=r"Other can't be built from .*'needed'.*Pass what"):
        Other.load_from_checkpoint(tmp_path / "a.ckpt")
    assert type(Other.load_from_checkpoint(tmp_path / "a.ckpt", needed=1)) is Other

    class Bigger(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(CheckpointMismatchError, match=r"(?s)the weights don't belong to Bigger.*more\.weight"):
        Bigger.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Bigger.load_from_checkpoint(tmp_path / "a.ckpt", strict=False).more.weight.shape == (2, 2)
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        Params.load_from_checkpoint(tmp_path / "nothing.ckpt")


def test_objects_are_not_saved(tmp_path):
    """Hyperparameters that are objects stay out of checkpoints, with a warning."""
    trainer, _ = fit(Ignoring(3, array=DataLoader(torch.ones(1))))
    with pytest.warns(UserWarning, match=r"'array' \(DataLoader\) are or hold objects and are not saved"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"width": 3}
    with pytest.raises(CheckpointMismatchError, match=r"was made with objects.* Pass array=... \(a DataLoader\)"):
        Ignoring.load_from_checkpoint(tmp_path / "a.ckpt")  # not the default in its place
    assert Ignoring.load_from_checkpoint(tmp_path / "a.ckpt", array=None).hparams.array is None


def test_a_data_module_is_rebuilt_too(tmp_path):
    class Mine(Data):
        def __init__(self, size, seen=0):
            super().__init__()
            self.save_hyperparameters()
            self.seen = seen

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    data = Mine(4)
    trainer = make()
    data.seen = 12
    trainer.fit(Net(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Mine.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.hparams.size == 4 and again.seen == 12
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint[Mine.__qualname__] = {"unseen": 12}
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"b.ckpt': .*Mine.load_state_dict raised KeyError for .*'seen'"):
        Mine.load_from_checkpoint(tmp_path / "b.ckpt")
    checkpoint[Mine.__qualname__] = 12
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointCorruptError, match=r"b.ckpt. is damaged: its field .*Mine. must be a dict"):
        Mine.load_from_checkpoint(tmp_path / "b.ckpt")
