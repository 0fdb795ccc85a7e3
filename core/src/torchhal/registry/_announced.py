"""Select the plugins whose manifests detection and ``accelerator="auto"`` have to import, from metadata alone."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from torchhal.plugin import HOOKS, PROJECT
from torchhal.registry._declarations import (
    ADAPT,
    DEFAULT_KINDS,
    DEFAULTS,
    DETECT,
    GROUPS,
    NO_DECLARATIONS,
    Declarations,
    read_declarations,
    read_group,
    same_alias,
    unknown_alias_problem,
)
from torchhal.registry._discovery import DiscoveredPlugin, PluginFilter, find_plugins
from torchhal.registry._entry import RegistryEntry, why_missing
from torchhal.registry._manifest_source import may_implement
from torchhal.registry._metadata_index import IndexedDistribution
from torchhal.registry._plugin_loader import PluginRecord, ScanResult

Announced = list[tuple[list[DiscoveredPlugin], list[tuple[str, str]]]]
"""The plugins of each distribution that declares a variable which is set, and its (variable, alias) pairs."""


_DEFAULTS_HEADER: Final = f"[{DEFAULTS}]"


@dataclass(frozen=True)
class AutoAccelerators:
    """The accelerators among which ``accelerator="auto"`` chooses.

    Attributes:
        entries: those to ask.
        plugins: the status of each plugin that may bring one.
        missing: (alias, distribution, reason) of each one whose distribution declares a module that isn't there; its
            manifest was not imported.
    """

    entries: list[RegistryEntry]
    plugins: list[PluginRecord]
    missing: list[tuple[str, str, str]]


def announced(index: Iterable[IndexedDistribution], environ: Mapping[str, str]) -> Announced:
    """Return the distributions that declare a variable which is set in ``environ`` and not empty."""
    found = []
    for distribution in index:
        text = distribution.text or ""
        # Declarations are checked only where one matters: with many plugins this is most of the cost.
        if f"[{DETECT}]" not in text or not any(environ.get(name) for name, _ in read_group(text, DETECT)):
            continue
        if pairs := [pair for pair in _declarations(distribution).variables if environ.get(pair[0], "").strip()]:
            found.append((find_plugins(distribution.load()), pairs))
    return found


def asked_environments(announced: Announced, scan: ScanResult) -> tuple[list[RegistryEntry], list[str]]:
    """Return the declared environments among the components of ``scan``, and a note for each that isn't there."""
    entries: dict[RegistryEntry, str] = {}
    notes = []
    for plugins, pairs in announced:
        owners = {plugin.distribution for plugin in plugins}
        records = [record for record in scan.records if record.distribution in owners]
        usable = [
            entry
            for record in records
            for entry in record.components
            if entry.kind == "cluster_environment" and not entry.problem
        ]
        names = " and ".join(dict.fromkeys(variable for variable, _ in pairs))
        unread = [record for record in records if record.status in ("broken", "incompatible")]
        notes += [f"{names} is set, which is to announce a cluster environment, but {record}" for record in unread]
        for variable, alias in pairs:
            meant = [entry for entry in usable if any(same_alias(alias, name) for name in entry.names)]
            entries |= {entry: entry.qualified_name for entry in meant}
            if not meant and all(record.status == "loaded" for record in records):
                known = {name for entry in usable for name in entry.names}
                problem = unknown_alias_problem(DETECT, variable, alias, "cluster_environment", known)
                notes.append(f"{', '.join(sorted(owners))}: {problem}")
    return sorted(entries, key=lambda entry: entries[entry]), notes


def adapting(index: Iterable[IndexedDistribution], packages: Collection[str]) -> Announced:
    """Return the distributions that declare a model adapter for one of ``packages``, with (package, alias) pairs."""
    found = []
    for distribution in index:
        if f"[{ADAPT}]" not in (distribution.text or ""):
            continue
        if pairs := [pair for pair in _declarations(distribution).packages if pair[0] in packages]:
            found.append((find_plugins(distribution.load()), pairs))
    return found


def automatic(
    index: Iterable[IndexedDistribution], selection: PluginFilter
) -> tuple[list[DiscoveredPlugin], list[tuple[str, str, str]]]:
    """Return the plugins whose manifests "auto" has to import, and what the others lack.

    Of the others (alias, distribution, reason) of each accelerator; not of a plugin that ``selection`` excludes.
    """
    wanted: list[DiscoveredPlugin] = []
    missing: list[tuple[str, str, str]] = []
    cached = functools.cache(why_missing)  # looking for a module takes longer than all the rest
    for distribution in index:
        modules = _declarations(distribution).modules
        reasons = [(alias, cached(module)) for alias, module in modules]
        if modules and all(reason for _, reason in reasons):
            named = read_group(distribution.text or "", PROJECT)
            if any(not selection.refusal(DiscoveredPlugin(name, distribution.name, None)) for name, _ in named):
                missing += [(alias, distribution.name, reason) for alias, reason in reasons]
        elif modules or _may_bring_one(distribution):
            wanted += find_plugins(distribution.load())
    return sorted(wanted, key=lambda plugin: (plugin.distribution, plugin.name)), missing


def bringing_defaults(index: Iterable[IndexedDistribution]) -> list[DiscoveredPlugin]:
    """Return the plugins of the distributions that declare a logger or a callback for every Trainer."""
    found: list[DiscoveredPlugin] = []
    for distribution in index:
        # most have no such group: a Trainer must not read what 500 plugins declare otherwise
        if _DEFAULTS_HEADER in (distribution.text or "") and _declarations(distribution).defaults:
            found += find_plugins(distribution.load())
    return sorted(found, key=lambda plugin: (plugin.distribution, plugin.name))


def declared_defaults(plugins: Iterable[DiscoveredPlugin], entries: Iterable[RegistryEntry]) -> list[RegistryEntry]:
    """Return those of ``entries`` that the metadata of their distribution declares."""
    declared = {
        (plugin.distribution, f"default_{kind}"): [alias for alias, of in plugin.declared.defaults if of == kind]
        for plugin in plugins
        if plugin.declared.defaults
        for kind in DEFAULT_KINDS
    }
    return [
        entry
        for entry in entries
        if any(
            same_alias(alias, name)
            for alias in declared.get((entry.distribution, entry.kind), ())
            for name in entry.names
        )
    ]


def _declarations(distribution: IndexedDistribution) -> Declarations:
    text = distribution.text or ""
    declares = any(f"[{group}]" in text for group in GROUPS[1:])
    return read_declarations(text) if declares else NO_DECLARATIONS


def _may_bring_one(distribution: IndexedDistribution) -> bool:
    if distribution.text is None:
        return True
    targets = [value for _, value in read_group(distribution.text, PROJECT)]
    hook = HOOKS["accelerator"]
    return any(may_implement(hook, target.partition(":")[0].strip(), distribution.folder) for target in targets)
