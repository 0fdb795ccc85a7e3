"""Record which attributes a forward reads as Python values while it is recorded, and detect changes of them.

What a forward reads of a module as a number, a flag or a string becomes part of its graph, as does the branch
that it took for it. The graph is valid as long as these values are unchanged. A forward that changes attributes itself
would do so only when it is recorded. The same holds for the submodules that it calls, by name or as a whole container.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

PLAIN: Final = (
    type(None), bool, int, float, complex, str, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of the values that are part of a graph as they are."""

_MACHINERY: Final = frozenset(vars(nn.Module())) - {"training"}
"""What ``nn.Module`` itself keeps and reads."""

_CONTAINERS: Final[tuple[Any, ...]] = (list, dict, set, deque)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type, ModuleType)

_MOST_ITEMS = 256
"""Items of a container, or attributes of an object, that are compared one by one: of more, the number."""

_MOST_BYTES = 4096
"""Of an array of NumPy's that is compared."""

_GONE: Final = object()


class AttributeReads:
    """The attributes of ``owners``, submodules included, that one run of a forward has read, but for tensors.

    Args:
        owners: modules, and the Trainer, by the names that messages give them.
        copies: what runs in the places of some of them, by its id; only its training mode counts.
    """

    def __init__(self, owners: Mapping[str, Any], copies: Mapping[int, nn.Module]) -> None:
        self.owners = owners
        self.copies = copies
        self._names = {id(owner): name for name, owner in owners.items()}
        self._read: dict[tuple[int, str], Any] = {}
        self._at_first: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._traces: dict[tuple[int, str], Any] = {}
        self._children_read: dict[tuple[int, str], nn.Module] = {}
        """Modules of which the forward has read a submodule by its name, or by ``""`` all of them."""
        self._children: list[tuple[nn.Module, str, Any]] = []
        self.changed: list[str] = []
        """Attributes that the forward has changed itself; they are what they were again."""

    # -- while the forward runs ------------------------------------------------------------------------------

    @contextmanager
    def recorded(self, paused: Callable[[], bool]) -> Iterator[None]:
        """Note what is read inside, but while ``paused``. Afterwards each module's attributes are what they were."""
        others = (type(owner) for owner in self.owners.values() if not isinstance(owner, nn.Module))
        kinds: set[Any] = {nn.Module, *others}
        before = {id(owner): dict(vars(owner)) for owner in self.owners.values() if isinstance(owner, nn.Module)}
        replaced = {kind: vars(kind).get("__getattribute__", _GONE) for kind in kinds}
        for kind in kinds:
            original: Any = kind.__getattribute__

            def read(owner: Any, name: str, get: Any = original) -> Any:
                try:
                    value = get(owner, name)
                except AttributeError:  # nn.Module then looks for a submodule
                    self._note_child(owner, name, paused())
                    raise
                self._note(owner, name, value, paused())
                return value

            kind.__getattribute__ = read
        try:
            yield
        finally:
            for kind, its_own in replaced.items():
                if its_own is _GONE:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = its_own
            for (owner, name), put_back in self._changes_since(before):
                self.changed.append(self._path(owner, name))
                put_back()

    def _note(self, owner: Any, name: str, value: Any, paused: bool) -> None:
        if paused:
            if name == "training" and id(owner) in self.copies:
                real = self.copies[id(owner)]
                self._read.setdefault((id(real), name), real)
            return
        if name == "_modules":
            self._note_child(owner, "", paused)
        if id(owner) not in self._names or name in _MACHINERY or name.startswith("__"):
            return
        own = object.__getattribute__(owner, "__dict__")
        if name not in own and isinstance(value, (*_FUNCTIONS, torch.Tensor)):  # a method; what a property computes
            return
        self._read.setdefault((id(owner), name), owner)
        if name in own and isinstance(owner, nn.Module) and (id(owner), name) not in self._at_first:
            kept = copy.copy(value) if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS else None
            self._at_first[id(owner), name] = (_trace(value), kept)

    def _note_child(self, owner: Any, name: str, paused: bool) -> None:
        if not paused and id(owner) in self._names and isinstance(owner, nn.Module):
            self._children_read.setdefault((id(owner), name), owner)

    def _changes_since(self, before: Mapping[int, dict[str, Any]]) -> Iterator[tuple[tuple[Any, str], Any]]:
        """Yield ((owner, name), what undoes it) of each attribute that the forward has set, removed, or added to.

        A plain value that was set to what it was is no change.
        """
        for owner in self.owners.values():
            members, own = vars(owner), before.get(id(owner), {})
            for name in {**own, **members}.keys() - _MACHINERY if id(owner) in before else ():
                now, then = members.get(name, _GONE), own.get(name, _GONE)
                if now is not then and not (isinstance(now, PLAIN) and _trace(now) == _trace(then)):
                    yield (owner, name), partial(_put_back, members, name, then)
                elif (id(owner), name) in self._at_first:
                    trace, kept = self._at_first[id(owner), name]
                    if _trace(now) != trace:
                        yield (owner, name), partial(_refill, now, kept)

    # -- afterwards ------------------------------------------------------------------------------------------

    def settle(self) -> AttributeReads:
        """Take what the attributes are now for what they were when the forward ran."""
        self._at_first = {}
        self._traces = {key: self._trace_of(key) for key in self._read}
        self._children = [
            (owner, name, list(owner._modules.values()) if not name else owner._modules[name])
            for (_, name), owner in self._children_read.items()
            if not name or name in owner._modules
        ]
        return self

    def differing(self) -> str | None:
        """Return the name of an attribute that has another value than it had when the forward ran."""
        for key, trace in self._traces.items():
            if self._trace_of(key) != trace:
                return self._path(self._read[key], key[1])
        for owner, name, child in self._children:
            if name and owner._modules.get(name) is not child:
                return self._path(owner, name)
            if not name and list(owner._modules.values()) != child:
                return self._names[id(owner)] or type(owner).__name__
        return None

    def numbers(self) -> dict[str, str]:
        """Return the numbers and flags among them that modules have themselves, as text: what all ranks have alike."""
        return {
            self._path(owner, name): repr(vars(owner)[name])
            for (_, name), owner in self._read.items()
            if isinstance(owner, nn.Module) and isinstance(vars(owner).get(name), bool | int | float)
        }

    def _trace_of(self, key: tuple[int, str]) -> Any:
        try:
            return _trace(getattr(self._read[key], key[1]))
        except Exception:
            return None

    def _path(self, owner: Any, name: str) -> str:
        prefix = self._names[id(owner)]
        return f"{prefix}.{name}" if prefix else name


def _put_back(members: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        del members[name]
    else:
        members[name] = value


def _refill(container: Any, items: Any) -> None:
    """Give ``container`` the ``items`` that it had; None: it is too large, or no container, and stays as it is."""
    if items is not None:
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(items)


class _Itself:
    """Equal to what holds the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _trace(value: Any, depth: int = 2) -> Any:
    """Return what is compared of ``value``: a plain value, an object itself, or what is in it down to ``depth``."""
    kind = type(value)
    if isinstance(value, PLAIN):
        return kind, value  # with its type: 1 == True
    if isinstance(value, (torch.Tensor, nn.Module, *_FUNCTIONS)):
        return _Itself(value)
    if isinstance(value, random.Random) or kind.__module__.startswith("numpy.random"):
        return kind, pickle.dumps(value)  # what it has drawn
    if kind.__module__ == "numpy" and value.nbytes <= _MOST_BYTES:
        return kind, value.tobytes()
    if isinstance(value, set | frozenset):
        return kind, len(value), frozenset(value) if len(value) <= _MOST_ITEMS else None
    if isinstance(value, list | tuple | deque):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        if kind.__module__.startswith("torchhal"):  # it changes by itself while a model is trained
            return kind
        value = getattr(value, "__dict__", {})
        items = value.items()
    if not depth or len(value) > _MOST_ITEMS:
        return kind, len(value)
    return kind, [(key, _trace(item, depth - 1)) for key, item in items]
