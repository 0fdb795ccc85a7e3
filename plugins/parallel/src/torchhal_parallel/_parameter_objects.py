"""The parameter objects of a user's module, while other tensors train in their places and afterwards.

Dividing a model puts new parameters into its modules. Code that keeps a reference to an old one, in a list for example,
would use a weight that is not trained, without an error. So the old objects are emptied: all of their elements are NaN,
in the memory of one. After the run they hold the trained weights, and are the module's parameters again.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchhal.errors import ModelError

_MOST_OBJECTS = 200_000
"""How many objects under one root :func:`find_references` visits: more are data, not part of a model."""

_MOST_ITEMS = 10_000
"""How many items of one container it visits."""

_CONTAINERS: Final[tuple[Any, ...]] = (list, tuple, deque, set, frozenset)


def made_of(tensor: Any) -> list[str]:
    """Return the attributes of a tensor subclass that are the tensors it is made of; none with its own memory."""
    return list(tensor.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(tensor) else []


def empty(tensor: torch.Tensor) -> None:
    """Free the memory of ``tensor``, of those that it is made of too: it keeps its shape, and no number."""
    if inner := made_of(tensor):
        for name in inner:
            empty(getattr(tensor, name))
        return
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    tensor.data = torch.full((), number, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def spans_of(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    """Yield the memory in which ``tensor``, or what it is made of, lies: (storage, first byte, end).

    A tensor with no memory of its own, or no element, has none.
    """
    if inner := made_of(tensor):
        for part in (getattr(tensor, name) for name in inner):
            if isinstance(part, torch.Tensor):  # a DTensor's mesh isn't
                yield from spans_of(part)
    elif not tensor.is_meta and not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
        first, size = int(tensor.storage_offset()), tensor.element_size()
        steps = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        yield tensor.untyped_storage(), first * size, (first + steps + 1) * size


class Memory:
    """The memory of parameters, by which they are recognized once they are freed or moved; each part has a name."""

    def __init__(self) -> None:
        # a weak reference keeps the key's meaning; several parameters may lie in one storage
        self._storages: dict[int, tuple[StorageWeakRef, dict[tuple[int, int], str]]] = {}
        self._addresses: dict[int, str] = {}

    def add(self, name: str, parameter: torch.Tensor) -> None:
        for storage, *span in spans_of(parameter):
            if storage.nbytes():
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                _, spans = self._storages.setdefault(reference.cdata, (reference, {}))
                spans.setdefault((span[0], span[1]), name)
                if not made_of(parameter):
                    self._addresses.setdefault(parameter.data_ptr(), name)

    def update(self, other: Memory) -> None:
        for key, (reference, spans) in other._storages.items():
            _, own = self._storages.setdefault(key, (reference, {}))
            own.update({**spans, **own})
        self._addresses = {**other._addresses, **self._addresses}

    def shared_by(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter that has a byte of its memory in common with ``tensor``."""
        for storage, first, last in spans_of(tensor) if self._storages else ():
            if (known := self._storages.get(storage._cdata)) is not None:
                for (begin, end), name in known[1].items():
                    if first < end and begin < last:
                        return name
        return None

    def at(self, address: int) -> str | None:
        """Return the name of the parameter whose ``data_ptr()`` this was."""
        return self._addresses.get(address)


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on ``parameter``, without those that it is made of."""
    inner = made_of(parameter)
    return {name: value for name, value in vars(parameter).items() if name not in inner}


class ParameterObjects:
    """The parameters that ``module`` has now, by all of their names."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.by_name = dict(module.named_parameters(remove_duplicate=False))
        self._in_place = {id(parameter): parameter for parameter in self.by_name.values()}
        self._stands_for: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._marks = {identity: marks_of(parameter) for identity, parameter in self._in_place.items()}
        self._memory: dict[int, Memory] = {}
        for name, parameter in self.by_name.items():
            self._memory.setdefault(id(parameter), Memory()).add(name, parameter)
        self.torchs_marks: set[str] = set()
        """Names of the attributes that dividing the model has given to parameters."""

    def any_replaced(self) -> bool:
        """Return whether the module has others in the place of some, or fewer."""
        return not {id(parameter) for parameter in self.by_name.values()} <= set(map(id, self.module.parameters()))

    def empty_replaced(self) -> None:
        """Free those that the module has others in the place of by now."""
        now = set(map(id, self.module.parameters()))
        for name, parameter in self.by_name.items():
            if id(parameter) in self._in_place and id(parameter) not in now:
                self._memory[id(parameter)].add(name, parameter)  # a device's memory by now
                empty(self._in_place.pop(id(parameter)))

    def settle(self, alias: str) -> None:
        """Note what trains in the place of which; the module has been divided by strategy ``alias``.

        Raises:
            ModelError: a parameter was replaced under one of its names only.
        """
        self.empty_replaced()
        places: dict[int, tuple[str, nn.Parameter]] = {}
        apart: list[tuple[str, str]] = []
        for name, now in self.module.named_parameters(remove_duplicate=False):
            original = self.by_name.get(name)
            if original is None:
                continue
            first, there = places.setdefault(id(original), (name, now))
            if there is not now:
                apart.append((first, name))
            marks = self._marks[id(original)]  # what users mark their parameters with
            self.torchs_marks |= (marks_of(now).keys() | marks_of(original).keys()) - marks.keys()
            if now is not original:
                vars(now).update(marks)
                self._stands_for[id(now)] = (now, original)
        for first, name in apart:
            raise ModelError(
                f"{first!r} and {name!r} of {type(self.module).__name__} are one parameter, and strategy {alias!r} "
                "would divide it under one of these names only: give each a parameter of its own, or look it up where "
                "it is used"
            )

    def replaced(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, the user's object) of each parameter in whose place another trains."""
        originals = {id(original) for _, original in self._stands_for.values()}
        for name, parameter in self.by_name.items():
            if id(parameter) in originals:
                originals.remove(id(parameter))
                yield name, parameter

    def memory_of_replaced(self) -> Memory:
        """Return the memory of the replaced parameters."""
        memory = Memory()
        for _, parameter in self.replaced():
            memory.update(self._memory[id(parameter)])
        return memory

    def check_unused(self, alias: str) -> None:
        """Raise ModelError if a graph that is there refers to a parameter that another trains in the place of."""
        if self._first_used() is None:
            return
        gc.collect()  # a graph may be garbage, which stays for long in a run that collects seldom
        if (name := self._first_used()) is not None:
            raise ModelError(
                f"the training step of {type(self.module).__name__} computes with {name!r} by a reference from "
                f"before the model was divided, and strategy {alias!r} trains another object in its place: look "
                "parameters up where they are used, by self.get_parameter(name) say"
            )

    def _first_used(self) -> str | None:
        uses = ((name, parameter._use_count()) for name, parameter in self.replaced())  # type: ignore[attr-defined]
        return next((name for name, count in uses if count > 1), None)

    def object_for(self, now: nn.Parameter) -> nn.Parameter | None:
        """Return the user's object in whose place ``now`` trains; itself if it is one; None for one that came since."""
        if id(now) in self._stands_for:
            return self._stands_for[id(now)][1]
        return now if id(now) in self._in_place else None


def check_references(
    roots: Mapping[str, Any], objects: ParameterObjects, skip: Any, alias: str, *, through_optimizers: bool = False
) -> None:
    """Raise ModelError if what takes part in training refers to a parameter that has been replaced by another.

    Args:
        roots: what takes part, by the names that a message gives it.
        objects: of a module that strategy ``alias`` has divided.
        skip: objects that are not visited.
        alias: see above.
        through_optimizers: see :func:`find_references`.
    """
    replaced = {id(parameter): name for name, parameter in objects.replaced()}
    if not replaced:
        return
    memory = objects.memory_of_replaced()
    for path, name, what in find_references(roots, replaced, skip, memory, through_optimizers=through_optimizers):
        raise ModelError(
            f"{path} remembers {what}{name!r} from before the model was divided, and strategy {alias!r} trains another "
            "object in its place: what is computed from this one would be wrong. Look parameters up by name where they "
            "are used (self.named_parameters(), self.get_parameter(name)), and make optimizers and their groups in "
            "configure_optimizers"
        )


def find_references(
    roots: Mapping[str, Any],
    parameters: Mapping[int, str],
    skip: Any = (),
    memory: Memory | None = None,
    *,
    through_optimizers: bool = True,
) -> Iterator[tuple[str, str, str]]:
    """Yield where objects under ``roots`` refer to a parameter or its memory, or hold its ``id()`` or ``data_ptr()``.

    Goes through attributes, containers, closures and partial functions, nearest first, but not through the parameters
    that a module holds as such. Containers are list, tuple, set, dict and deque: any other may create its items, or
    read them from a disk, on access.

    Args:
        roots: by the beginnings of paths.
        parameters: names, by ``id()``.
        skip: objects to leave alone.
        memory: where the parameters lay.
        through_optimizers: whether one that an optimizer steps counts. Before ``configure_optimizers`` an attribute may
            hold that of an earlier fit.

    Yields:
        (path, the parameter's name, "" or what of it, as "the id() of ").
    """
    memory = memory or Memory()
    seen = {id(thing) for thing in (*skip, parameters, memory)}
    for root in roots.items():  # each with a limit of its own: data is large, and must not hide what is in a callback
        yield from _references_under(root, parameters, memory, seen, through_optimizers=through_optimizers)


def _references_under(
    root: tuple[str, Any], parameters: Mapping[int, str], memory: Memory, seen: set[int], *, through_optimizers: bool
) -> Iterator[tuple[str, str, str]]:
    waiting = deque([root])
    room = _MOST_OBJECTS
    while waiting:
        path, thing = waiting.popleft()
        if isinstance(thing, torch.Tensor):
            if id(thing) in parameters:
                yield path, parameters[id(thing)], ""
            elif (name := memory.shared_by(thing)) is not None:
                yield path, name, "the memory of "
        elif (number := _number(thing)) is not None:
            if number in parameters:
                yield path, parameters[number], "the id() of "
            elif (name := memory.at(number)) is not None:
                yield path, name, "the data_ptr() of "
        elif isinstance(thing, Optimizer) and not through_optimizers:
            continue
        elif id(thing) not in seen and not isinstance(thing, str | bytes | float | complex | type | ModuleType):
            seen.add(id(thing))
            for held in islice(_held(path, thing), room):
                room -= 1
                waiting.append(held)


def _number(thing: Any) -> int | None:
    """Return an int, or what a string of one stands for, as a JSON object's key must be."""
    if isinstance(thing, str) and len(thing) <= 20 and thing.isalnum() and thing[0].isdecimal():
        try:
            return int(thing, 0)
        except ValueError:
            return None
    return thing if isinstance(thing, int) else None


def _held(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):  # by the methods of dict and of the others, not by a subclass's overrides
        yield from ((f"a key of {path}", key) for key in islice(dict.keys(thing), _MOST_ITEMS))
        yield from (
            (f"{path}[{key if isinstance(key, int) else repr(key)[:40]}]", value)
            for key, value in islice(dict.items(thing), _MOST_ITEMS)
        )
    elif kind := next((kind for kind in _CONTAINERS if isinstance(thing, kind)), None):
        indexed = not issubclass(kind, set | frozenset)
        for index, value in enumerate(islice(kind.__iter__(thing), _MOST_ITEMS)):
            yield f"{path}[{index}]" if indexed else path, value
    elif isinstance(thing, FunctionType):
        names = thing.__code__.co_freevars
        for name, cell in zip(names, thing.__closure__ or (), strict=True):
            try:
                yield f"{name!r} of the function {path}", cell.cell_contents
            except ValueError:  # not set yet
                continue
        yield f"a default of {path}", thing.__defaults__
        yield f"a default of {path}", thing.__kwdefaults__
    elif isinstance(thing, partial):
        yield from ((f"an argument of {path}", value) for value in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, MethodType):
        yield path, thing.__self__
    elif type(thing).__module__ == "numpy":
        yield path, getattr(thing, "base", None)  # the tensor of which an array is a view
    elif isinstance(thing, BuiltinFunctionType) or thing is None:
        return
    else:
        path = f"{path} ({type(thing).__name__})" if isinstance(thing, Optimizer) else path
        for slot in getattr(type(thing), "__slots__", ()):
            if isinstance(slot, str) and slot not in ("__dict__", "__weakref__") and hasattr(thing, slot):
                yield f"{path}.{slot}", getattr(thing, slot)
        own = {"_parameters", "_flat_weights"} if isinstance(thing, nn.Module) else set()
        for name, value in getattr(thing, "__dict__", {}).items():
            if isinstance(thing, nn.Module) and name in ("_modules", "_buffers"):
                yield from ((f"{path}.{child}", held) for child, held in value.items())
            elif name not in own and not str(name).startswith("__composable_api_state_key"):
                yield f"{path}.{name}", value
