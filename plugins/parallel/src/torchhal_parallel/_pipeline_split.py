"""Split a model into stages at named modules, for a pipeline.

Only the outer forward is recorded, down to the modules at which it is cut; what is inside them runs as it is, with its
own control flow, hooks and training mode. A stage calls the model's own submodules, so names, parameters and shared
state are those of the model.

:func:`split_into_stages` assigns modules to stages, before there is a batch. What the stages compute is cut
from the forward of a batch by :func:`stages_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torchhal.errors import ConfigurationError, ModelError
from torchhal.suggestions import did_you_mean
from torchhal_parallel._fake_modules import leaf_modules, modules_around


@dataclass(frozen=True)
class Stage:
    """One part of the forward.

    Args:
        graph: from the values that come in to those that go out.
        modules: names of the submodules it calls, and of the parameters and buffers it reads itself.
        inputs, outputs: the nodes of the whole graph that give the values at its ends, in order. The last stage gives
            what the forward returns.
        constants: names of the tensors that it has from elsewhere.
    """

    graph: fx.Graph
    modules: tuple[str, ...]
    inputs: tuple[fx.Node, ...] = ()
    outputs: tuple[fx.Node, ...] = ()
    constants: tuple[str, ...] = ()


class _Outline(fx.Tracer):
    """A tracer that traces into the modules around the cuts only."""

    proxy_buffer_attributes = True  # a buffer that the outer forward reads stays the model's, as parameters do

    def __init__(self, around: set[str]) -> None:
        super().__init__()
        self.around = around

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.around


def check_points_form(points: Any) -> None:
    """Raise ConfigurationError unless ``points`` is None or a sequence of names, before there is a model."""
    if isinstance(points, str):
        raise ConfigurationError(f"'split_points' must be a list of names (got {points!r})")
    if points is not None and not all(isinstance(name, str) and name for name in points):
        raise ConfigurationError(f"'split_points' must be names of modules (got {points!r})")


def even_cuts(module: nn.Module, stages: int) -> list[str]:
    """Return where to split so that stages have about equally many parameters: between elements of one list of layers.

    Of the ``nn.ModuleList``s and ``nn.Sequential``s that are long enough the outermost, as a cut in an inner one would
    go through the midst of a layer. One whose heaviest stage would have more than 1.5 times its share only if no other
    is better: the blocks may be one element of a sequence.

    Raises:
        ConfigurationError: there is none that long.
    """
    order = {id(parameter): index for index, parameter in enumerate(module.parameters())}
    total = sum(parameter.numel() for parameter in module.parameters())
    best: tuple[int, list[str]] | None = None
    lists = [(name, sub) for name, sub in module.named_modules() if isinstance(sub, nn.ModuleList | nn.Sequential)]
    for name, layers in sorted(lists, key=lambda item: item[0].count(".") + bool(item[0])):
        children = [(child, layer) for child, layer in layers.named_children() if any(True for _ in layer.parameters())]
        if len(children) < stages:
            continue
        inside = {id(parameter) for parameter in layers.parameters()}
        first = min(order[identity] for identity in inside)
        weights = [sum(parameter.numel() for parameter in layer.parameters()) for _, layer in children]
        outside = [p for p in module.parameters() if id(p) not in inside]
        weights[0] += sum(p.numel() for p in outside if order[id(p)] < first)
        weights[-1] += sum(p.numel() for p in outside if order[id(p)] > first)
        starts = _balanced(weights, stages)
        heaviest = max(sum(weights[a:b]) for a, b in zip([0, *starts], [*starts, len(weights)], strict=True))
        if best is None or heaviest < best[0]:
            best = heaviest, [f"{name}.{children[start][0]}".lstrip(".") for start in starts]
        if 2 * heaviest * stages <= 3 * total:
            break
    if best is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no nn.ModuleList or nn.Sequential of at least {stages} layers with "
            f"parameters that {stages} stages could share: say where to cut, split_points=['layers.2', ...]"
        )
    return best[1]


def _balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return where each part but the first begins, so that the heaviest is as light as can be; none is empty.

    Of equally good divisions the one whose earlier parts are the longer.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    lightest: dict[int, tuple[int, list[int]]] = {end: (sums[end], []) for end in range(1, len(weights) + 1)}
    for count in range(2, parts + 1):
        lightest = {
            end: min(
                (
                    (max(lightest[start][0], sums[end] - sums[start]), [*lightest[start][1], start])
                    for start in range(end - 1, count - 2, -1)
                ),
                key=lambda found: found[0],
            )
            for end in range(count, len(weights) + 1)
        }
    return lightest[len(weights)][1]


def split_into_stages(module: nn.Module, split_points: Sequence[str]) -> list[Stage]:
    """Return the stages of ``module.forward``, each from the call of a module in ``split_points`` on, by their modules.

    Where the forward can't be followed without a batch, as one that branches on shapes, modules are taken to be called
    in the order in which they were registered; those without a trained parameter then belong to every stage.

    Raises:
        ConfigurationError: a name that isn't there, is given twice, or at which nothing is cut.
    """
    names = {name for name, _ in module.named_modules() if name}
    for point in split_points:
        if point not in names:
            raise ConfigurationError(
                f"the pipeline is to be cut at {point!r}, and {type(module).__name__} has no such module"
                f"{did_you_mean(str(point), names)}"
            )
    if len(set(split_points)) < len(split_points):
        raise ConfigurationError(f"'split_points' must differ from each other (got {list(split_points)!r})")
    followed = modules_around(split_points)
    attributes = set(vars(module))
    try:
        graph = _Outline(followed).trace(module, concrete_args=_defaults(module))
    except Exception:
        return _stages_by_registration(module, list(split_points), followed)
    finally:
        made = vars(module).keys() - attributes  # tensors that the forward makes, which the tracer keeps there
        for name in made:
            delattr(module, name)
    for node in list(graph.nodes):  # the tracer asserts that an argument with a default has it
        if node.op == "call_function" and getattr(node.target, "__name__", "") in ("_assert_is_none", "_assert"):
            compared = node.all_input_nodes
            graph.erase_node(node)
            for other in compared:
                if other.op == "call_function" and not other.users:
                    graph.erase_node(other)
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.target in made:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(torch.zeros, ((),)))
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    return stages_of(graph, split_points, type(module).__name__)


def _defaults(module: nn.Module) -> dict[str, Any]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # as fx follows the class's
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _stages_by_registration(module: nn.Module, points: list[str], followed: set[str]) -> list[Stage]:
    model = type(module).__name__
    held: list[list[str]] = [[] for _ in range(len(points) + 1)]
    everywhere: list[str] = []
    for name in _direct(module, followed):  # which no module has that is called
        held[0].append(name)
    waiting, stage = list(points), 0
    for name in leaf_modules(module, followed):
        if name in waiting:
            if name != waiting[0]:
                raise ConfigurationError(
                    f"'split_points' must be in the order in which {model} has its modules: {name!r} comes before "
                    f"{waiting[0]!r}"
                )
            waiting.pop(0)
            stage += 1
        trained = any(parameter.requires_grad for parameter in module.get_submodule(name).parameters())
        (held[stage] if trained else everywhere).append(name)
    if waiting:
        raise ConfigurationError(
            f"cutting at {waiting[0]!r} cuts nothing: the forward of {model} does not call it as a module"
        )
    stages = []
    for index, names in enumerate(held):
        if not any(name not in _direct(module, followed) for name in names):
            raise ConfigurationError(f"stage {index} of the pipeline would have no module: cut {model} elsewhere")
        graph = fx.Graph()
        for name in (*names, *everywhere):
            graph.call_module(name) if name not in _direct(module, followed) else graph.get_attr(name)
        graph.output(None)
        stages.append(Stage(graph, (*names, *everywhere)))
    return stages


def _direct(module: nn.Module, followed: set[str]) -> list[str]:
    """Parameters and buffers of the modules whose own forward is recorded."""
    return [
        f"{path}.{name}" if path else name
        for path in sorted(followed)
        for members in (module.get_submodule(path)._parameters, module.get_submodule(path)._buffers)
        for name, tensor in members.items()
        if tensor is not None
    ]


def stages_of(graph: fx.Graph, points: Sequence[str], model: str, constants: Set[str] = frozenset()) -> list[Stage]:
    """Return ``graph`` in parts: a new one begins at the call of each module in ``points``.

    Raises:
        ConfigurationError: it does not call them, or in another order, or a part would have no module.
    """
    number: dict[fx.Node, int] = {}
    waiting, stage = list(points), 0
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if node.op == "call_module" and node.target in waiting:
            if node.target != waiting[0]:
                raise ConfigurationError(
                    f"'split_points' must be in the order in which {model} calls them: {node.target!r} comes before "
                    f"{waiting[0]!r}"
                )
            waiting.pop(0)
            stage += 1
        number[node] = stage
    if waiting:
        raise ConfigurationError(
            f"cutting at {waiting[0]!r} cuts nothing: the forward of {model} does not call it as a module"
        )
    for node in nodes:  # what reads a parameter goes to the stage that uses it
        if node.op == "get_attr" and node.users:
            number[node] = min(number.get(user, stage) for user in node.users)
    (output,) = (node for node in graph.nodes if node.op == "output")
    returned = list(output.all_input_nodes)
    for index in range(stage + 1):
        if not any(node.op == "call_module" and number[node] == index for node in nodes):
            raise ConfigurationError(f"stage {index} of the pipeline would have no module: cut {model} elsewhere")
    live = [_live(nodes, number, returned, index, stage) for index in range(stage + 2)]
    return [
        _copy(nodes, number, output, live[index], live[index + 1], index, stage, constants)
        for index in range(stage + 1)
    ]


def _live(
    nodes: list[fx.Node], number: dict[fx.Node, int], returned: list[fx.Node], index: int, last: int
) -> list[fx.Node]:
    """Values that enter stage ``index``: made before it, used in it or later. Those of stage 0 are the arguments."""
    if index == 0:
        return [node for node in nodes if node.op == "placeholder"]
    if index > last:
        return []
    return [
        node
        for node in nodes
        if node.op != "get_attr"
        and number[node] < index
        and (node in returned or any(number.get(user, -1) >= index for user in node.users))
    ]


def _copy(
    nodes: list[fx.Node],
    number: dict[fx.Node, int],
    output: fx.Node,
    incoming: list[fx.Node],
    outgoing: list[fx.Node],
    index: int,
    last: int,
    constants: Set[str],
) -> Stage:
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    modules: list[str] = []
    for node in incoming:
        copies[node] = part.node_copy(node) if node.op == "placeholder" else part.placeholder(node.name)

    def mapped(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter that an earlier stage reads too
            copies[node] = part.node_copy(node)
            modules.append(str(node.target))
        return copies[node]

    for node in nodes:
        if number[node] == index and node not in copies and node.op != "get_attr":
            copies[node] = part.node_copy(node, mapped)
            if node.op == "call_module":
                modules.append(str(node.target))
    if index == last:
        part.output(torch.fx.node.map_arg(output.args[0], mapped))
        outgoing = []
    else:
        part.output(tuple(mapped(node) for node in outgoing))
    names = dict.fromkeys(modules)
    held = tuple(name for name in names if name not in constants)
    return Stage(part, held, tuple(incoming), tuple(outgoing), tuple(name for name in names if name in constants))


def stage_parameters(module: nn.Module, stage: Stage) -> dict[str, Any]:
    """Parameters and buffers that a stage needs, by their names in the model."""
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor for name, tensor in everything if stage_owns(stage, name)}


def stage_owns(stage: Stage, name: str) -> bool:
    """Return whether the entry ``name`` of the model's state is of a module that the stage runs."""
    return any(name == used or name.startswith(f"{used}.") for used in stage.modules)


def kept_tensors(module: nn.Module, stages: Sequence[Stage], mine: Sequence[int]) -> set[int]:
    """Return the ids of the parameters and buffers that the rank with the stages ``mine`` keeps."""
    parts = [set(map(id, stage_parameters(module, stage).values())) for stage in stages]
    everything = set(map(id, (*module.parameters(), *module.buffers())))
    kept = everything.difference(*parts)  # the step may use what no stage does, wherever that runs
    kept.update(*(parts[index] for index in mine))
    return kept


def shared_or_unused_parameters(module: nn.Module, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the names of parameters and buffers that several stages have, or none, and why they can't be trained."""
    owners: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}  # tied ones have several, and a stage may use any of them
    for index, stage in enumerate(stages):
        for name, tensor in stage_parameters(module, stage).items():
            owners.setdefault(id(tensor), set()).add(index)
            names.setdefault(id(tensor), []).append(name)
    several = {
        name: f"is used in the stages {', '.join(map(str, sorted(having)))} of the pipeline, and each would "
        "train a copy of its own: cut the model where one stage has all its uses, or untie it"
        for key, having in owners.items()
        for name in names[key]
        if len(having) > 1
    }
    nowhere = {
        name: "is trained, and no stage of the pipeline has it: the forward does not use it. Use it there, or freeze "
        "it with requires_grad_(False)"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if id(tensor) not in owners
    }
    return several | nowhere


def check_trained(module: nn.Module, untrainable: Mapping[str, str]) -> None:
    """Raise ModelError for a parameter of :func:`shared_or_unused_parameters` that is trained."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in untrainable:
            raise ModelError(f"{name!r} {untrainable[name]}")
