"""Compare the computations between column- and row-wise layers with those on one device.

There each rank computes with its part of an output. Activations and attention over heads do with a part what they do
with the whole; a softmax, mean or norm over what is divided, a chunk of joined projections and a reshape into a fixed
number of heads don't, and raise no error. So a module in which parts are made and used up computes twice more in some
steps, in the mode that it is in: once with layers that give all of their outputs, then with layers that give this
rank's part of them. What reaches a row-wise layer must be the same part of what reaches it on one device. Nothing is
sent, and the layers have random weights: those of a model may hide the difference, as a projection that begins at zero
does. Of modules that are alike, as the blocks of a transformer, one is compared in each of those steps.
"""

from __future__ import annotations

import re
import warnings
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
from torchhal_parallel._region_runs import DROPOUT, RegionRuns, WithoutRandomNumbers, in_full_precision

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
    """Observes the layers of a resolved plan while a function computes.

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
            paused: makes a context in which nothing is recorded of parts; its value is whether a collective was
                called there.
            also: modules to compare beside those that have a column-wise layer in them.

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
                except Exception as error:  # such as out of memory
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

    def _run_twice(self, call: _Call, paused: Callable[[], Any]) -> tuple[RegionRuns, bool]:
        """Return (both forwards, whether a collective of the user's joins the parts, after which there is one)."""
        if isinstance(call.given, Exception):
            raise call.given
        inside = set(call.module.modules())
        layers = {layer: name for name, layer in self.layers.items() if layer in inside}
        strategy = self.strategy
        # what attributes may refer to, and must not be copied
        kept = (strategy, strategy.trainer, strategy.accelerator, *self.module.modules(), *self.module.parameters())
        generators = rng.collect(strategy.accelerator, strategy.root_device)
        try:
            # without a graph: a checkpointed block would find more saved tensors than its recomputation
            with torch.no_grad(), paused() as joined:
                run = RegionRuns(layers, self.styles, self.rank, self.size)
                for run.divided in (False, True):
                    rng.restore(generators, strategy.accelerator, strategy.root_device)  # both skip the same blocks
                    with without_traces(call.module, kept), in_full_precision(call.module):
                        args, kwargs = _copies(call.given)
                        with run.in_places(), WithoutRandomNumbers():
                            call.module.forward(*args, **kwargs)
                    if joined():
                        break
                return run, joined()
        finally:
            rng.restore(generators, strategy.accelerator, strategy.root_device)


class _Dropouts(TorchFunctionMode):
    """A function mode that passes each tensor to ``seen`` that something drops out of."""

    def __init__(self, seen: Callable[[Any], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUT:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            if p and training:
                self.seen(args[0] if args else kwargs["input"])
        elif func is F.scaled_dot_product_attention and (args[4] if len(args) > 4 else kwargs.get("dropout_p")):
            self.seen(args[0] if args else kwargs["query"])
        return func(*args, **kwargs)


def _copies(nest: Any) -> Any:
    """Of all tensors, in at least float32: a forward may write to what it is called with."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = leaf.detach().clone()
        made = made.float() if is_below_float32(made) else made
        return made.requires_grad_(True).clone() if leaf.requires_grad else made  # no leaf: it may be written to

    return tree_map(copy, nest)


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that hold ``name``, the model's own, which is empty, included."""
    while name:
        name = name.rpartition(".")[0]
        yield name
