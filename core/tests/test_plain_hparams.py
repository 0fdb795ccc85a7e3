"""Hyperparameters survive a checkpoint as what they were, or are asked for."""

import dataclasses
import datetime
import enum
import pathlib
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from torchhal import Module, Trainer
from torchhal._hyperparameters import NotPlainError, from_plain, to_plain
from torchhal.errors import CheckpointMismatchError


class Kind(enum.Enum):
    SMALL = 1
    LARGE = "large"


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    YES = "yes"


class Bits(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Prepared:
    name: str

    def __post_init__(self):
        self.title = self.name.title()


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 3
    kind: Kind = Kind.SMALL
    inner: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        assert self.width > 0


VALUES = [
    None,
    True,
    3,
    2.5,
    1j,
    "text",
    b"bytes",
    b"",
    [1, (2, "x")],
    {"a": {1: 2}},
    {1, 2},
    frozenset({1}),
    torch.float16,
    pathlib.Path("/data/x"),
    pathlib.PurePosixPath("a/b"),
    Kind.LARGE,
    Level.LOW,
    Word.YES,
    torch.device("cpu", 0),
    torch.Size([2, 3]),
    datetime.timedelta(hours=3, microseconds=5),
    datetime.datetime(2026, 1, 2, 3),
    datetime.date(2026, 1, 2),
    range(2, 9, 3),
    Namespace(a=1, b=pathlib.Path("c")),
    SimpleNamespace(a=[Kind.SMALL]),
    Config(5, Kind.LARGE, {"p": pathlib.Path("q")}),
    OmegaConf.create({"model": {"width": 3, "path": "${oc.env:HOME}"}, "kinds": [1, 2]}),
    OmegaConf.create([1, {"a": 2}]),
    {"__torchhal__": "path", "value": 3},
    [pathlib.Path("x"), {"k": (Kind.SMALL,)}],
    {Kind.SMALL: 1, Kind.LARGE: {pathlib.Path("x"): [2]}, ("a", Kind.SMALL): 3, 4: None},
    {Kind.SMALL, "a"},
    Bits.READ | Bits.WRITE,
    Prepared("x"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_as_it_was(tmp_path, value):
    torch.save(to_plain(value), tmp_path / "x")
    back = from_plain(torch.load(tmp_path / "x", weights_only=True))
    assert type(back) is type(value) and back == value


@pytest.mark.parametrize("value", [nn.Linear(1, 1), print, nn.Linear, object(), [nn.ReLU()], {"a": object()}])
def test_an_object_has_no_plain_form(value):
    with pytest.raises(NotPlainError, match=type(value).__name__ if not isinstance(value, (list, dict)) else "plain"):
        to_plain(value)


def test_what_contains_itself_has_no_plain_form():
    endless: dict[str, object] = {}
    endless["again"] = [endless]
    with pytest.raises(NotPlainError, match="a dict that contains itself"):
        to_plain(endless)


@pytest.mark.parametrize(
    "name", ["subprocess:Popen", "os:system", "test_plain_hparams:Nothing", "nowhere:Kind", "builtins:dict", "x"]
)
@pytest.mark.parametrize("kind", ["enum", "dataclass"])
def test_a_file_names_no_code_to_run(name, kind):
    before = set(sys.modules)
    with pytest.raises(ValueError, match="can't be made again"):
        from_plain({"__torchhal__": kind, "type": name, "name": "SMALL", "value": {"args": ["true"]}})
    assert set(sys.modules) == before


def test_a_kind_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no kind of hyperparameter 'pickle'"):
        from_plain({"__torchhal__": "pickle", "value": b"x"})


class Net(Module):
    def __init__(self, folder=pathlib.Path("default"), kind=Kind.SMALL, config=None, body=None):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.body(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def save(model, path):
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=1
    )
    trainer.fit(model, torch.ones(2, 1, 2))
    trainer.save_checkpoint(path)


def test_load_restores_hparam_types(tmp_path):
    """A module is built with hyperparameters of the types that it had."""
    config = OmegaConf.create({"depth": 2, "path": "${depth}/x"})
    save(Net(pathlib.Path("/data"), Kind.LARGE, config), tmp_path / "a.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams.folder == pathlib.Path("/data") and loaded.hparams.kind is Kind.LARGE
    assert loaded.hparams.config == config and loaded.hparams.config.path == "2/x"


def test_an_object_is_asked_for_rather_than_defaulted(tmp_path):
    with pytest.warns(UserWarning, match=r"'body' \(Linear\) are or hold objects"):
        save(Net(body=nn.Linear(1, 1)), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"a\.ckpt' alone.*Pass body=... \(a Linear\)"):
        Net.load_from_checkpoint(tmp_path / "a.ckpt")
    body = nn.Linear(1, 1)
    assert Net.load_from_checkpoint(tmp_path / "a.ckpt", body=body).hparams.body is body


def test_missing_hparam_class_refused(tmp_path, monkeypatch):
    """The error for a hyperparameter whose class is gone asks for it."""
    save(Net(kind=Kind.LARGE), tmp_path / "a.ckpt")
    monkeypatch.delattr(sys.modules[__name__], "Kind")
    with pytest.raises(CheckpointMismatchError, match=r"hyperparameter 'kind'.*Kind.*import it.*Pass kind="):
        Net.load_from_checkpoint(tmp_path / "a.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "a.ckpt", kind=None).hparams.kind is None


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (Thing(), "Thing"),
        ({"a": 1, "b": [0, {"c": Thing()}]}, "dict with a Thing in ['b'][1]['c']"),
        ((Thing(),), "tuple with a Thing in [0]"),
        ({"f": len}, "dict with a builtin_function_or_method in ['f']"),
    ],
)
def test_an_object_is_named_with_its_place(value, described):
    with pytest.raises(NotPlainError) as caught:
        to_plain(value)
    assert caught.value.described(value) == described
