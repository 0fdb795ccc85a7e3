"""Compare what stands between column- and row-wise layers with what it would compute on one device.

There each rank computes with its part of an output. Activations and attention over heads do with a part what they do
with the whole; a softmax, mean or norm over what is divided, a chunk of joined projections and a reshape into a fixed
number of heads don't, and no error tells. So a module in which parts are made and used up computes twice more in some
steps, in the mode that it is in: once with layers that give all of their outputs, then with layers that give this
rank's part of them. What reaches a row-wise layer must be the same part of what reaches it on one device. Nothing is
sent, and the layers have random weights: those of a model may hide the difference, as a projection that begins at zero
does. Of modules that are alike, as the blocks of a transformer, one is compared in each of those steps.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchhal import rng
from torchhal.errors import ConfigurationError, TorchhalError
from torchhal_parallel._alike import KindsOfCalls
from torchhal_parallel._batch_loss import without_traces
from torchhal_parallel._divided_gradients import Nodes, check_gradients, check_sums
from torchhal_parallel._dtensor_layout import is_below_float32
from torchhal_parallel._tensor_swap import StandIn, swapped_tensors

TOLERANCE = 1e-3
"""Of the norm: float32 rounds to 1e-6 of it, a mean over half of 4,096 random numbers is off by 1e-2."""

_DROPOUT = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
_RANDOM = {
    "bernoulli", "bernoulli_", "exponential_", "normal", "normal_", "rand", "rand_like", "randn", "randn_like",
    "uniform_",
}  # fmt: skip
_SIZES = re.compile(r"\b(shape|size|dimension)")


@dataclass
class _Call:
    """A call of a module that is not over."""

    module: nn.Module
    kinds: tuple[Any, Any]
    given_parts: bool
    given: Any = None
    """Copies of (args, kwargs), or why there are none; None where a module of this kind was compared before."""
    columns: set[str] = field(default_factory=set)
    beyond: str | None = None
    """The layer of another style that was called, which alone decides what it takes and gives."""
    rows: list[str] = field(default_factory=list)
    closed: bool = False
    """Whether a row-wise layer was called, in a call inside of this one, too."""


class DividedRegions:
    """Watches the layers of a resolved plan while a function computes.

    Args:
        module: the whole model.
        styles: by names of layers. Where one that is an object is called, nothing is compared.
        rank: this one's, of the ``size`` that share each layer.
        size: see above.
        strategy: whose device and generators are used.
    """

    def __init__(self, module: nn.Module, styles: Mapping[str, Any], rank: int, size: int, *, strategy: Any) -> None:
        self.module = module
        here = {
            name: module.get_submodule(name)
            for name in styles
            if not any(parameter.is_meta for parameter in module.get_submodule(name).parameters())
        }
        self.styles = {name: style for name, style in styles.items() if name in here and isinstance(style, str)}
        self.layers = {name: here[name] for name in self.styles}
        self.others = {name: layer for name, layer in here.items() if name not in self.styles}
        self.rank = rank
        self.size = size
        self.strategy = strategy
        inside = {prefix for name, style in self.styles.items() if style == "colwise" for prefix in _around(name)}
        self._comparing = False
        self._compared: set[Any] = set()
        self._noted: set[str] = set()
        self._nodes = Nodes()
        self.around = [module.get_submodule(name) for name in sorted(inside)]

    @contextmanager
    def watched(
        self, is_part: Callable[[Any], bool], paused: Callable[[], Any], also: Sequence[nn.Module] = ()
    ) -> Iterator[list[str]]:
        """While entered, raise ConfigurationError when a module returns in which a region computes something else.

        Or when a row-wise layer is called with what gradients could not come back through. What can't be compared is
        a warning that names the module.

        Args:
            is_part: whether a tensor is made of one rank's part.
            paused: makes a context in which nothing is noted of parts; what it gives says whether a collective was
                called there.
            also: modules to look at beside those that have a column-wise layer in them.

        Yields:
            Names of row-wise layers that no module has closed a column-wise one with; filled meanwhile.
        """
        calls: list[_Call] = []
        outside: list[str] = []
        beyond = False
        self._nodes = nodes = Nodes()
        self._compared = set()
        kinds = KindsOfCalls(self.module, {layer: self.styles[name] for name, layer in self.layers.items()})

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._comparing:
                return
            call = _Call(module, kinds(module, args, kwargs), any(map(is_part, tree_leaves((args, kwargs)))))
            if self._compared.isdisjoint(call.kinds):
                try:
                    call.given = _copies((args, kwargs))
                except Exception as error:  # out of memory, say
                    call.given = error
            calls.append(call)

        def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._comparing or not calls or calls[-1].module is not module:
                return
            call = calls.pop()
            if not call.rows:
                return
            if self._compared.isdisjoint(call.kinds):
                self._comparing = True
                try:
                    self._compare(call, paused)
                finally:
                    self._comparing = False
            self._compared.update(call.kinds)

        def gives_parts(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, output: Any) -> None:
                for call in calls:
                    call.columns.add(name)

            return hook

        def notes_node(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, output: Any) -> None:
                if (node := getattr(output, "grad_fn", None)) is None or self._comparing:
                    return
                (nodes.parts if self.styles[name] == "colwise" else nodes.whole)[node] = name

            return hook

        def takes_parts(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any) -> None:
                if self._comparing:
                    return
                rows = (call.rows for call in reversed(calls) if call.columns and not call.given_parts)
                next(rows, [] if beyond else outside).append(name)
                for call in calls:
                    call.closed = True
                if args and not beyond and is_part(args[0]):
                    check_gradients(self.module, name, args[0], nodes, self._note)
                    nodes.taken.add(getattr(args[0], "grad_fn", None))

            return hook

        def decides_alone(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any) -> None:
                nonlocal beyond
                beyond = True
                for call in calls:
                    call.beyond = name

            return hook

        def drops(given: Any) -> None:
            if calls and not self._comparing and is_part(given):
                self._note(
                    f"{type(calls[-1].module).__name__} drops out of what is divided between 'colwise' and 'rowwise' "
                    "layers: the parts of all ranks get masks of the same numbers, and on one device they would not"
                )

        with ExitStack() as stack:
            stack.enter_context(_Dropouts(drops))
            for name, layer in self.others.items():
                stack.callback(layer.register_forward_pre_hook(decides_alone(name)).remove)
            for module in (*self.around, *also):
                stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(ends, prepend=True, with_kwargs=True).remove)
            for name, layer in self.layers.items():
                if self.styles[name] == "colwise":
                    stack.callback(layer.register_forward_hook(gives_parts(name), prepend=True).remove)
                elif self.styles[name] == "rowwise":
                    stack.callback(layer.register_forward_pre_hook(takes_parts(name), prepend=True).remove)
                stack.callback(layer.register_forward_hook(notes_node(name)).remove)  # behind torch's, which makes it
            stack.callback(lambda: setattr(self, "_nodes", Nodes()))  # they hold the graph
            try:
                yield outside
            except (RuntimeError, ValueError) as error:
                call = calls[-1] if calls else None
                if isinstance(error, TorchhalError) or call is None or not call.columns or call.closed:
                    raise
                if not _SIZES.search(str(error)):
                    raise
                columns = ", ".join(map(repr, sorted(call.columns)[:4]))
                raise ConfigurationError(
                    f"{error}. {type(call.module).__name__} fails so with a rank's part, one of {self.size}, of what "
                    f"{columns} ('colwise') give on one device. A part of an attention must be a whole number of "
                    "heads, of those of keys and values too: let the number of ranks divide it "
                    "(num_key_value_heads), or leave the layers out of the plan"
                ) from error

    def check_result(self, result: Any, what: str) -> None:
        """Raise ConfigurationError where gradients would come back from ``result``, ``what``, multiplied."""
        check_sums(result, what, self._nodes, lambda: set(self.strategy.mesh["tensor"].mesh.flatten().tolist()))

    def _note(self, text: str, *, own: bool = False) -> None:
        """Warn once, where all ranks of a layer find the same on the first of them; ``own``: a rank's own finding."""
        if text not in self._noted and (own or self.rank == 0):
            self._noted.add(text)
            warnings.warn(text, stacklevel=2)

    def _compare(self, call: _Call, paused: Callable[[], Any]) -> None:
        name = type(call.module).__name__
        where = f"the forward of {name}" if call.module is self.module else f"{name}, a part of the model,"
        unseen = f"what {where} computes between 'colwise' and 'rowwise' layers was not compared with one device"
        if call.beyond is not None:
            self._note(f"{unseen}: the style of {call.beyond!r} is an object, which alone decides what parts are")
            return
        try:
            run, joined = self._run_twice(call, paused)
        except Exception as error:  # out of memory, or written for parts by hand: with whole outputs it can't compute
            self._note(f"{unseen}, where it fails ({type(error).__name__}: {error})", own=True)
            return
        if joined:
            self._note(f"{unseen}: it calls a collective of its own, and is taken for right, as are its gradients")
            return
        if run.differing is not None:
            row, off = run.differing
            columns = ", ".join(map(repr, sorted(call.columns)[:4]))
            raise ConfigurationError(
                f"between {columns} ('colwise') and {row!r} ('rowwise') {where} computes something else with each "
                f"rank's part than with the whole: what {row!r} is called with differs by {off:.0%} from its part on "
                "one device. A softmax, mean or norm over what is divided does so, and a chunk of joined projections, "
                "and a reshape into a fixed number of heads: let unflatten(-1, (-1, head_dim)) count them, or make "
                "the layers 'colwise_rep' and 'rowwise_rep', between which nothing is divided"
            )

    def _run_twice(self, call: _Call, paused: Callable[[], Any]) -> tuple[_Runs, bool]:
        """(both forwards, whether a collective of the user's joins the parts, after which there is one)."""
        if isinstance(call.given, Exception):
            raise call.given
        inside = set(call.module.modules())
        layers = {layer: name for name, layer in self.layers.items() if layer in inside}
        strategy = self.strategy
        # what attributes may refer to, and no copy is wanted of
        kept = (strategy, strategy.trainer, strategy.accelerator, *self.module.modules(), *self.module.parameters())
        generators = rng.collect(strategy.accelerator, strategy.root_device)
        try:
            # without a graph: a checkpointed block would find more saved tensors than its recomputation
            with torch.no_grad(), paused() as joined:
                run = _Runs(layers, self.styles, self.rank, self.size)
                for run.divided in (False, True):
                    rng.restore(generators, strategy.accelerator, strategy.root_device)  # both skip the same blocks
                    with without_traces(call.module, kept), _in_full_precision(call.module):
                        args, kwargs = _copies(call.given)
                        with run.in_places(), _NoRandomNumbers():
                            call.module.forward(*args, **kwargs)
                    if joined():
                        break
                return run, joined()
        finally:
            rng.restore(generators, strategy.accelerator, strategy.root_device)


class _Runs:
    """Forwards of layers with random weights: with whole outputs first, then, :attr:`divided`, with this rank's."""

    def __init__(self, layers: Mapping[nn.Module, str], styles: Mapping[str, str], rank: int, size: int) -> None:
        self.layers = layers
        self.styles = styles
        self.rank = rank
        self.size = size
        self.divided = False
        self.differing: tuple[str, float] | None = None
        self._weights = {
            name: _random_weights(layer, name) for layer, name in layers.items() if styles[name] != "sequence_parallel"
        }
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._row = 0

    @contextmanager
    def in_places(self) -> Iterator[None]:
        """The layers compute so, without what divides their inputs and outputs. Their users' hooks run."""
        before = [(layer, dict(vars(layer))) for layer in self.layers]
        try:
            for layer, name in self.layers.items():
                vars(layer)["forward"] = lambda given, *, layer=layer, name=name: self._forward(layer, name, given)
                for kind in ("_forward_hooks", "_forward_pre_hooks"):
                    hooks = {key: hook for key, hook in vars(layer)[kind].items() if not _divides(hook)}
                    vars(layer)[kind] = OrderedDict(hooks)
            yield
        finally:
            for layer, attributes in before:
                vars(layer).clear()
                vars(layer).update(attributes)

    def _forward(self, layer: Any, name: str, given: torch.Tensor) -> torch.Tensor:
        style = self.styles[name]
        if style == "sequence_parallel":
            norm = F.rms_norm if isinstance(layer, nn.RMSNorm) else F.layer_norm
            return norm(given, layer.normalized_shape)
        if style == "rowwise" and self.divided:
            return self._compare_row(name, given)
        weight, bias = self._weights[name]
        if isinstance(layer, nn.Embedding):
            output = F.embedding(given, weight)
        else:
            output = F.linear(given.to(weight.dtype), weight, bias)
        if style == "rowwise":
            self._rows.append((given.detach(), output))
        if style == "colwise" and self.divided:
            return output.chunk(self.size, -1)[self.rank]
        return output

    def _compare_row(self, name: str, given: torch.Tensor) -> torch.Tensor:
        whole, output = self._rows[self._row]
        self._row += 1
        wanted = whole.chunk(self.size, -1)[self.rank]
        off = 1.0
        if given.shape == wanted.shape:
            norm = wanted.double().norm()
            off = float((given.detach().double() - wanted.double()).norm() / norm.clamp(min=1e-30))
        if off > TOLERANCE and self.differing is None:
            self.differing = (name, off)
        return output


def _random_weights(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, all of it, and a bias for a Linear or an Embedding; the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    rows, columns = layer.weight.shape
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    scale = 1.0 if isinstance(layer, nn.Embedding) else columns**-0.5
    weight = torch.randn(rows, columns, generator=generator, dtype=dtype).mul_(scale)
    bias = torch.randn(rows, generator=generator, dtype=dtype)
    return weight.to(layer.weight.device), bias.to(layer.weight.device)


class _NoRandomNumbers(TorchFunctionMode):
    """Dropout drops nothing, and random numbers are all the same: a part can't draw those of the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _RANDOM and isinstance(result, torch.Tensor):
            with torch.no_grad():
                result.fill_(0.5)
        return result


class _Dropouts(TorchFunctionMode):
    """Tells ``seen`` of each tensor that something drops out of."""

    def __init__(self, seen: Callable[[Any], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            if p and training:
                self.seen(args[0] if args else kwargs["input"])
        elif func is F.scaled_dot_product_attention and (args[4] if len(args) > 4 else kwargs.get("dropout_p")):
            self.seen(args[0] if args else kwargs["query"])
        return func(*args, **kwargs)


@contextmanager
def _in_full_precision(module: nn.Module) -> Iterator[None]:
    """At least float32, in which rounding can't be taken for something else, or hide it."""
    wide: list[StandIn] = [
        (members, name, tensor.detach().float())
        for each in module.modules()
        for members in (each._parameters, each._buffers)
        for name, tensor in members.items()
        if tensor is not None
        and not tensor.is_meta
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and is_below_float32(tensor)
    ]
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} - {"meta"}
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(swapped_tensors(wide))
        yield


def _copies(nest: Any) -> Any:
    """Of all tensors, in at least float32: a forward may write to what it is called with."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = leaf.detach().clone()
        made = made.float() if is_below_float32(made) else made
        return made.requires_grad_(True).clone() if leaf.requires_grad else made  # no leaf: it may be written to

    return tree_map(copy, nest)


def _divides(hook: Any) -> bool:
    """Whether a hook is torch's, which divides or joins what a layer takes and gives, or one of this package."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed", "torchhal_parallel"))


def _around(name: str) -> Iterator[str]:
    """The names of the modules that hold ``name``, the model's own, which is empty, included."""
    while name:
        name = name.rpartition(".")[0]
        yield name
