"""Choose the submodules that are sharded as units: gathered together before they compute, and freed after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError


def find_blocks(module: nn.Module, policy: Any) -> list[tuple[str, nn.Module]]:
    """Submodules, with their names, that are units by ``policy``; inner ones before those that hold them.

    Args:
        module: the model; itself never among the result.
        policy: ``"blocks"``: the elements of every ``nn.ModuleList``, and of every ``nn.Sequential`` outside of them
            that has several with parameters, where models keep their layers; but none that begins with an operation
            in place, or that one follows. An int: the smallest submodules with at least so many parameters. Classes:
            their instances. A callable: those for which ``policy(name, submodule)`` is true. ``"none"``: no unit but
            the whole.

    A parameter that several units would hold makes all of them part of what is around them: a unit can't share.

    Raises:
        ConfigurationError: ``policy`` is none of these.
    """
    chosen = chosen_blocks(module, policy)
    owners: dict[int, set[str]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        unit = next((other for other in _prefixes(name) if other in chosen), "")
        for parameter in submodule.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(unit)
    sharing = set().union(*(units for units in owners.values() if len(units) > 1)) if owners else set()
    kept = {name: submodule for name, submodule in chosen.items() if name not in sharing}
    return sorted(kept.items(), key=lambda item: -item[0].count("."))


def chosen_blocks(module: nn.Module, policy: Any) -> dict[str, nn.Module]:
    """Submodules that are called and have parameters, by name, as ``policy`` chooses them; shared parameters or not."""
    return {
        name: unit
        for name, unit in _chosen(module, policy)
        if _has_parameters(unit) and type(unit).forward is not nn.Module.forward
    }  # a container is never called, so nothing would gather it


def check_form(policy: Any, option: str) -> None:
    """Raise ConfigurationError if ``policy``, the value of ``option``, has no form that :func:`find_blocks` takes."""
    if isinstance(policy, str):
        known = policy in ("blocks", "none")
    elif isinstance(policy, Iterable) and not isinstance(policy, type):
        classes = tuple(policy)
        known = bool(classes) and all(isinstance(item, type) and issubclass(item, nn.Module) for item in classes)
    elif isinstance(policy, type):
        known = issubclass(policy, nn.Module)
    else:
        known = callable(policy) or (isinstance(policy, int) and not isinstance(policy, bool) and policy > 0)
    if not known:
        raise ConfigurationError(
            f"{option!r} must be 'blocks', 'none', a number of parameters, classes of modules or a callable of a name "
            f"and a module (got {policy!r})"
        )


def check_policy(module: nn.Module, policy: Any, option: str) -> str | None:
    """Return a warning if ``policy``, the value of ``option``, chooses nothing.

    Raises:
        ConfigurationError: it chooses nothing, and is not the default, which suits any model.
    """
    if policy == "none" or chosen_blocks(module, policy):
        return None
    if policy != "blocks" or option != "wrap_policy":
        raise ConfigurationError(
            f"{option!r} chooses no submodule of {type(module).__name__} that is called and has parameters (got "
            f"{policy!r}): give classes of its layers, a smaller number of parameters, or a callable of a name and a "
            "module"
        )
    holders = [
        submodule for submodule in module.modules() if next(submodule.parameters(recurse=False), None) is not None
    ]
    if len(holders) < 2:
        return None
    return (
        f"{type(module).__name__} has no nn.ModuleList or nn.Sequential of layers that could be units, so all its "
        "parameters are gathered together: say which submodules are units by 'wrap_policy', which takes classes of "
        "layers, a number of parameters, or a callable; 'none' says that this is meant"
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _prefixes(name: str) -> Iterator[str]:
    """Yield ``"a.b.c"``, ``"a.b"`` and ``"a"`` for ``"a.b.c"``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _chosen(module: nn.Module, policy: Any) -> Iterator[tuple[str, nn.Module]]:
    if policy == "none":
        return
    if policy == "blocks":
        yield from _elements(module, "", inside=False)
        return
    check_form(policy, "wrap_policy")
    if isinstance(policy, int):
        yield from _by_size(module, policy, "")
    elif isinstance(policy, type | Iterable):
        classes = (policy,) if isinstance(policy, type) else tuple(policy)
        yield from ((name, sub) for name, sub in module.named_modules() if name and isinstance(sub, classes))
    else:
        yield from ((name, sub) for name, sub in module.named_modules() if name and policy(name, sub))


def _elements(module: nn.Module, prefix: str, *, inside: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of lists of layers; ``inside`` of one, a sequence is only how a layer is written."""
    several = isinstance(module, nn.Sequential) and sum(map(_has_parameters, module)) > 1
    listed = isinstance(module, nn.ModuleList) or (several and not inside)
    children = list(module.named_children())
    for index, (child, submodule) in enumerate(children):
        name = f"{prefix}{child}"
        after = children[index + 1 : index + 2] if several else []
        # an operation in place on what fully_shard passes in is an error; one on what a unit returns drops its hooks
        if listed and not any(_begins_in_place(other) for other in (submodule, *(other for _, other in after))):
            yield name, submodule
        yield from _elements(submodule, f"{name}.", inside=inside or listed)


def _begins_in_place(block: nn.Module) -> bool:
    """Return whether a layer, or the first one of a sequence, overwrites what it is called with."""
    while isinstance(block, nn.Sequential) and len(block):
        block = block[0]
    return getattr(block, "inplace", False) is True


def _by_size(module: nn.Module, least: int, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for child, submodule in module.named_children():
        name = f"{prefix}{child}"
        inner = list(_by_size(submodule, least, f"{name}."))
        yield from inner
        if not inner and sum(parameter.numel() for parameter in submodule.parameters()) >= least:
            yield name, submodule
