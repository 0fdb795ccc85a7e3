"""Refuse a recorded forward in which autograd would do other things than in the forward that was recorded.

A recorder intercepts operators below autograd. So calls that configure autograd itself are in no graph: hooks on
tensors and ``.data = ...`` are refused when they come (:class:`AutogradCalls`), anything else is found by running the
graph again and comparing how autograd follows both (:func:`check_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from torchhal.errors import ModelError

_Tensor: Any = torch.Tensor

_REFUSED: Final[Mapping[Any, str]] = {
    _Tensor.register_hook: "registers a hook on a tensor (register_hook)",
    _Tensor.retain_grad: "keeps the gradient of a tensor (retain_grad)",
    _Tensor.grad_fn.__get__: "looks at the grad_fn of a tensor, which a hook might be registered on,",
    _Tensor.data.__set__: "assigns to .data of a tensor",
}

_INTO_A_MODULE = "put it into a module that is called whole, where it runs for each microbatch"

_GIVEN: Final = object()
"""Stands for what a module that is called whole gives, while a graph runs again."""


class AutogradCalls(TorchFunctionMode):
    """Raises ModelError for calls that configure autograd, which no graph contains.

    Args:
        model: the name of the class whose forward runs inside.
        paused: whether what runs now is recorded as one call.
    """

    def __init__(self, model: str, paused: Callable[[], bool]) -> None:
        super().__init__()
        self.model = model
        self.paused = paused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused() and func in _REFUSED:
            raise ModelError(
                f"the forward of {self.model} {_REFUSED[func]} between its modules, which a pipeline, that follows it "
                f"once, would not do in each batch: {_INTO_A_MODULE}"
            )
        return func(*args, **(kwargs or {}))


def check_gradients(
    graph: fx.Graph, values: Mapping[fx.Node, torch.Tensor], trained: Mapping[fx.Node, bool], model: str
) -> None:
    """Raise ModelError if ``graph``, run again, has other gradient functions than what it was recorded from.

    Args:
        graph: what was recorded.
        values: the fake tensor that each node gave. Runs under their mode.
        trained: whether what a module gave required a gradient.
        model: the name of the class whose forward it is.
    """
    found: dict[fx.Node, Any] = {}
    last = {id(values[node]): node for node in graph.nodes if node in values}  # one changed in place has several
    computed = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            found[node] = _like(values[node], False)
        elif node.op == "get_attr":
            found[node] = values[node] if values[node].requires_grad else values[node].detach().clone()
        elif node.op == "call_module" or any(found[each] is _GIVEN for each in node.all_input_nodes):
            found[node] = _like(values[node], trained[node]) if node in values else _GIVEN
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
            computed.append(node)
        _as_leaf(found[node], values.get(node))
    for node in computed:
        recorded = values.get(node)
        if recorded is None or last[id(recorded)] is not node:
            continue
        ours, expected = _gradient_of(found[node]), _gradient_of(recorded)
        if ours != expected:
            raise ModelError(
                f"the forward of {model} has a gradient of its own between its modules: what {node.target} gives has "
                f"{expected or 'none'}, and in the stages of a pipeline, which follow operators, it would have "
                f"{ours or 'none'}. A torch.jit.script function, an operator with a backward of its own and detach_() "
                f"do that: {_INTO_A_MODULE}, or, for the last, call detach()"
            )


def _as_leaf(made: Any, recorded: torch.Tensor | None) -> None:
    """Let ``made`` require a gradient if ``recorded`` does because of ``requires_grad_()``."""
    if recorded is None or not recorded.requires_grad or not recorded.is_leaf:
        return
    tree_map_only(torch.Tensor, lambda tensor: tensor.requires_grad_() if tensor.is_leaf else tensor, made)


def _like(value: torch.Tensor, trained: bool) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_().clone() if trained else made  # no leaf, which must not be changed in place


def _gradient_of(tensor: torch.Tensor) -> str:
    function = tensor.grad_fn
    return "a leaf's" if function is None and tensor.requires_grad else "" if function is None else function.name()
