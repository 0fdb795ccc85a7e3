"""Record an outer forward as a graph by running it on fake tensors, with the modules that it calls left whole.

The forward runs as plain Python, on tensors without values on the run's device. So it may branch on shapes, flags and
None, make tensors with or without ``device=``, and return any container. What is recorded are the operators that reach
the dispatcher and the calls of modules, for these shapes and flags alone; and which attributes the forward has read, as
it is another graph when one of them changes. Random numbers of Python and NumPy, and changes of attributes, would be
made once instead of in each batch: they are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchhal.accelerators.transfer import map_tensors
from torchhal.errors import ModelError
from torchhal.trainer import rng
from torchhal_parallel.attribute_reads import PLAIN, AttributeReads
from torchhal_parallel.rehearsal import drawn_between
from torchhal_parallel.stand_in import StandIn, standing_in

CONSTANT = "_constant"
"""How the names of tensors begin that a forward has from elsewhere than its arguments, parameters and buffers."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The place of a graph's result in what the forward returned."""

    index: int


@dataclasses.dataclass
class Captured:
    """A recorded forward.

    Args:
        graph: the forward, which gives a tuple of the tensors in what it returned.
        results: the nodes that give them.
        returned: what the forward returned, with :class:`Result` in the places of these.
        values: the fake tensor that each node gave.
        constants: tensors that the graph reads by names of their own.
        reads: the attributes by whose values the forward is this one.
    """

    graph: fx.Graph
    results: list[fx.Node]
    returned: Any
    values: dict[fx.Node, torch.Tensor]
    constants: dict[str, torch.Tensor]
    reads: AttributeReads


class Capture:
    """Records the forwards of ``module`` as calls of the modules that are not ``around``.

    Made while every rank has the whole model; its copies have no memory.

    Args:
        around: names of the modules whose own forward is followed, ``""`` for the outermost.
        device: where the run computes.
        trainer: what the forward may ask for the epoch, say.
    """

    def __init__(self, module: nn.Module, around: set[str], device: torch.device, trainer: Any = None) -> None:
        self.module = module
        self.around = around
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.owners: dict[str, Any] = dict(module.named_modules()) | ({} if trainer is None else {"trainer": trainer})
        self.names = {id(submodule): name for name, submodule in module.named_modules()}
        memo: dict[int, Any] = {id(item): item for item in map(module.get_submodule, around)}
        memo[id(getattr(module, "_trainer", None))] = getattr(module, "_trainer", None)
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = self._fake(tensor)
        self.attributes: dict[int, str] = {}
        self._stand_ins: list[StandIn] = []
        for name, owner in module.named_modules():
            for members in (owner._parameters, owner._buffers):
                for key, tensor in members.items():
                    if tensor is not None:
                        self._stand_ins.append((members, key, memo[id(tensor)]))
                        self.attributes.setdefault(id(memo[id(tensor)]), f"{name}.{key}" if name else key)
        self.numbers = itertools.count()
        self._leaves: dict[str, Any] = {}
        for name in leaf_modules(module, around):
            try:
                self._leaves[name] = copy.deepcopy(module.get_submodule(name), memo)
            except Exception as error:
                self._leaves[name] = error
        copies = ((submodule, memo.get(id(submodule), submodule)) for submodule in module.modules())
        self._copied = {id(made): submodule for submodule, made in copies if made is not submodule}
        self._copies = [(submodule, memo[id(submodule)]) for submodule in self._copied.values()]

    def __call__(self, tensors: Mapping[str, torch.Tensor], rows: int, constants: Mapping[str, Any]) -> Captured:
        """The forward called with ``rows`` samples of ``tensors``, and with ``constants``, by name.

        Raises:
            ModelError: it depends on the values of a tensor, gives a module what no graph can hold, or does what has
                to be done in each batch.
        """
        graph = fx.Graph()
        recorder = _Recorder(self, graph)
        reads = AttributeReads(self.owners, self._copied)
        for submodule, made in self._copies:
            vars(made)["training"] = submodule.training
        arguments: dict[str, Any] = {}
        with self.mode:
            for name, tensor in tensors.items():
                arguments[name] = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
                recorder.bind(arguments[name], graph.placeholder(name))
        forward: Any = type(self.module).forward
        torch.clear_autocast_cache()  # of casts that another forward has made
        generators = rng.collect_host()
        try:
            with standing_in(self._stand_ins):
                with reads.recorded(lambda: recorder.silent), self.mode, recorder, recorder.calls_recorded():
                    returned = forward(self.module, **arguments, **constants)
                assigned = [own for held, key, own in self._stand_ins if held.get(key) is not own]
                reads.changed += [self.attributes[id(own)] for own in assigned]
            self._check_effects(reads, drawn_between(generators, rng.collect_host()))
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"the forward of {type(self.module).__name__} can't be cut into stages ({type(error).__name__}: "
                f"{reason}). It may call modules and compute with tensors, but not branch on their values: put what "
                "does into a module of its own"
            ) from error
        finally:
            rng.restore_host(generators)
        results: list[fx.Node] = []

        def place_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                results.append(recorder.node_of(leaf, "what it returns"))
                return Result(len(results) - 1)
            return recorder.node_of(leaf, "what it returns")

        returned = map_tensors(returned, place_of)
        graph.output(tuple(results))
        _erase_unused(graph)
        return Captured(graph, results, returned, recorder.values, recorder.constants, reads.settle())

    def _check_effects(self, reads: AttributeReads, drawn: Sequence[str]) -> None:
        model = type(self.module).__name__
        if drawn:
            raise ModelError(
                f"the forward of {model} draws random numbers ({drawn[0]}) between its modules, which a pipeline, that "
                "follows it once, would use for all batches: draw them by torch's operators on tensors (torch.rand, "
                "F.dropout), without branching on them, or inside of a module that is called"
            )
        if reads.changed:
            raise ModelError(
                f"the forward of {model} changes {reads.changed[0]!r}, and a pipeline follows it once, not in each "
                "batch: return what it leaves there, and keep it in the step after self(...); let a module that is "
                "called do it; or write to a buffer in place"
            )

    def leaf(self, name: str) -> Any:
        """The copy without memory of the module ``name``, which may be inside one that is called whole."""
        for outer, made in self._leaves.items():
            if name == outer or name.startswith(f"{outer}."):
                if isinstance(made, Exception):
                    raise ModelError(
                        f"{outer!r} can't be copied to find its shapes ({type(made).__name__}: {made})"
                    ) from made
                return made if name == outer else made.get_submodule(name[len(outer) + 1 :])
        raise ModelError(f"{name!r} was not part of {type(self.module).__name__} when it was cut into stages")

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made


class _Recorder(TorchDispatchMode):
    """Adds to ``graph`` what runs inside, but for what runs inside of a module that is called whole."""

    def __init__(self, capture: Capture, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture = capture
        self.graph = graph
        self.nodes: dict[int, fx.Node] = {}
        self.values: dict[fx.Node, torch.Tensor] = {}  # which also keeps the ids in ``nodes`` theirs
        self.constants: dict[str, torch.Tensor] = {}
        self.silent = False
        self.with_grad = torch.is_grad_enabled()
        self.autocast = self._autocast()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not makes and not func._schema.is_mutable:  # a question of shape, dtype or device
            return result
        operands = self.node_of(args, func.__name__), self.node_of(kwargs, func.__name__)
        if self.with_grad and not torch.is_grad_enabled():
            node = self.graph.call_function(without_grad, (func, *operands[0]), operands[1])
        else:
            node = self.graph.call_function(func, *operands)
        self.bind(result, node)
        return result

    @contextmanager
    def calls_recorded(self) -> Iterator[None]:
        """Calls of the model's modules, but for those whose forward is followed, are recorded as such."""
        original: Callable[..., Any] = nn.Module.__call__
        names, around = self.capture.names, self.capture.around

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if self.silent or name is None or name in around:
                return original(module, *args, **kwargs)
            return self.call_module(name, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def call_module(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._autocast() != self.autocast:
            raise ModelError(
                f"the forward of {type(self.capture.module).__name__} calls {name!r} under a torch.autocast of its "
                "own, which a pipeline does not follow between modules: enter it inside of that module"
            )
        operands = self.node_of(args, repr(name)), self.node_of(kwargs, repr(name))
        generators = rng.collect_host()  # what a module draws when it runs for its shapes, it draws again in each batch
        self.silent = True
        try:
            result = self.capture.leaf(name)(*args, **kwargs)
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
        """``value`` with nodes in the places of its tensors."""
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
            f"the forward of {type(self.capture.module).__name__} gives {what} a {type(value).__name__}, and between "
            "the modules of a pipeline go tensors, numbers, strings, tuples, lists and dicts. Where it is a cache of "
            "keys and values, call the model with use_cache=False: training needs none"
        )

    def _node_of_tensor(self, tensor: torch.Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is not None:
            return node
        name = self.capture.attributes.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                raise ModelError(
                    f"the forward of {type(self.capture.module).__name__} computes with a tensor that an earlier call "
                    "of it has left behind: keep it in a buffer"
                )
            name = f"{CONSTANT}{next(self.capture.numbers)}"
            self.constants[name] = tensor
        node = self.graph.get_attr(name)
        self.nodes[id(tensor)] = node
        self.values[node] = tensor
        return node

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.capture.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def without_grad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator that the forward ran under ``torch.no_grad()``."""
    with torch.no_grad():
        return function(*args, **kwargs)


def around(split_points: Sequence[str]) -> set[str]:
    """The modules in which ``split_points`` lie, by name: those whose own forward must be followed."""
    names = {""}
    for point in split_points:
        parts = point.split(".")
        names.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return names


def leaf_modules(module: nn.Module, around: set[str]) -> Iterator[str]:
    """The outermost modules that are not ``around``, in the order in which they were registered."""

    def walk(owner: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in owner.named_children():
            path = f"{prefix}{name}"
            if path in around:
                yield from walk(child, f"{path}.")
            else:
                yield path

    return walk(module, "")


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if not is_mutable(node):
            graph.erase_node(node)


def is_mutable(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place."""
    schema = getattr(node.args[0] if node.target is without_grad else node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
