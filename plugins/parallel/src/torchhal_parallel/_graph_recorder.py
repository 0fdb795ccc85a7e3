"""Record operators, module calls and autograd functions into an ``fx.Graph`` while a forward runs on fake tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from torchhal import rng
from torchhal.errors import ModelError
from torchhal_parallel._attribute_reads import PLAIN
from torchhal_parallel._fake_modules import FakeModules
from torchhal_parallel._recorded_calls import FunctionCall, InContext, is_same_again
from torchhal_parallel._remote_tensor import written

CONSTANT = "_constant"
"""How the names of tensors begin that a forward has from elsewhere than its arguments, parameters and buffers."""


class GraphRecorder(TorchDispatchMode):
    """A dispatch mode that adds the operators which run inside to ``graph``, and calls of modules as one node each.

    Args:
        modules: the model, and copies of its modules without memory.
        graph: the graph to add to.
        device: where the run computes.
        added: by id, the names of modules that the model did not have when it was cut into stages.
    """

    def __init__(self, modules: FakeModules, graph: fx.Graph, device: torch.device, added: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.graph = graph
        self.device = device
        self.model = type(modules.module).__name__
        self.nodes: dict[int, fx.Node] = {}
        self.values: dict[fx.Node, torch.Tensor] = {}  # which also keeps the ids in ``nodes`` theirs
        self.constants: dict[str, torch.Tensor] = {}
        self.trained: dict[fx.Node, bool] = {}
        self.silent = False
        self.recomputes = False
        self.with_grad = torch.is_grad_enabled()
        self.autocast = self._autocast()
        self.added = added
        self.protected: dict[int, str] = {}
        """What is in a storage that the forward must not write to."""
        for _, key, tensor in modules.swaps:
            if isinstance(tensor, nn.Parameter):
                self.protected[storage_id(tensor)] = f"the parameter {modules.attributes.get(id(tensor), key)!r}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not makes and not func._schema.is_mutable:  # a question of shape, dtype or device
            return result
        self._check_written(func, args, kwargs)
        self._check_saved_tensors_hooks()
        operands = self.node_of(args, func.__name__), self.node_of(kwargs, func.__name__)
        with_grad = torch.is_grad_enabled() or not self.with_grad
        own_autocast = self._autocast() != self.autocast
        target = func
        if not with_grad or own_autocast:
            kind = self.device.type if own_autocast else None
            target = InContext(func, with_grad=with_grad, autocast=kind)
        self.bind(result, self.graph.call_function(target, *operands))
        return result

    def _check_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise ModelError if an operator writes to an argument, or to a parameter by what may be in a batch."""
        for tensor in written(func, args, kwargs):
            what = self.protected.get(storage_id(tensor))
            if what is None or (what.startswith("the parameter") and is_same_again(func, args, kwargs)):
                continue
            raise ModelError(
                f"the forward of {self.model} changes {what} in place, by {func.__name__}, and "
                "a pipeline does so for each microbatch, on the rank of one stage. Compute with a copy (.clone()) of "
                "an argument; write to parameters between the steps, in on_train_batch_start say"
            )

    def _check_saved_tensors_hooks(self) -> None:
        """Raise ModelError for hooks of the user's on what autograd keeps; note torch's own, which save memory."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if self.with_grad else None
        if hooks is None:
            return
        self.recomputes = True
        if not str(getattr(hooks[0], "__module__", "")).startswith("torch."):
            raise ModelError(
                f"the forward of {self.model} computes under saved_tensors_hooks of its own, "
                "which a pipeline does not follow between modules: enter them inside of a module that is called"
            )

    @contextmanager
    def calls_recorded(self) -> Iterator[None]:
        """Record calls of the model's modules as such, except those whose forward is recorded."""
        original: Callable[..., Any] = nn.Module.__call__
        apply = vars(torch.autograd.Function)["apply"]
        names, around = self.modules.names, self.modules.around

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if not self.silent and name is None:
                self._check_added(module)
            if self.silent or name is None or name in around:
                if not self.silent and (module._backward_hooks or module._backward_pre_hooks):
                    raise ModelError(
                        f"{name or type(module).__name__!r} is cut into stages of a pipeline and has a hook on its "
                        "backward, which runs in several of them: register it on the layers"
                    )
                return original(module, *args, **kwargs)
            return self.call_module(name, args, kwargs)

        def call_function(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if self.silent:
                return apply.__get__(None, kind)(*args, **kwargs)
            return self.call_function(kind, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(call_function)  # type: ignore[assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    def _check_added(self, module: nn.Module) -> None:
        """Raise ModelError for a module with tensors that came too late; what one without does is followed."""
        if id(module) not in self.added or not _has_tensors(module):
            return
        name, model = self.added[id(module)], self.model
        raise ModelError(
            f"the forward of {model} calls {name!r}, a {type(module).__name__} with parameters or buffers that has "
            "come into the model since it was cut into the stages of a pipeline, which compute with those that it had "
            f"then: have it there before the fit, in configure_model say, let the forward of {model} choose between "
            "modules that it has from the start, or use a strategy under which each rank has the model, such as "
            "'zero1'"
        )

    def call_function(self, kind: Any, args: Any, kwargs: Any) -> Any:
        """Record ``kind.apply(...)`` of an ``autograd.Function``, whose backward is another than that of its forward.

        That of a reentrant checkpoint has none of its own, so that what it calls is recorded.
        """
        if kind is CheckpointFunction:
            self.recomputes = True
            function, _, *inputs = args
            with torch.set_grad_enabled(torch.is_grad_enabled() and any(map(_requires_grad, inputs))):
                return function(*inputs)
        given = tree_leaves((args, kwargs))
        strange = next((leaf for leaf in given if not isinstance(leaf, (torch.Tensor, *PLAIN))), None)
        in_transform = torch._C._are_functorch_transforms_active()
        if strange is not None or in_transform or self._autocast() != self.autocast:
            how = "with a " + type(strange).__name__ if strange is not None else "under an autocast of its own"
            raise ModelError(
                f"the forward of {self.model} calls {kind.__name__}, which has a backward of "
                f"its own, between its modules {'under a transform of torch.func' if in_transform else how}, which a "
                "pipeline does not follow: do it inside of a module that is called"
            )
        operands = self.node_of(args, repr(kind.__name__)), self.node_of(kwargs, repr(kind.__name__))
        self.silent = True
        try:
            result = kind.apply(*args, **kwargs)
        finally:
            self.silent = False
        with_grad = torch.is_grad_enabled() or not self.with_grad
        target: Any = FunctionCall(kind)
        if not with_grad:
            target = InContext(target, with_grad=False, autocast=None)
        self.bind(result, self.graph.call_function(target, *operands))
        return result

    def call_module(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._autocast() != self.autocast:
            raise ModelError(
                f"the forward of {self.model} calls {name!r} under a torch.autocast of its "
                "own, which a pipeline does not follow between modules: enter it inside of that module"
            )
        self._check_saved_tensors_hooks()
        operands = self.node_of(args, repr(name)), self.node_of(kwargs, repr(name))
        generators = rng.collect_host()  # what a module draws when it runs for its shapes, it draws again in each batch
        self.silent = True
        try:
            result = self.modules.leaf(name)(*args, **kwargs)
        finally:
            self.silent = False
            rng.restore_host(generators)
        node = self.graph.call_module(name, *operands)
        self.bind(result, node, detach=self.with_grad and not torch.is_grad_enabled())
        return result

    def bind(self, value: Any, node: fx.Node, *, detach: bool = False) -> None:
        """From now on the tensors in ``value`` are those that ``node`` gives."""
        if isinstance(value, torch.Tensor):
            if detach:
                node = self.graph.call_function(torch.ops.aten.detach.default, (node,))
            self.nodes[id(value)] = node
            self.values[node] = value
            self.trained[node] = value.requires_grad
        elif isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self._bind_item(item, operator.getitem, node, index, detach)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._bind_item(item, operator.getitem, node, key, detach)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                self._bind_item(getattr(value, field.name), getattr, node, field.name, detach)

    def _bind_item(self, item: Any, get: Callable[..., Any], node: fx.Node, key: Any, detach: bool) -> None:
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(item)) or not isinstance(item, PLAIN):
            self.bind(item, self.graph.call_function(get, (node, key)), detach=detach)

    def node_of(self, value: Any, what: str) -> Any:
        """Return ``value`` with nodes in the places of its tensors."""
        if isinstance(value, torch.Tensor):
            return self._node_of_tensor(value)
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, slice):
            return slice(*(self.node_of(item, what) for item in (value.start, value.stop, value.step)))
        if type(value) in (tuple, list):
            return type(value)(self.node_of(item, what) for item in value)
        if type(value) is dict:
            return {key: self.node_of(item, what) for key, item in value.items()}
        raise ModelError(
            f"the forward of {self.model} gives {what} a {type(value).__name__}, and between "
            "the modules of a pipeline go tensors, numbers, strings, tuples, lists and dicts. Where it is a cache of "
            "keys and values, call the model with use_cache=False: training needs none"
        )

    def _node_of_tensor(self, tensor: torch.Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is not None:
            return node
        name = self.modules.attributes.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                raise ModelError(
                    f"the forward of {self.model} computes with a tensor that an earlier call "
                    "of it has left behind: keep it in a buffer"
                )
            name = f"{CONSTANT}{next(self.modules.numbers)}"
            self.constants[name] = tensor
        node = self.graph.get_attr(name)
        self.nodes[id(tensor)] = node
        self.values[node] = tensor
        return node

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of the memory of ``tensor``, the same for all tensors that share it."""
    return int(tensor.untyped_storage()._cdata)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _has_tensors(module: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
