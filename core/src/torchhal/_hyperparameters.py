"""Keep hyperparameters by name, and as plain data that a checkpoint can hold and a load needs no code of."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import pathlib
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from enum import Enum, Flag
from types import SimpleNamespace
from typing import Any

import torch


class Hyperparameters(dict[str, Any]):
    """Constructor arguments by name, readable as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}: there are {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_KIND = "__torchhal__"
"""The key of a dict that stands for a value of another type: which, with its parts beside it."""


class NotPlainError(TypeError):
    """A value that is an object, with no plain form; or that holds one.

    Attributes:
        kind: the class of the object.
        place: the keys and indices by which a container has it.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.place: tuple[Any, ...] = ()

    def described(self, value: Any) -> str:
        """Name what ``value``, which could not be made plain, is: "dict with a Net in ['model']"."""
        name = type(value).__qualname__
        return f"{name} with a {self.kind} in {''.join(f'[{key!r}]' for key in self.place)}" if self.place else name


def to_plain(value: Any) -> Any:
    """Return ``value`` as ``None``, numbers, strings, tensors, and lists, tuples, sets and dicts of them.

    A value of another type that :func:`from_plain` can restore becomes a dict that names the type.

    Raises:
        NotPlainError: it is another object, such as a module, a function or a class, or contains itself.
    """
    try:
        return _to_plain(value)
    except RecursionError:
        name = type(value).__qualname__
        raise NotPlainError(
            f"a {name} that contains itself, or is nested too deeply, has no plain form", name
        ) from None


def _to_plain(value: Any) -> Any:
    if type(value) is bytes and not value:  # which a weights_only load refuses
        return _stand_in("bytes")
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype):
        return value
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (list, tuple):
        return type(value)(itertools.starmap(_part, enumerate(value)))
    if type(value) is set:
        items = [*map(_to_plain, value)]
        return set(items) if _are_hashable(items) else _stand_in("set", value=items)
    if isinstance(value, Flag):  # a combination of several has no name
        return _stand_in("flag", type=_name_of(type(value)), value=value.value)
    if isinstance(value, Enum):  # before what it may be as well, a str or an int
        return _stand_in("enum", type=_name_of(type(value)), name=value.name)
    if is_omegaconf(value):
        from omegaconf import OmegaConf

        return _stand_in("omegaconf", value=_to_plain(OmegaConf.to_container(value, resolve=False)))
    if isinstance(value, pathlib.PurePath):
        return _stand_in("path", pure=not isinstance(value, pathlib.Path), value=str(value))
    if isinstance(value, torch.device):
        return _stand_in("device", value=str(value))
    if isinstance(value, torch.Size):
        return _stand_in("size", value=list(value))
    if isinstance(value, datetime.timedelta):
        return _stand_in("timedelta", value=[value.days, value.seconds, value.microseconds])
    if isinstance(value, datetime.datetime | datetime.date) and type(value) in (datetime.datetime, datetime.date):
        return _stand_in(type(value).__name__, value=value.isoformat())
    if isinstance(value, range):
        return _stand_in("range", value=[value.start, value.stop, value.step])
    if isinstance(value, frozenset):
        return _stand_in("frozenset", value=[*map(_to_plain, value)])
    if type(value) in (Namespace, SimpleNamespace):
        return _stand_in(type(value).__name__, value=_to_plain(vars(value)))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _to_plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]  # set in __post_init__
        parts = {name: _to_plain(getattr(value, name)) for name in names}
        return _stand_in("dataclass", type=_name_of(type(value)), value=parts)
    if type(value) in (dict, OrderedDict, Hyperparameters):
        keys, items = [*map(_to_plain, value)], [*itertools.starmap(_part, value.items())]
        if not _are_hashable(keys):
            return _stand_in("pairs", value=[*map(list, zip(keys, items, strict=True))])
        plain = dict(zip(keys, items, strict=True))
        return _stand_in("dict", value=plain) if _KIND in plain else plain
    raise NotPlainError(f"a {type(value).__qualname__} has no plain form", type(value).__qualname__)


def _part(key: Any, value: Any) -> Any:
    """Return the plain form of what a container has at ``key``."""
    try:
        return _to_plain(value)
    except NotPlainError as error:
        error.place = key, *error.place
        raise


def from_plain(value: Any) -> Any:
    """Return the value that :func:`to_plain` was given.

    Nothing is imported, and no code of the file's choice runs: an Enum or a dataclass has to be imported already, and
    is filled without its constructor.

    Raises:
        ValueError: a value can't be recreated; the message names its type.
    """
    if type(value) in (list, tuple, set):
        return type(value)(map(from_plain, value))
    if not isinstance(value, Mapping):
        return value
    kind, content = value.get(_KIND), value.get("value", "")
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    try:
        if kind in _SIMPLE:
            return _SIMPLE[kind](content)
        if kind == "path":
            return (pathlib.PurePath if value["pure"] else pathlib.Path)(content)
        if kind == "omegaconf":
            from omegaconf import OmegaConf

            return OmegaConf.create(from_plain(content))
        if kind == "flag":
            return _found(value["type"], Enum)(content)
        if kind == "enum":
            return _found(value["type"], Enum)[value["name"]]
        if kind == "dataclass":
            made = object.__new__(_found(value["type"], object))
            for name, item in from_plain(content).items():
                object.__setattr__(made, name, item)
            return made
    except Exception as error:
        raise ValueError(f"a {value.get('type', kind)} can't be made again from {content!r} ({error})") from error
    raise ValueError(f"there is no kind of hyperparameter {kind!r}")


_SIMPLE: dict[Any, Any] = {
    "bytes": lambda _: b"",
    "device": torch.device,
    "size": torch.Size,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "range": lambda parts: range(*parts),
    "set": lambda items: set(map(from_plain, items)),
    "pairs": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
    "frozenset": lambda items: frozenset(map(from_plain, items)),
    "Namespace": lambda values: Namespace(**from_plain(values)),
    "SimpleNamespace": lambda values: SimpleNamespace(**from_plain(values)),
    "dict": lambda values: {key: from_plain(item) for key, item in values.items()},
}


def _are_hashable(values: list[Any]) -> bool:
    try:
        set(values)
    except TypeError:
        return False
    return True


def _stand_in(kind: str, **parts: Any) -> dict[str, Any]:
    return {_KIND: kind, **parts}


def is_omegaconf(value: Any) -> bool:
    """Return whether ``value`` is a container of OmegaConf's, as Hydra hands them over."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str, base: type) -> Any:
    """Return the class of a name of :func:`_name_of`, in an imported module: a dataclass or an Enum, no other."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and issubclass(found, base) and (base is Enum or dataclasses.is_dataclass(found))
    if not known:
        raise ValueError(f"{name!r} is not imported: import it before the load")
    return found


def class_paths(value: Any) -> Iterator[str]:
    """Yield the class paths of a value, as a command line saves an object, and of what it contains."""
    if is_class_path(value):
        yield value["class_path"]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from class_paths(item)


def is_class_path(value: Any) -> bool:
    """Return whether a value describes an object: its class by ``class_path``, and arguments."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("class_path"), str)
        and set(value) <= {"class_path", "init_args", "dict_kwargs"}
    )
