"""Find, in some of a model's steps, what of their results is made of one rank's part of a layer.

A ``colwise`` layer that no ``rowwise`` one closes raises no error: each rank computes with its part, and the losses
of the ranks differ. Names and sizes alone don't determine which layer takes the output of which, so here the parts are
followed through the operators that they go into, by the memory that they lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchhal.errors import ConfigurationError
from torchhal_parallel._divided_regions import DividedRegions

_JOINING = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of the operators that communicate: code that calls one has closed the layer by itself."""

_OVERWRITING = ("zero_", "fill_", "copy_")
"""Operators after which nothing is left of what their first argument was."""


class PartialOutputCheck:
    """A check that no result of a step is made of parts, over the layers of a resolved plan and ``size`` ranks.

    A style that is an object determines alone what its layer takes and gives, and is not checked.
    """

    def __init__(self, module: nn.Module, resolved: Mapping[str, Any], size: int, regions: DividedRegions) -> None:
        self.module = module
        self.size = size
        self.regions = regions
        here = {
            name: module.get_submodule(name)
            for name, style in resolved.items()
            if isinstance(style, str) and not any(p.is_meta for p in module.get_submodule(name).parameters())
        }
        self.columns = {name: layer for name, layer in here.items() if resolved[name] == "colwise"}
        self.rows = {name: layer for name, layer in here.items() if resolved[name] == "rowwise"}
        self.takers = {name: layer for name, layer in here.items() if name not in self.rows}
        """Layers that take whole inputs."""
        self._calls: dict[tuple[str, bool, bool], int] = {}

    def watched(self, function: Callable[..., Any], what: str, regions: Sequence[nn.Module] = ()) -> Callable[..., Any]:
        """Return ``function``, of which some calls raise ConfigurationError if the result, ``what``, holds parts.

        Or if something in it computes with parts what it would not with the whole; ``regions`` are modules to compare
        beside the model's own. Of the calls of all functions that give ``what``, as each validation gets a new
        function, these are the first, the second, the fourth, the eighth and so on, as a forward may take other
        branches later: those with gradients and those without, in training and in evaluation mode counted separately.
        """
        if not self.columns and not self.rows:  # nothing makes or takes parts
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            kind = (what, torch.is_grad_enabled(), self.module.training)
            self._calls[kind] = number = self._calls.get(kind, 0) + 1
            if number & (number - 1):  # no power of two
                return function(*args, **kwargs)
            with self._watched(regions) as (parts, outside):
                result = function(*args, **kwargs)
                self._check(parts, result, what)
                self.regions.check_result(result, what)
            if outside:
                raise ConfigurationError(
                    f"the 'rowwise' layer {outside[0]!r} is called where no forward of a module around it has called "
                    "the 'colwise' layer that it closes, and what stands between them can't be compared with one "
                    "device: let one forward, that of the model or of a part of it, call both"
                )
            return result

        return call

    @contextmanager
    def _watched(self, regions: Sequence[nn.Module]) -> Iterator[tuple[_Parts, list[str]]]:
        parts = _Parts()
        model = type(self.module).__name__

        def divided(name: str) -> Callable[..., None]:
            return lambda layer, args, output: parts.mark(output, frozenset({name}))

        def takes_whole(name: str) -> Callable[..., None]:
            return lambda layer, args: self._check(parts, args, f"what {name!r} is called with")

        def takes_parts(name: str) -> Callable[..., None]:
            return lambda layer, args: self._check_input(name, layer, args[0] if args else None)

        with ExitStack() as stack:
            for name, layer in self.columns.items():
                stack.callback(layer.register_forward_hook(divided(name)).remove)
            for name, layer in self.takers.items():
                stack.callback(layer.register_forward_pre_hook(takes_whole(name), prepend=True).remove)
            for name, layer in self.rows.items():
                stack.callback(layer.register_forward_pre_hook(takes_parts(name), prepend=True).remove)
            hook = self.module.register_forward_hook(
                lambda module, args, output: self._check(parts, output, f"what the forward of {model} returns")
            )
            stack.callback(hook.remove)
            stack.enter_context(parts)
            yield parts, stack.enter_context(self.regions.watched(parts.are_in, parts.paused, regions))

    def _check(self, parts: _Parts, result: Any, what: str) -> None:
        if found := sorted({name for leaf in tree_leaves(result) for name in parts.of(leaf)}):
            raise ConfigurationError(
                f"nothing closes the 'colwise' layer {found[0]!r}: {what} is made of each rank's part of its output, "
                "and differs on each. Make the layer that takes its output 'rowwise', or this one 'colwise_rep'"
            )

    def _check_input(self, name: str, layer: nn.Module, given: Any) -> None:
        if isinstance(given, torch.Tensor) and given.dim() and isinstance(layer, nn.Linear):
            features = layer.in_features
            if given.shape[-1] * self.size != features:
                raise ConfigurationError(
                    f"the 'rowwise' layer {name!r} takes a part of its {features} inputs on each of {self.size} ranks, "
                    f"and was called with {given.shape[-1]} of them: make the layer that gives them 'colwise', or this "
                    "one 'rowwise_rep'"
                )


class _Parts(TorchDispatchMode):
    """A dispatch mode that notes which memory was computed from one rank's part of which layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}  # a weak reference keeps the key's meaning
        self._paused = self._joined = False

    def are_in(self, leaf: Any) -> bool:
        return bool(self.of(leaf))

    @contextmanager
    def paused(self) -> Iterator[Callable[[], bool]]:
        """Record nothing; the value of the context is whether an operator has communicated."""
        self._paused, self._joined = True, False
        try:
            yield lambda: self._joined
        finally:
            self._paused = False

    def mark(self, value: Any, layers: Set[str]) -> None:
        for leaf in tree_leaves(value):
            if _is_plain(leaf):
                reference = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
                self._layers[reference.cdata] = (reference, self.of(leaf) | layers)

    def clear(self, value: Any) -> None:
        """Forget what the memory of ``value`` was made of: something else stands in it now."""
        for leaf in tree_leaves(value):
            if _is_plain(leaf):
                self._layers.pop(leaf.untyped_storage()._cdata, None)

    def of(self, leaf: Any) -> frozenset[str]:
        """Return the layers of whose parts ``leaf`` is made."""
        if not self._layers or not _is_plain(leaf):
            return frozenset()
        return self._layers.get(leaf.untyped_storage()._cdata, (None, frozenset[str]()))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if self._paused:
            self._joined |= namespace in _JOINING and name != "_allgather_base_"  # by which units are gathered
            return result
        only_shaped = name.startswith("new_") or name.endswith("_like")
        if not self._layers or only_shaped:
            return result
        if namespace in _JOINING:
            self.clear(result)  # also where it is an argument, changed in place
            return result
        overwritten = name in _OVERWRITING and _is_all_of_its_memory(args[0])
        sources = args[1:] if overwritten else args
        layers = frozenset[str]().union(*map(self.of, tree_leaves((sources, kwargs))))
        if overwritten:
            self.clear(args[0])
        if layers:
            self.mark(result, layers)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.mark(value, layers)
        return result


def _is_plain(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return not is_traceable_wrapper_subclass(leaf)


def _is_all_of_its_memory(leaf: Any) -> bool:
    return _is_plain(leaf) and leaf.numel() * leaf.itemsize == leaf.untyped_storage().nbytes()
