"""Parts as users give them: aliases, classes and objects, in arguments of their own or in ``plugins=[...]``.

Any error in one, including its type, is a ConfigurationError: the Trainer's arguments have one kind of error.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.errors import (
    AcceleratorUnavailableError,
    ConfigurationError,
    PluginError,
    TorchhalError,
    UnknownAliasError,
    message_of,
)
from torchhal.plugin import KINDS
from torchhal.precision import Precision
from torchhal.registry._hints import meant_by
from torchhal.resolve._alias_options import options_of, read_alias, renamed
from torchhal.resolve._plan import ResolvedComponent
from torchhal.resolve._refusals import availability_of
from torchhal.strategies import Strategy
from torchhal.suggestions import one_of

BASES: Mapping[str, type] = {
    "accelerator": Accelerator,
    "precision": Precision,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "strategy": Strategy,
}

# What plugins=[...] may hold: parts that have no Trainer argument of their own, or that users put there by habit.
PLUGIN_KINDS = ("precision", "checkpoint_io", "cluster_environment")


def component_from_instance(kind: str, value: Any, reason: str) -> ResolvedComponent:
    """Return a component from an instance, or from a class that needs no arguments."""
    base = BASES[kind]
    instance = value
    if isinstance(value, type) and issubclass(value, base):
        if inspect.isabstract(value):
            missing = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
            raise ConfigurationError(f"'{kind}' can't be {value.__name__} yet: it does not implement {missing}")
        undeclared = [name for name in ("name", "device_type") if kind == "accelerator" and not hasattr(value, name)]
        if undeclared:
            raise ConfigurationError(f"'{kind}' can't be {value.__name__} yet: it sets no {', '.join(undeclared)}")
        try:
            inspect.signature(value).bind()
        except TypeError as error:
            raise ConfigurationError(
                f"'{kind}' must be an instance where the class needs arguments (got {value.__name__}: {error})"
            ) from None
        instance = value()
    if not isinstance(instance, base):
        article = "an" if base.__name__[0] in "AEIOU" else "a"
        auto = "'auto', " if kind in ("accelerator", "strategy") else ""
        raise ConfigurationError(
            f"'{kind}' must be {auto}an alias, {article} {base.__name__} or a class of one (got {value!r})"
            f"{_meant(kind, value)}"
        )
    if kind != "accelerator" and not (available := availability_of(type(instance))):
        raise ConfigurationError(
            f"{kind.replace('_', ' ')} {_own_alias(instance)!r} can't be used here: {available.reason}"
        )
    return ResolvedComponent(kind, _own_alias(instance), instance, reason)


def _meant(kind: str, value: Any) -> str:
    """Return the end of a sentence about an object of torch's that is an alias here."""
    if kind == "accelerator" and isinstance(value, torch.device):
        return f": write accelerator={value.type!r}" + ("" if value.index is None else f", devices=[{value.index}]")
    if value is None:
        return ": leave it out" + (f", or write {kind}='auto'" if kind in ("accelerator", "strategy") else "")
    meant = meant_by(kind, getattr(value, "__name__", str(value)).removeprefix("torch."))
    return f": write {kind}={one_of(meant)}" if meant else ""


def _own_alias(value: Any) -> str:
    """Return the name of an object that was not requested by alias."""
    return str(getattr(value, "alias", "") or getattr(value, "name", "") or type(value).__name__)


def from_alias(kind: str, alias: str, reason: str, **offered: Any) -> ResolvedComponent:
    """Return the component that is registered as ``alias``; ``offered`` as for :func:`from_entry`."""
    return from_entry(registry.find(kind, str(alias)), alias, reason, **offered)


def from_entry(entry: registry.RegistryEntry, alias: str, reason: str, **offered: Any) -> ResolvedComponent:
    """Return the component of ``entry``, which messages call ``alias``; raise an error if it can't be used here.

    Args:
        entry: of the registry.
        alias: as the user wrote it, with its options.
        reason: for the Plan.
        **offered: arguments for the constructor where it has a parameter of that name and nothing else gives it.
    """
    kind = entry.kind
    availability = entry.availability()
    if availability and kind != "accelerator":  # whose hardware is asked for later, with the devices
        availability = availability_of(entry.load())
    if not availability:
        message = f"{kind.replace('_', ' ')} {alias!r} can't be used here: {availability.reason}"
        if kind == "accelerator":
            raise AcceleratorUnavailableError(message, alias=alias, reason=availability.reason)
        raise ConfigurationError(message)
    value = _create(entry, alias, offered)
    if isinstance(value, Strategy) and not value.alias:
        value.alias = entry.component.alias
    return ResolvedComponent(kind, entry.component.alias, value, reason)


def _create(entry: registry.RegistryEntry, alias: str, offered: Mapping[str, Any]) -> Any:
    options = options_of(alias)
    if offered:
        takes = inspect.signature(entry.load()).parameters
        given = {*options, *entry.component.defaults}
        offered = {name: value for name, value in offered.items() if name in takes and name not in given}
    try:
        return entry.create(**offered, **options)
    except (TypeError, ValueError) as error:
        if isinstance(error, TorchhalError) or (entry.kind not in ("logger", "callback") and not options):
            raise
        raise ConfigurationError(f"{entry.kind.replace('_', ' ')} {alias!r}: {message_of(error)}") from error


def apply_accelerator_default(kind: str, alias: str, accelerator: Accelerator) -> str:
    """Return the alias that replaces a general one on this hardware."""
    return renamed(alias, accelerator.substitutes.get(kind, {}).get(alias.lower(), alias))


def group_by_kind(plugins: Any) -> dict[str, Any]:
    """Group ``plugins=`` by kind: objects by their class, names by the component that has them."""
    if plugins is None:
        return {}
    if isinstance(plugins, str | bytes) or not isinstance(plugins, Sequence):
        plugins = [plugins]
    plugins = [read_alias("plugins", plugin) for plugin in plugins]
    given: dict[str, Any] = {}
    for plugin in plugins:
        kind = _plugin_kind(plugin)
        if kind in given:
            raise ConfigurationError(
                f"'plugins' must hold one {kind.replace('_', ' ')} at most (got {given[kind]!r} and {plugin!r})"
            )
        given[kind] = plugin
    return given


def _plugin_kind(plugin: Any) -> str:
    kinds = _kinds_of_name(plugin) if isinstance(plugin, str) else _kinds_of_object(plugin)
    mine = [kind for kind in kinds if kind in PLUGIN_KINDS]
    if len(mine) == 1:
        return mine[0]
    rule = "'plugins' must hold precisions, checkpoint IOs or cluster environments, as objects or aliases"
    if len(mine) > 1:
        raise ConfigurationError(f"{rule} (got {plugin!r}, the name of a {' and a '.join(mine)}: give an object)")
    if kinds:
        argument = "callbacks" if kinds[0] == "callback" else kinds[0]
        raise ConfigurationError(f"{rule} (got the {kinds[0]} {plugin!r}): give it as {argument}=")
    if isinstance(plugin, str):
        known = sorted(alias for kind in PLUGIN_KINDS for alias in registry.aliases(kind))
        lines = [f"{rule} (got {plugin!r}; known: {', '.join(map(repr, known))})", *registry.why_unknown(plugin)]
        raise ConfigurationError("\n".join(lines))
    raise ConfigurationError(f"{rule} (got {plugin!r})")


def _kinds_of_name(name: str) -> list[str]:
    # A name of core's or of a registered class is looked for in no plugin: that would import every manifest.
    if kinds := [kind for kind in KINDS if registry.find_known(kind, name) is not None]:
        return kinds
    for kind in KINDS:
        try:
            registry.find(kind, name)
        except UnknownAliasError:
            continue
        except PluginError:  # two plugins have it, or its record is wrong: raised later if it is the selected one
            pass
        kinds.append(kind)
    return kinds


def _kinds_of_object(plugin: Any) -> list[str]:
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return [kind for kind, base in BASES.items() if issubclass(cls, base)]


def single_source(kind: str, sources: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the one (place, value) of ``sources`` with a value, or ("", None); raise an error for two that differ."""
    named = {where: value for where, value in sources.items() if value is not None}
    first, *others = named.values() if named else [None]
    if any(not _same(first, other) for other in others):
        listing = " and ".join(f"{value!r} ({where})" for where, value in named.items())
        raise ConfigurationError(
            f"the {kind.replace('_', ' ')} is given more than once: {listing}; give it in one place"
        )
    return next(iter(named.items()), ("", None))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, str) and isinstance(second, str):
        return first.lower() == second.lower() and options_of(first) == options_of(second)
    return first is second


def choose_component(
    kind: str, default: str, sources: Mapping[str, Any], accelerator: Accelerator
) -> ResolvedComponent:
    """Return the component of ``kind`` that is given somewhere, or the one called ``default``."""
    where, value = single_source(kind, sources)
    if value is None:
        return from_alias(kind, apply_accelerator_default(kind, default, accelerator), "the default")
    if not isinstance(value, str):
        return component_from_instance(kind, value, f"given as an object ({where})")
    alias = apply_accelerator_default(kind, value, accelerator)
    means = "" if alias == value else f", which on {accelerator.name} means {alias}"
    return from_alias(kind, alias, f"{where}{value!r}{means}")
