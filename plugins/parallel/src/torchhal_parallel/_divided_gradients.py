"""Check that gradients are correct through what each rank computes with its part of a column-wise output.

What a row-wise layer is given may be made of its rank's parts and of what is not trained. A rank would compute
only its own part's share of any other gradient: that of a norm's weight within each head, or of keys that are whole on
all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from torchhal.errors import ConfigurationError


@dataclass
class Nodes:
    """Of the graph of one call: those that gave a rank's part, those that gave a whole output, by names of layers."""

    parts: dict[Any, str] = field(default_factory=dict)
    whole: dict[Any, str] = field(default_factory=dict)
    taken: set[Any] = field(default_factory=set)
    """Those that made what row-wise layers were called with."""


def check_gradients(module: nn.Module, row: str, given: Any, nodes: Nodes, note: Callable[[str], None]) -> None:
    """Search the graph behind what a row-wise layer is called with, as far as the column-wise layers.

    Args:
        module: the model, for names.
        row: the layer's name.
        given: what it is called with.
        nodes: of the layers that were called.
        note: called with what can't be traversed.

    Raises:
        ConfigurationError: it is made of something whole that is trained; the message names it.
    """
    for node in _behind([getattr(given, "grad_fn", None)], nodes.parts.keys(), _is_function):
        leaf: Any = getattr(node, "variable", None)
        if node in nodes.whole or leaf is not None:
            what = repr(nodes.whole[node]) if node in nodes.whole else _name_of(leaf, module)
            raise ConfigurationError(
                f"what the 'rowwise' layer {row!r} is called with is made of {what} beside 'colwise' outputs. Each "
                "rank has all of it and only a part of those, so each would train it, and what it is computed from, "
                "by another gradient. Let the plan divide it ('colwise'), compute with it before or after the divided "
                "layers, or, for the norm of each head, give its layer torch.distributed.tensor.parallel's style "
                "SequenceParallel(sequence_dim=<that of the heads>, use_local_output=True)"
            )
        if _is_function(node) and not _home(node).startswith("torch.distributed"):
            note(
                f"what the 'rowwise' layer {row!r} is called with comes out of {type(node).__name__}, an autograd "
                "Function: whether gradients through it are those of one device was not looked at"
            )


def check_sums(result: Any, what: str, nodes: Nodes, ranks: Callable[[], set[int]]) -> None:
    """Search the graph behind a result for sums of parts that every rank uses as a whole.

    Args:
        result: what a step or a stage gives.
        what: the same in words.
        nodes: of the layers that were called.
        ranks: gives those that share a layer.

    Raises:
        ConfigurationError: such a sum is one by ``torch.distributed.nn.functional.all_reduce``, which adds up over the
            ranks what is one gradient, that of the whole.
    """
    results = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for total in _behind(results, nodes.taken, _is_sum):
        if not _is_sum(total) or not ranks() <= ranks_of(total.group):
            continue
        for node in _behind(
            [following for following, _ in total.next_functions], nodes.taken, nodes.parts.__contains__
        ):
            if node in nodes.parts:
                raise ConfigurationError(
                    f"{what} is made of a sum over the ranks' parts of what {nodes.parts[node]!r} ('colwise') gives, "
                    "by torch.distributed.nn.functional.all_reduce, which adds up gradients as well: as every rank has "
                    "that of the whole, they would be multiplied by the number of ranks. Sum up by "
                    "DTensor.from_local(part, self.trainer.strategy.mesh['tensor'], [Partial()])"
                    ".redistribute(placements=[Replicate()]).to_local()"
                )


def ranks_of(group: Any) -> set[int]:
    """Return the global ranks of a process group.

    ``torch.distributed.nn.functional`` keeps as its default the default group that there was when it was imported; once
    a process has set up its communication anew, torch has no ranks of that one, which was of all.
    """
    try:
        return set(dist.get_process_group_ranks(group))
    except KeyError:
        return set(range(group.size()))


def _behind(nodes: Iterable[Any], beyond: Set[Any], last: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes that ``nodes`` come from, these too, but nothing behind a ``last`` one, nor any of ``beyond``."""
    waiting, seen = deque(nodes), {None, *beyond}
    while waiting:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not last(node):
            waiting.extend(following for following, _ in node.next_functions)


def _is_function(node: Any) -> bool:
    """Return whether the backward of ``node`` is user code, which can't be inspected."""
    home = _home(node)
    return bool(home) and not home.startswith("torch.distributed.fsdp")  # which notes that a unit's backward is over


def _is_sum(node: Any) -> bool:
    return _home(node) == "torch.distributed.nn.functional" and type(node).__name__ == "_AllReduceBackward"


def _home(node: Any) -> str:
    """Return the module of the autograd Function whose backward ``node`` is; "" for torch's operators."""
    return str(getattr(getattr(node, "_forward_cls", None), "__module__", ""))


def _name_of(leaf: torch.Tensor, module: nn.Module) -> str:
    names = (name for name, parameter in module.named_parameters() if parameter is leaf)
    name = next(names, None)
    return f"a tensor of the shape {tuple(leaf.shape)}" if name is None else repr(name)
