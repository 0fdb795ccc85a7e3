"""Turn the plugins that were found into records and into a table of the names they provide.

Plugins are isolated: any error of one while it is read, except Ctrl-C, is stored in its own record.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torchhal
from torchhal._terminal import printable
from torchhal.errors import BrokenPluginError, ComponentError, IncompatiblePluginError, PluginError
from torchhal.plugin import Component
from torchhal.registry._declarations import (
    ADAPT,
    ALIAS_FIRST,
    AUTO,
    DEFAULT_KINDS,
    DEFAULTS,
    DETECT,
    Declarations,
    same_alias,
    undeclared_default_problem,
    unknown_alias_problem,
)
from torchhal.registry._discovery import DiscoveredPlugin, PluginFilter, collect_components, describe, unmet_requirement
from torchhal.registry._entry import RegistryEntry

Imported = tuple[tuple[tuple[str, Component], ...], "str | None", str, "BaseException | None", float]
"""What importing a manifest gave: its components, file, why it failed, the error, and milliseconds."""

Imports = dict[tuple[str, str, str], Imported]
"""Distribution, name and value of an entry point -> what importing it gave: a manifest is imported once."""

STRICT: Final = "TORCHHAL_STRICT_PLUGINS"

Names = dict[tuple[str, str], tuple[RegistryEntry, ...]]
"""(kind, name) -> the entries of that name, the unusable ones too."""


@dataclass(frozen=True, eq=False)
class PluginRecord:
    """The status of one plugin.

    Attributes:
        name: of its entry point.
        distribution: that it came with.
        version: of the distribution; None when its metadata can't be read.
        status: ``"loaded"``; ``"disabled"`` by the environment; ``"incompatible"`` with this torchhal; ``"broken"``.
            :meth:`Registry.installed`, which imports nothing, returns ``"found"`` where metadata determine no more.
        reason: why it isn't loaded, or an empty string.
        file: of the manifest, where known.
        load_ms: time its import and hooks took; None when it wasn't imported.
        components: what it provides, the unusable ones with their :attr:`.RegistryEntry.problem`.
        problems: declarations in its distribution's metadata that are ignored, one line each; they cost nothing else.
    """

    name: str
    distribution: str
    version: str | None
    status: str
    reason: str = ""
    file: str | None = None
    load_ms: float | None = None
    components: tuple[RegistryEntry, ...] = ()
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the data that ``torchhal plugins --json`` prints."""
        fields = ("name", "distribution", "version", "status", "reason", "file", "load_ms")
        return {
            **{name: getattr(self, name) for name in fields},
            "components": [entry.to_dict() for entry in self.components],
            **({"problems": list(self.problems)} if self.problems else {}),
        }

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else ""
        reason = f": {self.reason}" if self.reason else ""
        return printable(f"plugin {self.name!r} ({self.distribution}{version}) is {self.status}{reason}")


@dataclass(frozen=True)
class ScanResult:
    """The outcome of reading all plugins. ``failure`` is what strict mode raises."""

    records: tuple[PluginRecord, ...]
    by_name: Names
    failure: PluginError | None


def is_strict(environ: Mapping[str, str]) -> bool:
    """Return whether a plugin that can't be used is an error."""
    value = environ.get(STRICT, "")
    return bool(value.strip()) and not is_off(value)


def is_off(value: str) -> bool:
    """Return whether a variable of the environment says no; an empty one says nothing."""
    return value.strip().lower() in ("0", "false", "no", "off")


def read_plugins(
    found: Iterable[DiscoveredPlugin],
    selection: PluginFilter,
    *,
    reserved: Container[tuple[str, str]],
    strict: bool,
    imports: Imports,
) -> ScanResult:
    """Read every plugin that isn't excluded.

    Args:
        found: the plugins; all those of a distribution, or none.
        selection: the environment's lists.
        reserved: the (kind, name) pairs of core.
        strict: the first plugin that can't be used is a failure.
        imports: manifests that were imported before; those imported now are added.
    """
    records: list[PluginRecord] = []
    by_name: Names = {}
    failure: PluginError | None = None
    found = list(found)
    declared = {plugin.distribution: plugin.declared for plugin in reversed(found)}
    for plugin in found:
        cause = None
        record = plugin_status(plugin, selection)
        if record.status == "found":
            record, cause = _load(plugin, record, by_name, reserved, imports, declared[plugin.distribution])
        records.append(record)
        if strict and failure is None and (failure := _failure(record)):
            failure.__cause__ = cause
    problems = [_unknown_aliases(plugin, records) for plugin in found]
    for lines, record in zip(problems, records, strict=True):
        lines += _undeclared_defaults(record, declared[record.distribution])
    records = [
        replace(r, problems=(*r.problems, *more)) if more else r for r, more in zip(records, problems, strict=True)
    ]
    return ScanResult(tuple(records), by_name, failure)


def _unknown_aliases(plugin: DiscoveredPlugin, records: Iterable[PluginRecord]) -> list[str]:
    """Return the problems of declarations whose alias the plugin's distribution doesn't have."""
    own = [record for record in records if record.distribution == plugin.distribution]
    declared = plugin.declared
    pairs_of = (declared.variables, declared.modules, declared.packages, declared.defaults)
    if not any(pairs_of) or any(r.status != "loaded" for r in own):
        return []
    entries = [entry for record in own for entry in record.components if not entry.problem]
    lines = []
    for group, kind, pairs in (
        (DETECT, "cluster_environment", declared.variables),
        (AUTO, "accelerator", declared.modules),
        (ADAPT, "model_adapter", declared.packages),
        *(
            (DEFAULTS, f"default_{kind}", [pair for pair in declared.defaults if pair[1] == kind])
            for kind in DEFAULT_KINDS
        ),
    ):
        known = {name for entry in entries if entry.kind == kind for name in entry.names}
        for name, value in pairs:
            if not any(same_alias(name if group in ALIAS_FIRST else value, alias) for alias in known):
                lines.append(unknown_alias_problem(group, name, value, kind, known))
    return lines


def _undeclared_defaults(record: PluginRecord, declared: Declarations) -> list[str]:
    """Return the problems of defaults that no Trainer has, as the distribution's metadata doesn't declare them."""
    return [
        undeclared_default_problem(entry.component.alias, kind)
        for entry in record.components
        for kind in DEFAULT_KINDS
        if entry.kind == f"default_{kind}"
        and not entry.problem
        and not any(of == kind and same_alias(name, alias) for name, of in declared.defaults for alias in entry.names)
    ]


def plugin_status(plugin: DiscoveredPlugin, selection: PluginFilter) -> PluginRecord:
    """Return the status of ``plugin`` by its metadata and the environment; ``"found"`` when neither excludes it."""
    status, reason = "found", ""
    if refusal := selection.refusal(plugin):
        status, reason = "disabled", refusal
    elif plugin.problem:
        status, reason = "broken", plugin.problem
    else:
        try:
            if unmet := unmet_requirement(plugin.requires, torchhal.__version__):
                status, reason = "incompatible", unmet
        except Exception as error:
            status, reason = "broken", f"its requirement on torchhal can't be read: {describe(error)}"
    problems = plugin.declared.problems
    return PluginRecord(
        plugin.name, plugin.distribution, plugin.version, status, reason, plugin.file, problems=problems
    )


def _load(
    plugin: DiscoveredPlugin,
    record: PluginRecord,
    by_name: Names,
    reserved: Container[tuple[str, str]],
    imports: Imports,
    declared: Declarations,
) -> tuple[PluginRecord, BaseException | None]:
    """Import the manifest, unless that was done before, and add its components to ``by_name``."""
    assert plugin.entry_point is not None
    key = (plugin.distribution, plugin.name, plugin.entry_point.value)
    if key not in imports:
        imports[key] = _import(plugin)
    pairs, file, reason, cause, load_ms = imports[key]
    entries = []
    for kind, component in pairs:
        entry = RegistryEntry(kind, component, plugin.name, plugin.distribution)
        announcing = declared.announcing(entry.names) if kind == "cluster_environment" else ()
        entry = replace(entry, problem=_problem(entry, by_name, reserved), variables=announcing)
        entries.append(entry)
        for name in entry.names:
            by_name[kind, name] = (*by_name.get((kind, name), ()), entry)
    status = "broken" if cause else "loaded"
    return replace(record, status=status, reason=reason, file=file, load_ms=load_ms, components=tuple(entries)), cause


def _import(plugin: DiscoveredPlugin) -> Imported:
    assert plugin.entry_point is not None
    pairs: list[tuple[str, Component]] = []
    file, reason, cause = plugin.file, "", None
    start = time.perf_counter()
    try:
        manifest = plugin.entry_point.load()
        file = getattr(manifest, "__file__", None) or file
        pairs = collect_components(manifest)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, CancelledError and RecursionError as well
        cause, reason = error, printable(str(error)) if type(error) is BrokenPluginError else describe(error)
    return tuple(pairs), file, reason, cause, round((time.perf_counter() - start) * 1000, 3)


def _problem(entry: RegistryEntry, by_name: Names, reserved: Container[tuple[str, str]]) -> str:
    try:
        if reason := entry.component.problem(entry.kind):
            return reason
    except Exception as error:
        return f"its record can't be checked: {describe(error)}"
    for name in entry.names:
        if (entry.kind, name) in reserved:
            return f"the alias {name!r} is core's own"
        for other in by_name.get((entry.kind, name), ()):
            if other.distribution == entry.distribution and not other.problem:
                return f"its distribution already has another component with the alias {name!r}"
    return ""


def _failure(record: PluginRecord) -> PluginError | None:
    """Return the error that strict mode raises for ``record``."""
    if record.status == "broken":
        return BrokenPluginError(str(record))
    if record.status == "incompatible":
        return IncompatiblePluginError(str(record))
    for entry in record.components:
        if entry.problem:
            return ComponentError(f"{entry} can't be used: {entry.problem}")
    return None
