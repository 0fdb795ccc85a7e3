"""Tensor parallelism: which layers are sharded how, checked before anything is (Shoeybi et al. 2019, "Megatron-LM").

A plan is ``{"layers.*.attn.q_proj": "colwise", "layers.*.attn.o_proj": "rowwise", ...}``: names of modules, in which
``*`` stands for one part of a name, and styles:

``colwise``: a Linear's outputs, or an Embedding's columns, are divided; each rank computes with its part, which a
``rowwise`` layer near it has to close. ``colwise_rep``: the parts are joined again behind the layer, as for a head.
``rowwise``: a Linear's inputs are divided, as a ``colwise`` layer leaves them; the results are summed.
``rowwise_rep``: the same from whole inputs, and an Embedding's rows. ``sequence_parallel``: a norm takes a whole input
of shape (batch, sequence, ...), computes a part of the sequence, and gives a whole output. Or any
``torch.distributed.tensor.parallel.ParallelStyle``, which alone determines what it takes and gives, unless it does the
same as a name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchhal.errors import ConfigurationError
from torchhal.suggestions import did_you_mean
from torchhal_parallel._transformers_plan import transformers_plan

STYLES = ("colwise", "colwise_rep", "rowwise", "rowwise_rep", "sequence_parallel")


def styles_of(style: Any) -> list[ParallelStyle]:
    """Return the objects of torch for a name of :data:`STYLES`, to be applied in this order; an object passes."""
    if isinstance(style, ParallelStyle):
        return [style]
    if style == "colwise":
        return [ColwiseParallel()]
    if style == "colwise_rep":
        return [ColwiseParallel(output_layouts=Replicate())]
    if style == "rowwise":
        return [RowwiseParallel()]
    if style == "rowwise_rep":
        return [RowwiseParallel(input_layouts=Replicate())]
    if style == "sequence_parallel":  # by itself torch's takes a plain tensor for a part, and gives a part
        divide = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        join = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        return [divide, SequenceParallel(), join]
    raise ConfigurationError(
        f"a style of the tensor parallel plan must be one of {', '.join(map(repr, STYLES))}, or a ParallelStyle of "
        f"torch.distributed.tensor.parallel (got {style!r})"
    )


def _named(style: Any) -> Any:
    """Return the name of what ``style``, an object of torch's, does; itself if there is none."""
    for name in ("colwise", "colwise_rep", "rowwise", "rowwise_rep"):
        [same] = styles_of(name)
        if type(style) is type(same) and vars(style) == vars(same):
            return name
    return style


def plan_of(module: nn.Module, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the strategy's plan, or the module's ``tensor_parallel_plan``: an attribute, or a method that gives it.

    Without either that of the models of transformers in it: :func:`.transformers_plan`.
    """
    plan = given if given is not None else getattr(module, "tensor_parallel_plan", None)
    if callable(plan):
        plan = plan()
    if plan is None:
        plan = transformers_plan(module)
    if plan is None:
        raise ConfigurationError(
            f"tensor parallelism needs a plan, such as {{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}}: give "
            f"it to the strategy (plan=...), or set tensor_parallel_plan on {type(module).__name__}"
        )
    check_plan_form(plan)
    return plan


def check_plan_form(plan: Any) -> None:
    """Raise ConfigurationError for what is no plan for any model."""
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(key, str) for key in plan):
        raise ConfigurationError(f"a tensor parallel plan must map names of modules to styles (got {plan!r})")
    for style in plan.values():
        styles_of(style)


def resolve_plan(module: nn.Module, plan: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return ``{name of a module: style}`` for every module that the plan means.

    Raises:
        ConfigurationError: a pattern that matches nothing, with the names near it; two patterns for one module; a
            layer that can't be sharded so, or not over ``size`` ranks; a ``colwise`` layer without one that closes it,
            a ``rowwise`` one without one that opens it; tied weights that would be sharded differently.
    """
    modules = {name: submodule for name, submodule in module.named_modules(remove_duplicate=False) if name}
    resolved: dict[str, Any] = {}
    for pattern, given in plan.items():
        style = _named(given)
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            known = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in modules}
            raise ConfigurationError(
                f"the tensor parallel plan names {pattern!r}, and {type(module).__name__} has no such module"
                f"{did_you_mean(pattern, known | set(modules))}"
            )
        for name in found:
            if name in resolved and resolved[name] != style:
                raise ConfigurationError(
                    f"the tensor parallel plan has two styles for {name!r}: {resolved[name]!r} and {style!r}"
                )
            styles_of(style)
            _check_layer(name, modules[name], style, size)
            resolved[name] = style
    _check_closed(modules, resolved)
    _check_tied(modules, resolved)
    return resolved


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check_layer(name: str, layer: nn.Module, style: Any, size: int) -> None:
    if not isinstance(style, str):
        if type(style) in (ColwiseParallel, RowwiseParallel) and not isinstance(layer, nn.Linear | nn.Embedding):
            raise ConfigurationError(  # torch's own would come when other layers are divided
                f"{type(style).__name__} is for Linear and Embedding, and {name!r} is a {type(layer).__name__}: name "
                "the layers inside it"
            )
        return
    if style == "sequence_parallel":
        if not isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            raise ConfigurationError(
                f"style 'sequence_parallel' is for LayerNorm and RMSNorm, which treat each position of a sequence by "
                f"itself, and {name!r} is a {type(layer).__name__}"
            )
        return
    if not isinstance(layer, nn.Linear | nn.Embedding):
        raise ConfigurationError(
            f"style {style!r} is for Linear and Embedding, and {name!r} is a {type(layer).__name__}: name the layers "
            "inside it"
        )
    if "weight" not in layer._parameters:
        raise ConfigurationError(
            f"the weight of {name!r} is computed from other parameters, by a parametrization or a weight norm, which "
            "can't be sharded: leave the layer out of the plan, or remove what computes it"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        raise ConfigurationError(
            f"{name!r} is an Embedding with max_norm={layer.max_norm}, and no rank would have whole rows to bound: "
            "leave the layer out of the plan, or max_norm"
        )
    if isinstance(layer, nn.Embedding) and style == "rowwise":
        raise ConfigurationError(f"{name!r} is an Embedding, whose input isn't divided: use 'rowwise_rep'")
    column = style.startswith("colwise")
    if isinstance(layer, nn.Linear):
        what, count = ("outputs", layer.out_features) if column else ("inputs", layer.in_features)
    else:
        what, count = ("columns", layer.embedding_dim) if column else ("rows", layer.num_embeddings)
    if count % size:
        raise ConfigurationError(f"{name!r} has {count} {what}, which {size} ranks can't divide evenly for {style!r}")


def _check_closed(modules: Mapping[str, nn.Module], resolved: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a column-wise layer that no other closes: its parts would be used as if whole.

    What may close a layer stands beside it or beside its parent, and takes as much as it gives, or a multiple of that,
    as for the grouped heads of an attention. Whether it does is checked when the model first computes:
    :class:`~torchhal_parallel._tensor_parallel_check.PartialOutputCheck`.
    """
    rows = [name for name, style in resolved.items() if isinstance(style, RowwiseParallel) or style == "rowwise"]
    for name, style in resolved.items():
        if style == "colwise" and not any(_takes(modules[row], modules[name]) for row in _near(name, rows)):
            raise ConfigurationError(
                f"nothing closes the 'colwise' layer {name!r}: each rank would go on with its part of the output. Make "
                "the layer that takes its output 'rowwise', or this one 'colwise_rep'"
            )
    # an object of torch's own may give parts as well
    columns = [name for name, style in resolved.items() if style == "colwise" or isinstance(style, ParallelStyle)]
    for name, style in resolved.items():
        if style == "rowwise" and not _near(name, columns):
            raise ConfigurationError(
                f"the 'rowwise' layer {name!r} takes a part of its inputs on each rank, and no 'colwise' layer near it "
                "gives parts: make the one that gives its input 'colwise', or this one 'rowwise_rep'"
            )


def _near(name: str, others: list[str]) -> list[str]:
    """Return those of ``others`` that stand beside ``name``, or beside its parent."""
    parent = name.rpartition(".")[0]
    around = parent.rpartition(".")[0]
    return [other for other in others if _beside(other, parent) or (around and _inside(other, around))]


def _inside(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}.")


def _beside(name: str, parent: str) -> bool:
    """Return whether ``name`` stands in the module ``parent``, directly or deeper; at the top level directly."""
    return _inside(name, parent) if parent else "." not in name


def _takes(row: nn.Module, column: nn.Module) -> bool:
    given = column.out_features if isinstance(column, nn.Linear) else getattr(column, "embedding_dim", 0)
    return isinstance(row, nn.Linear) and bool(given) and row.in_features % int(given) == 0


def _check_tied(modules: Mapping[str, nn.Module], resolved: Mapping[str, Any]) -> None:
    for names in _tied(modules):
        dims = {(name, sharded_dim(modules[name], resolved.get(name))) for name in names}
        if len({dim for _, dim in dims}) > 1:
            listing = ", ".join(f"{name!r} {resolved.get(name, 'not in the plan')}" for name in names)
            raise ConfigurationError(
                f"{' and '.join(map(repr, names))} share one weight, which the plan would shard in two ways "
                f"({listing}): for an embedding and a head, 'rowwise_rep' and 'colwise_rep' fit each other"
            )


def sharded_dim(layer: nn.Module, style: Any) -> int | None:
    """Return the dimension of ``layer.weight`` that is divided; None where it is whole."""
    if isinstance(style, ColwiseParallel) or (isinstance(style, str) and style.startswith("colwise")):
        return 1 if isinstance(layer, nn.Embedding) else 0
    if isinstance(style, RowwiseParallel) or (isinstance(style, str) and style.startswith("rowwise")):
        return 0 if isinstance(layer, nn.Embedding) else 1
    return None


def _tied(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of Linear and Embedding layers that share their weight."""
    groups: dict[int, list[str]] = {}
    for name, layer in modules.items():
        weight = layer._parameters.get("weight")  # one that is computed is another object each time
        if isinstance(layer, nn.Linear | nn.Embedding) and weight is not None:
            groups.setdefault(id(weight), []).append(name)
    return [names for names in groups.values() if len({id(modules[name]) for name in names}) > 1]


def apply_plan(
    module: nn.Module, resolved: Mapping[str, Any], mesh: Any, after_each: Callable[[], None] = lambda: None
) -> None:
    """Shard the layers of a resolved plan that ``module`` still has, over ``mesh``; tied weights stay tied."""
    modules = {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}
    tied = _tied(modules)
    for name, style in resolved.items():
        if name in modules and not any(parameter.is_meta for parameter in modules[name].parameters()):
            if any(isinstance(parameter, DTensor) for parameter in modules[name].parameters(recurse=False)):
                continue  # another name of a layer that is done
            for part in styles_of(style):
                parallelize_module(modules[name], mesh, part)
            after_each()
    for first, *others in tied:
        for name in others:
            modules[name].weight = modules[first].weight
