"""Record an outer forward as a graph by running it on fake tensors, with the modules that it calls left whole.

The forward runs as plain Python, on tensors without values on the run's device. So it may branch on shapes, flags and
None, make tensors with or without ``device=``, and return any container. What is recorded are the operators that reach
the dispatcher and the calls of modules, for these shapes and flags alone; and which attributes the forward has read, as
it is another graph when one of them changes. Random numbers of Python and NumPy, changes of attributes, and what the
forward tells autograd, would be made once instead of in each batch: they are refused. An ``autograd.Function`` is
recorded as one call.
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
from torch.utils.checkpoint import CheckpointFunction

from torchhal import rng
from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._attribute_reads import PLAIN, AttributeReads
from torchhal_parallel._forward_capture import drawn_between, logging_by
from torchhal_parallel._gradient_check import AutogradCalls, check_gradients
from torchhal_parallel._recorded_calls import FunctionCall, InContext, is_mutable, is_same_again
from torchhal_parallel._remote_tensor import written
from torchhal_parallel._tensor_swap import StandIn, swapped_tensors

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
        recomputes: whether it asks autograd not to keep activations, by ``torch.utils.checkpoint``, say.
    """

    graph: fx.Graph
    results: list[fx.Node]
    returned: Any
    values: dict[fx.Node, torch.Tensor]
    constants: dict[str, torch.Tensor]
    reads: AttributeReads
    recomputes: bool


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
        added = {name: each for name, each in self.module.named_modules() if id(each) not in self.names}
        recorder.added = {id(each): name for name, each in added.items()}
        reads = AttributeReads({**self.owners, **added}, self._copied)
        calls = AutogradCalls(type(self.module).__name__, lambda: recorder.silent)
        for submodule, made in self._copies:
            vars(made)["training"] = submodule.training
        arguments: dict[str, Any] = {}
        with self.mode:
            for name, tensor in tensors.items():
                arguments[name] = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
                recorder.bind(arguments[name], graph.placeholder(name))
                recorder.protected[_storage(arguments[name])] = f"its argument {name!r}"
        forward: Any = type(self.module).forward
        torch.clear_autocast_cache()  # of casts that another forward has made
        generators = rng.collect_host()
        try:
            with swapped_tensors(self._stand_ins):
                with (
                    self._logs_refused(recorder),
                    reads.recorded(lambda: recorder.silent),
                    self.mode,
                    recorder,
                    recorder.calls_recorded(),
                    calls,
                ):
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
        if recorder.with_grad:
            with self.mode:
                check_gradients(graph, recorder.values, recorder.trained, type(self.module).__name__)
        return Captured(
            graph, results, returned, recorder.values, recorder.constants, reads.settle(), recorder.recomputes
        )

    @contextmanager
    def _logs_refused(self, recorder: _Recorder) -> Iterator[None]:
        def log(name: Any, *args: Any, **kwargs: Any) -> None:
            if not recorder.silent:  # a layer logs when it runs in earnest
                raise ModelError(
                    f"the forward of {type(self.module).__name__} logs {name!r}, and a pipeline follows it once, "
                    "without values: return the value with the result, and log it in the step after self(...)"
                )

        with logging_by(self.module, log):
            yield

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
                        f"{outer!r} can't be copied to find its shapes ({type(made).__name__}: {made}). A pipeline "
                        "copies the modules that it calls, without memory: keep nothing in their attributes that "
                        "autograd has computed, as torch.nn.utils.weight_norm and torch.nn.utils.prune do. Use "
                        "torch.nn.utils.parametrizations.weight_norm; call prune.remove, or register a parametrization "
                        "(torch.nn.utils.parametrize) that multiplies by a mask; otherwise let the forward compute it"
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
        self.trained: dict[fx.Node, bool] = {}
        self.silent = False
        self.recomputes = False
        self.with_grad = torch.is_grad_enabled()
        self.autocast = self._autocast()
        self.added: dict[int, str] = {}
        """The names of modules that the model did not have when it was cut into stages."""
        self.protected: dict[int, str] = {}
        """What is in a storage that the forward must not write to."""
        for _, key, tensor in capture._stand_ins:
            if isinstance(tensor, nn.Parameter):
                self.protected[_storage(tensor)] = f"the parameter {capture.attributes.get(id(tensor), key)!r}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not makes and not func._schema.is_mutable:  # a question of shape, dtype or device
            return result
        self._check_written(func, args, kwargs)
        self._look_at_saved_tensors_hooks()
        operands = self.node_of(args, func.__name__), self.node_of(kwargs, func.__name__)
        with_grad = torch.is_grad_enabled() or not self.with_grad
        own_autocast = self._autocast() != self.autocast
        target = func
        if not with_grad or own_autocast:
            kind = self.capture.device.type if own_autocast else None
            target = InContext(func, with_grad=with_grad, autocast=kind)
        self.bind(result, self.graph.call_function(target, *operands))
        return result

    def _check_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise ModelError if an operator writes to an argument, or to a parameter by what may be in a batch."""
        for tensor in written(func, args, kwargs):
            what = self.protected.get(_storage(tensor))
            if what is None or (what.startswith("the parameter") and is_same_again(func, args, kwargs)):
                continue
            raise ModelError(
                f"the forward of {type(self.capture.module).__name__} changes {what} in place, by {func.__name__}, and "
                "a pipeline does so for each microbatch, on the rank of one stage. Compute with a copy (.clone()) of "
                "an argument; write to parameters between the steps, in on_train_batch_start say"
            )

    def _look_at_saved_tensors_hooks(self) -> None:
        """Raise ModelError for hooks of the user's on what autograd keeps; note torch's own, which save memory."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if self.with_grad else None
        if hooks is None:
            return
        self.recomputes = True
        if not str(getattr(hooks[0], "__module__", "")).startswith("torch."):
            raise ModelError(
                f"the forward of {type(self.capture.module).__name__} computes under saved_tensors_hooks of its own, "
                "which a pipeline does not follow between modules: enter them inside of a module that is called"
            )

    @contextmanager
    def calls_recorded(self) -> Iterator[None]:
        """Calls of the model's modules, but for those whose forward is followed, are recorded as such."""
        original: Callable[..., Any] = nn.Module.__call__
        apply = vars(torch.autograd.Function)["apply"]
        names, around = self.capture.names, self.capture.around

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
        name, model = self.added[id(module)], type(self.capture.module).__name__
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
                f"the forward of {type(self.capture.module).__name__} calls {kind.__name__}, which has a backward of "
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
                f"the forward of {type(self.capture.module).__name__} calls {name!r} under a torch.autocast of its "
                "own, which a pipeline does not follow between modules: enter it inside of that module"
            )
        self._look_at_saved_tensors_hooks()
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


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _has_tensors(module: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))


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
