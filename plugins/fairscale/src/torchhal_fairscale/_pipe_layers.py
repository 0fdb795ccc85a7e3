"""Find the layers of a model that Pipe divides, and refuse those that a micro-batch changes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from torchhal.errors import ConfigurationError, ModelError


def find_layers(module: nn.Module, name: str | None, alias: str, *, required: bool) -> tuple[str, nn.Sequential] | None:
    """Return name and object of the ``nn.Sequential`` to divide: the outermost, if there is one only.

    Args:
        module: the user's.
        name: of it, as ``get_submodule`` takes it; None to search.
        alias: of the strategy.
        required: False to return None where there is no single one.

    Raises:
        ConfigurationError: there is none of that name, or several and no name.
        ModelError: there is none.
    """
    if name is not None:
        try:
            found = module.get_submodule(name)
        except AttributeError:
            found = None
        if found is None or not _is_plain(found):
            raise ConfigurationError(
                f"'layers' must name an nn.Sequential with the forward of that class in {type(module).__name__} (got "
                f"{name!r})"
            )
        assert isinstance(found, nn.Sequential)
        return name, found
    candidates = _outermost(module, "")
    if len(candidates) != 1 and not required:
        return None
    if not candidates:
        raise ModelError(
            f"strategy {alias!r} divides the layers of an nn.Sequential among the devices, and {type(module).__name__} "
            "has none: put its layers into one, or use strategy='pipeline' of torchhal-parallel, which divides other "
            "modules, too"
        )
    if len(candidates) > 1:
        raise ConfigurationError(
            f"strategy {alias!r} divides one nn.Sequential, and {type(module).__name__} has "
            f"{', '.join(repr(each) for each, _ in candidates)}: say which, as strategy="
            f"FairscalePipeStrategy(layers={candidates[0][0]!r})"
        )
    return candidates[0]


def _is_plain(module: nn.Module) -> bool:
    """Return whether ``module`` does what nn.Sequential does, and nothing else, which Pipe would leave out."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def _outermost(module: nn.Module, name: str) -> list[tuple[str, nn.Sequential]]:
    if _is_plain(module):
        assert isinstance(module, nn.Sequential)
        return [(name, module)]
    found = []
    for child_name, child in module.named_children():
        found += _outermost(child, f"{name}.{child_name}" if name else child_name)
    return found


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Return how many layers in turn each of ``parts`` gets, so that the greatest sum of sizes is as small as can be.

    Args:
        sizes: of the layers; at least as many as ``parts``.
        parts: number of devices.
    """
    costs = [size + 1 for size in sizes]  # layers without parameters are shared out, too
    ends = [0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    best = {(0, 0): (0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, len(costs) - (parts - part) + 1):
            best[part, end] = min(
                (max(best[part - 1, start][0], ends[end] - ends[start]), start)
                for start in range(part - 1, end)
                if (part - 1, start) in best
            )
    counts, end = [], len(costs)
    for part in range(parts, 0, -1):
        start = best[part, end][1]
        counts.append(end - start)
        end = start
    return counts[::-1]


def check_no_batch_statistics(layers: nn.Sequential, chunks: int, checkpoint: str, alias: str) -> None:
    """Raise ModelError for a layer that computes with the whole batch, or that counts it twice when computed again."""
    for name, layer in layers.named_modules():
        if not (isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)):
            continue
        if chunks > 1:
            raise ModelError(
                f"strategy {alias!r} runs the layers on {chunks} parts of a batch, and {name!r}, a "
                f"{type(layer).__name__}, would compute its statistics of each: use chunks=1, or a norm over samples, "
                "such as GroupNorm"
            )
        if checkpoint == "always":
            raise ModelError(
                f"strategy {alias!r} computes the layers again in backward, and {name!r}, a {type(layer).__name__}, "
                "would count each batch twice in its running statistics: use checkpoint='never'"
            )
