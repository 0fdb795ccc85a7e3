"""Tell which calls of modules compute alike, as those of the blocks of a transformer do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchhal_parallel._module_restore import ForwardOverride

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class KindsOfCalls:
    """``kinds(module, args, kwargs)`` gives two values; calls of one kind compute alike but for their tensors' values.

    The first is equal for calls of one module, whose attributes may change, the second for calls of modules that are
    alike, as the blocks of a transformer: of equal types, attributes, shapes and ``marks``. An object is equal to
    itself only; a module's own index (``layer_idx``) and the sizes of batches are ignored. The result is the same on
    every rank.

    Args:
        model: what holds the modules.
        marks: what else distinguishes its submodules.
    """

    def __init__(self, model: nn.Module, marks: Mapping[nn.Module, str]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._marks = marks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        index = {int(part) for part in self._names.get(module, "").split(".") if part.isdigit()}
        given = _form((args, kwargs), index, lambda tensor: (tensor.dim(), tensor.dtype))
        members = tuple(
            (name, type(each), self._marks.get(each), _attributes(each, index)) for name, each in module.named_modules()
        )
        return (id(module), given), (members, given)


def _attributes(module: nn.Module, index: set[int]) -> tuple[Any, ...]:
    """Of one module, in a form that can be compared: its tensors by shape and dtype, hooks by their number."""
    found: list[Any] = []
    for name, value in sorted(vars(module).items()):
        if name == "_modules" or name.startswith("__composable_api_state_key"):
            continue
        if "hook" in name and hasattr(value, "__len__"):
            found.append((name, len(value)))
        elif isinstance(value, ForwardOverride):
            found.append((name, type(value)))
        else:
            found.append((name, _form(value, index, lambda tensor: (tuple(tensor.shape), tensor.dtype))))
    return tuple(found)


def _form(value: Any, index: set[int], of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` as something comparable; ``index`` are numbers of the module among its neighbours."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, _form(each, index, of_tensor)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_form(each, index, of_tensor) for each in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(value)
    if isinstance(value, torch.Tensor):
        return type(value), of_tensor(value)
    if isinstance(value, int) and not isinstance(value, bool) and value in index:
        return "index"  # such as layer_idx
    return type(value), value if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal for one object alone, and keeps it: a later one could have its ``id()``, on one rank of several."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
