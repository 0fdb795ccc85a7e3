"""Record an outer forward as a graph by running it on fake tensors, with the modules that it calls left whole.

The forward runs as plain Python, on tensors without values on the run's device. So it may branch on shapes, flags and
None, make tensors with or without ``device=``, and return any container. What is recorded are the operators that reach
the dispatcher and the calls of modules, for these shapes and flags alone; and which attributes the forward has read, as
the graph differs when one of them changes. Random numbers of Python and NumPy, changes of attributes, and calls that
configure autograd, would take effect once instead of in each batch: they are refused. An ``autograd.Function`` is
recorded as one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from torchhal import rng
from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._attribute_reads import AttributeReads
from torchhal_parallel._fake_modules import FakeModules
from torchhal_parallel._forward_capture import logging_by
from torchhal_parallel._gradient_check import AutogradCalls, check_gradients
from torchhal_parallel._graph_recorder import GraphRecorder, storage_id
from torchhal_parallel._recorded_calls import is_mutable
from torchhal_parallel._tensor_swap import swapped_tensors


@dataclasses.dataclass(frozen=True)
class ResultIndex:
    """The place of a graph's result in what the forward returned."""

    index: int


@dataclasses.dataclass
class CapturedGraph:
    """A recorded forward.

    Args:
        graph: the forward, which gives a tuple of the tensors in what it returned.
        results: the nodes that give them.
        returned: what the forward returned, with :class:`ResultIndex` in the places of these.
        values: the fake tensor that each node gave.
        constants: tensors that the graph reads by names of their own.
        reads: the attributes by whose values the forward is this one.
        recomputes: whether it discards activations for recomputation, as by ``torch.utils.checkpoint``.
    """

    graph: fx.Graph
    results: list[fx.Node]
    returned: Any
    values: dict[fx.Node, torch.Tensor]
    constants: dict[str, torch.Tensor]
    reads: AttributeReads
    recomputes: bool


class GraphCapture:
    """Records the forwards of ``module`` as calls of the modules that are not ``around``.

    Made while every rank has the whole model; its copies have no memory.

    Args:
        around: names of the modules whose own forward is recorded, ``""`` for the outermost.
        device: where the run computes.
        trainer: what the forward may read the epoch of, for example.
    """

    def __init__(self, module: nn.Module, around: set[str], device: torch.device, trainer: Any = None) -> None:
        self.module = module
        self.device = device
        self._modules = FakeModules(module, around, device)
        self._owners: dict[str, Any] = dict(module.named_modules()) | ({} if trainer is None else {"trainer": trainer})

    def __call__(self, tensors: Mapping[str, torch.Tensor], rows: int, constants: Mapping[str, Any]) -> CapturedGraph:
        """Record the forward called with ``rows`` samples of ``tensors``, and with ``constants``, by name.

        Raises:
            ModelError: it depends on the values of a tensor, gives a module what no graph can hold, or does what has
                to be done in each batch.
        """
        graph = fx.Graph()
        modules, mode = self._modules, self._modules.mode
        added = {name: each for name, each in self.module.named_modules() if id(each) not in modules.names}
        recorder = GraphRecorder(modules, graph, self.device, {id(each): name for name, each in added.items()})
        reads = AttributeReads({**self._owners, **added}, modules.copied)
        calls = AutogradCalls(type(self.module).__name__, lambda: recorder.silent)
        modules.sync_training()
        arguments: dict[str, Any] = {}
        with mode:
            for name, tensor in tensors.items():
                arguments[name] = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
                recorder.bind(arguments[name], graph.placeholder(name))
                recorder.protected[storage_id(arguments[name])] = f"its argument {name!r}"
        forward: Any = type(self.module).forward
        torch.clear_autocast_cache()  # of casts that another forward has made
        generators = rng.collect_host()
        try:
            with swapped_tensors(modules.swaps):
                with (
                    self._logs_refused(recorder),
                    reads.recorded(lambda: recorder.silent),
                    mode,
                    recorder,
                    recorder.calls_recorded(),
                    calls,
                ):
                    returned = forward(self.module, **arguments, **constants)
                assigned = [own for held, key, own in modules.swaps if held.get(key) is not own]
                reads.changed += [modules.attributes[id(own)] for own in assigned]
            self._check_effects(reads, rng.drawn_between(generators, rng.collect_host()))
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
                return ResultIndex(len(results) - 1)
            return recorder.node_of(leaf, "what it returns")

        returned = map_tensors(returned, place_of)
        graph.output(tuple(results))
        _erase_unused(graph)
        if recorder.with_grad:
            with mode:
                check_gradients(graph, recorder.values, recorder.trained, type(self.module).__name__)
        return CapturedGraph(
            graph, results, returned, recorder.values, recorder.constants, reads.settle(), recorder.recomputes
        )

    @contextmanager
    def _logs_refused(self, recorder: GraphRecorder) -> Iterator[None]:
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


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if not is_mutable(node):
            graph.erase_node(node)
