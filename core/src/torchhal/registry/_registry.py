"""Look up components by kind and alias: built in, from plugins, registered by user code.

Built-in components are found without a scan. The first alias that isn't built in reads the metadata of all
installed distributions and imports the manifests of plugins among them, once; failures are stored with
their reason until :func:`refresh`. Detection and ``accelerator="auto"`` import only the manifests that metadata
announce. Nothing here imports torch or the module of a part.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from torchhal.errors import AmbiguousAliasError, ComponentError, ConfigurationError, PluginError, UnknownAliasError
from torchhal.plugin import HOOKS, KINDS, Component
from torchhal.registry._announced import (
    AutoAccelerators,
    adapting,
    announced,
    asked_environments,
    automatic,
    bringing_defaults,
    declared_defaults,
)
from torchhal.registry._declarations import same_alias
from torchhal.registry._discovery import (
    CORE,
    USER,
    DiscoveredPlugin,
    PluginFilter,
    canonical,
    collect_components,
    find_plugins,
    metadata_fingerprint,
)
from torchhal.registry._entry import RegistryEntry, class_problem
from torchhal.registry._hints import COMMANDS, DISTRIBUTIONS, meant_by
from torchhal.registry._metadata_index import IndexedDistribution, index_distributions, index_installed
from torchhal.registry._plugin_loader import (
    Imports,
    PluginRecord,
    ScanResult,
    is_off,
    is_strict,
    plugin_status,
    read_plugins,
)
from torchhal.suggestions import nearest, one_of

if TYPE_CHECKING:
    from importlib_metadata import Distribution

HINTED: Final = ("accelerator", "strategy", "logger", "command")  # kinds of the aliases in _hints
DEFAULTS: Final = "TORCHHAL_DEFAULTS"

_T = TypeVar("_T", bound=type)


class Registry:
    """Parts by kind and alias: built in, from plugins, registered by user code.

    Args:
        distributions: gives the distributions to look for plugins in, afresh for each scan; default: all that are
            installed.
        environ: where the TORCHHAL_* variables are read at each scan; default: ``os.environ``.
    """

    def __init__(
        self,
        *,
        distributions: Callable[[], Iterable[Distribution]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._distributions = distributions
        self._environ = os.environ if environ is None else environ
        self._core: dict[tuple[str, str], RegistryEntry] = {}
        self._user: dict[tuple[str, str], RegistryEntry] = {}
        self._scan: ScanResult | None = None
        self._imports: Imports = {}
        self._index: list[IndexedDistribution] | None = None
        self._of_defaults: list[DiscoveredPlugin] | None = None
        self._metadata: frozenset[tuple[str, int]] = frozenset()  # as it was when the scan began
        self._lock = threading.Lock()
        self._scanner: int | None = None  # the thread that is importing manifests

    # -- what exists -----------------------------------------------------------------------------------------

    def plugins(self) -> list[PluginRecord]:
        """Return every installed plugin, sorted by distribution and name.

        Raises:
            PluginError: under ``TORCHHAL_STRICT_PLUGINS=1``, for the first that isn't sound.
        """
        self._not_from_a_manifest("plugins()")
        return list(self._scanned().records)

    def installed(self) -> list[PluginRecord]:
        """Return what :meth:`plugins` does, from metadata alone: imports no plugin, and lists no components."""
        selection = PluginFilter.read(self._environ)
        return [plugin_status(plugin, selection) for plugin in self._find_plugins()]

    def entries(self, kind: str) -> list[RegistryEntry]:
        """Return every usable part of ``kind``: the built-in ones, then the others by qualified name."""
        self._not_from_a_manifest(f"entries({kind!r})")
        _check_kind(kind)
        return self._sorted(kind, self._scanned())

    def _sorted(self, kind: str, scan: ScanResult | None) -> list[RegistryEntry]:
        """Return the usable components of ``kind``: core's, then the user's and those of ``scan`` by qualified name."""
        # One entry stands in the tables once for each of its names.
        core = dict.fromkeys(entry for (of, _), entry in self._built_in().items() if of == kind)
        others = {entry: entry.qualified_name for (of, _), entry in self._user.items() if of == kind}
        for (of, _), found in () if scan is None else scan.by_name.items():
            if of == kind:
                others |= {entry: entry.qualified_name for entry in found if not entry.problem}
        return [*core, *sorted(others, key=lambda entry: others[entry])]

    # -- what metadata announce ------------------------------------------------------------------------------

    def announced_environments(self) -> tuple[list[RegistryEntry], list[str]]:
        """Return the cluster environments to ask whether they started this process, and notes about broken ones.

        These are the built-in ones, registered classes, and those of plugins for which a variable is set that their
        distribution declares in ``torchhal.detect``. The manifests of no other distributions are imported.

        Raises:
            PluginError: as :meth:`plugins`, for the plugins that are read.
        """
        self._not_from_a_manifest("announced_environments()")
        entries: list[RegistryEntry] = []
        notes: list[str] = []
        if asked := announced(self._indexed(), os.environ):
            scan = self._read([plugin for plugins, _ in asked for plugin in plugins])
            entries, notes = asked_environments(asked, scan)
        return [*self._sorted("cluster_environment", None), *entries], notes

    def auto_accelerators(self) -> AutoAccelerators:
        """Return the accelerators that ``accelerator="auto"`` asks.

        These are the built-in ones, registered classes, and those of plugins whose distribution declares in
        ``torchhal.auto`` a module that is there; or declares nothing, unless the source of its manifest shows that it
        brings no accelerator. The manifests of no other distributions are imported.

        Raises:
            PluginError: as :meth:`plugins`, for the plugins that are read.
        """
        self._not_from_a_manifest("auto_accelerators()")
        selection = PluginFilter.read(self._environ)
        plugins, missing = automatic(self._indexed(), selection)
        scan = self._read(plugins) if plugins else None
        return AutoAccelerators(self._sorted("accelerator", scan), list(scan.records) if scan else [], missing)

    def adapter_of(self, packages: Collection[str]) -> RegistryEntry | None:
        """Return the model adapter that is declared for classes of one of ``packages``, or None.

        The manifests of no other distributions are imported.

        Raises:
            AmbiguousAliasError: several are declared.
            PluginError: the plugin that declares one can't be used.
        """
        self._not_from_a_manifest(f"adapter_of({sorted(packages)!r})")
        found: dict[str, RegistryEntry] = {}
        for entry in self._user.values():
            if entry.kind == "model_adapter" and entry.component.alias in packages:
                return entry
        if not (declared := adapting(self._indexed(), packages)):
            return None
        scan = self._read([plugin for plugins, _ in declared for plugin in plugins])
        aliases = {
            plugin.distribution: [alias for _, alias in pairs] for plugins, pairs in declared for plugin in plugins
        }
        for record in scan.records:
            own = aliases[record.distribution]
            found |= {
                entry.qualified_name: entry
                for entry in record.components
                if entry.kind == "model_adapter"
                and not entry.problem
                and any(same_alias(alias, name) for alias in own for name in entry.names)
            }
        if len(found) == 1:
            return next(iter(found.values()))
        named = " and ".join(sorted(dict.fromkeys(package for _, pairs in declared for package, _ in pairs)))
        if found:
            raise AmbiguousAliasError(
                f"classes of {named} are adapted by {len(found)} plugins, {' and '.join(sorted(found))}: uninstall "
                "all but one, or exclude them by TORCHHAL_PLUGINS",
                kind="model_adapter",
                alias=named,
                candidates=sorted(found),
            )
        if all(record.status == "disabled" for record in scan.records):
            return None
        raise PluginError(f"classes of {named} need a model adapter, and {'; '.join(map(str, scan.records))}")

    def defaults(self) -> tuple[list[RegistryEntry], list[str]]:
        """Return the loggers and callbacks that every Trainer has, and notes on plugins that may bring one and can't.

        They are declared in the group ``torchhal.defaults`` of their plugin's metadata; no other manifest is imported.
        None with ``TORCHHAL_DEFAULTS=0``.

        Raises:
            PluginError: as :meth:`plugins`, for the plugins that are read.
        """
        self._not_from_a_manifest("defaults()")
        if is_off(self._environ.get(DEFAULTS, "")):
            return [], []
        if self._of_defaults is None:
            self._of_defaults = bringing_defaults(self._indexed())
        scan = self._read(self._of_defaults) if self._of_defaults else None
        entries = [entry for kind in ("default_logger", "default_callback") for entry in self._sorted(kind, scan)]
        records = scan.records if scan else ()
        return declared_defaults(self._of_defaults, entries), [
            str(record) for record in records if record.status in ("broken", "incompatible")
        ]

    def find_known(self, kind: str, alias: str) -> RegistryEntry | None:
        """Return what :meth:`find` does for a built-in component or a registered class; None where it needs plugins."""
        _check_kind(kind)
        owner, slash, name = alias.rpartition("/")
        key, of = (kind, name.lower()), canonical(owner) if slash else None
        if of in (None, CORE) and (core := self._built_in().get(key)):
            return core
        return self._user.get(key) if of in (None, USER) else None

    def aliases(self, kind: str) -> list[str]:
        """Return every name that :meth:`find` resolves for ``kind``, sorted; a qualified one for a contested alias."""
        self._not_from_a_manifest(f"aliases({kind!r})")
        owners: dict[str, list[RegistryEntry]] = {}
        for entry in self.entries(kind):
            for name in entry.names:
                owners.setdefault(name, []).append(entry)
        return sorted(
            label
            for name, entries in owners.items()
            for label in ([name] if len(entries) == 1 else [f"{entry.distribution}/{name}" for entry in entries])
        )

    # -- look-up ---------------------------------------------------------------------------------------------

    def find(self, kind: str, alias: str) -> RegistryEntry:
        """Return the component of ``kind`` called ``alias``, without case; ``distribution/alias`` names its owner too.

        Raises:
            UnknownAliasError: nothing provides it. The message lists what exists and what to install.
            AmbiguousAliasError: several plugins do.
            ComponentError: it is provided, but only by a record that can't be used.
            PluginError: called by a manifest while it is imported.
        """
        self._not_from_a_manifest(f"find({kind!r}, {alias!r})")
        _check_kind(kind)
        if not isinstance(alias, str):
            raise TypeError(f"'alias' must be a str (got {alias!r})")
        owner, slash, name = alias.rpartition("/")
        candidates = self._candidates((kind, name.lower()), canonical(owner) if slash else None)
        sound = [entry for entry in candidates if not entry.problem]
        if len(sound) == 1:
            return sound[0]
        label = kind.replace("_", " ")
        if sound:
            names = [f"{entry.distribution}/{name.lower()}" for entry in sound]
            listed = " and ".join(map(repr, names))
            raise AmbiguousAliasError(
                f"the {label} {alias!r} is provided by {len(sound)} plugins: write one of {listed}",
                kind=kind,
                alias=alias,
                candidates=names,
            )
        if candidates:
            raise ComponentError("; ".join(f"{entry} can't be used: {entry.problem}" for entry in candidates))
        raise UnknownAliasError(self._unknown(kind, alias), kind=kind, alias=alias)

    def _candidates(self, key: tuple[str, str], owner: str | None) -> list[RegistryEntry]:
        if owner in (None, CORE) and (core := self._built_in().get(key)):
            return [core]
        user = [self._user[key]] if owner in (None, USER) and key in self._user else []
        if owner in (CORE, USER):
            return user
        found = self._scanned().by_name.get(key, ())
        return user + [entry for entry in found if owner in (None, canonical(entry.distribution))]

    def _unknown(self, kind: str, alias: str) -> str:
        known, scan = self.aliases(kind), self._scanned()
        label, name = kind.replace("_", " "), alias.lower()
        # an alias with a suffix of its own family adds nothing to the shorter one
        shown = [one for one in known if not any(one.startswith(f"{other}_find_unused") for other in known)]
        lines = [f"no {label} is called {alias!r}; there are {', '.join(map(repr, shown)) or 'none'}"]
        if alias == "auto":
            lines.append("'auto' is no alias: it asks torchhal.resolve to choose")
        if others := [other.replace("_", " ") for other in KINDS if other != kind and name in self.aliases(other)]:
            lines.append(f"{alias!r} is the alias of a part of another kind: {' and '.join(others)}")
        absent = self._absent(scan, kind)
        device, _, index = name.partition(":")
        if kind == "accelerator" and index.isdigit():
            lines.append(f"write accelerator={device!r}, devices=[{index}]")
        elif meant := meant_by(kind, name):
            install = dict.fromkeys(absent[alias] for alias in meant if alias in absent)
            lines.append(f"did you mean {one_of(meant)}?{f' (pip install {chr(32).join(install)})' if install else ''}")
        elif name not in absent and not others:
            if near := nearest(name, known):
                lines.append(f"did you mean {near!r}?")
            elif kind in HINTED and (near := nearest(name, absent)):
                lines.append(f"did you mean {near!r}? (pip install {absent[near]})")
        return "\n".join([*lines, *self.why_unknown(alias, kind)])

    @staticmethod
    def _absent(scan: ScanResult, kind: str) -> dict[str, str]:
        """Return first-party aliases whose distribution isn't installed, with its name."""
        present = {canonical(record.distribution) for record in scan.records}
        hints = COMMANDS if kind == "command" else DISTRIBUTIONS
        return {hint: owner for hint, owner in hints.items() if owner not in present}

    def why_unknown(self, alias: str, kind: str = "strategy") -> list[str]:
        """Return lines for an error about a name that nothing provides: what to install, and which plugins failed."""
        scan, lines = self._scanned(), []
        if owner := self._absent(scan, kind).get(alias.lower()):
            lines.append(f"{alias!r} comes with {owner}: pip install {owner}")
        lines += [str(record) for record in scan.records if record.status != "loaded"]
        if self._metadata != metadata_fingerprint():
            lines.append(
                "distributions have been installed or removed since plugins were looked for: "
                "torchhal.registry.refresh() looks again"
            )
        return lines

    # -- user code -------------------------------------------------------------------------------------------

    @overload
    def register(
        self, kind: str, alias: str, cls: _T, *, summary: str = "", defaults: Mapping[str, Any] | None = None
    ) -> _T: ...
    @overload
    def register(
        self, kind: str, alias: str, cls: None = None, *, summary: str = "", defaults: Mapping[str, Any] | None = None
    ) -> Callable[[_T], _T]: ...
    def register(
        self,
        kind: str,
        alias: str,
        cls: Any = None,
        *,
        summary: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give a class of user code an alias; ``user/alias`` names it too. Returns ``cls``; without it, a decorator.

        A class of the same module and name replaces the one registered before, as when a notebook cell is run
        again.

        Raises:
            TypeError, ValueError: a wrong ``kind``, ``alias``, ``cls`` or ``defaults``.
            ConfigurationError: (a ValueError) the alias is one of core's, or another class has it.
            PluginError: called by a manifest, which contributes through hooks instead.
        """
        if self._scanner == threading.get_ident():
            hook = HOOKS.get(kind, "torchhal_strategies")
            raise PluginError(
                f"a manifest can't register({kind!r}, {alias!r}): it contributes what {hook}() returns, "
                "a function marked with torchhal.plugin.hookimpl"
            )
        _check_kind(kind)
        if cls is None:
            return lambda decorated: self.register(kind, alias, decorated, summary=summary, defaults=defaults)
        if reason := class_problem(kind, cls):
            raise TypeError(f"'cls' {reason}")
        component = Component(
            alias, f"{cls.__module__}:{cls.__qualname__}", summary, {} if defaults is None else defaults
        )
        # A class made in a function has no target that could be imported, but it is never imported.
        if problem := replace(component, target="user:Class").problem(kind):
            raise ValueError(problem)
        key = (kind, alias)
        if key in self._built_in():
            raise ConfigurationError(f"the {kind.replace('_', ' ')} alias {alias!r} is core's own: choose another")
        if (before := self._user.get(key)) and before.component.target != component.target:
            raise ConfigurationError(
                f"the {kind.replace('_', ' ')} alias {alias!r} is registered already, for {before.component.target}"
            )
        self._user[key] = RegistryEntry(kind, component, USER, USER, _class=[cls])
        return cls

    def refresh(self) -> None:
        """Clear the scan's results: the next look-up that needs plugins scans again.

        Finds what was installed into this process's environment since. A module that Python has imported already
        stays as it is, so an upgraded plugin needs a new process. What user code registered is kept too.
        """
        self._not_from_a_manifest("refresh()")
        with self._lock:
            importlib.invalidate_caches()
            self._scan = self._index = self._of_defaults = None
            self._imports = {}

    # -- the scan --------------------------------------------------------------------------------------------

    def _built_in(self) -> dict[tuple[str, str], RegistryEntry]:
        if not self._core:
            from torchhal.registry import _builtin as builtin

            entries = [RegistryEntry(kind, component, CORE, CORE) for kind, component in collect_components(builtin)]
            self._core = {(entry.kind, name): entry for entry in entries for name in entry.names}
        return self._core

    def _not_from_a_manifest(self, call: str) -> None:
        if self._scanner == threading.get_ident():
            raise PluginError(
                f"{call} was called by a plugin's manifest while plugins are being looked for: "
                "a manifest only describes its components, it can't ask for others"
            )

    def _scanned(self) -> ScanResult:
        unmatched: list[str] = []
        with self._lock:
            scan = self._scan
            if scan is None:
                with self._scanning():
                    metadata = metadata_fingerprint()
                    found, selection = self._find_plugins(), PluginFilter.read(self._environ)
                    scan = self._read_manifests(found, selection)
                    unmatched = selection.unmatched(found)
                self._scan, self._metadata = scan, metadata
        for line in unmatched:  # only now: a filter may turn the warning into an error
            warnings.warn(line)
        return _raised(scan)

    def _read(self, found: list[DiscoveredPlugin]) -> ScanResult:
        """Read some distributions' plugins; what was imported is not imported again by the scan of all."""
        with self._lock, self._scanning():
            return _raised(self._read_manifests(found, PluginFilter.read(self._environ)))

    def _read_manifests(self, found: list[DiscoveredPlugin], selection: PluginFilter) -> ScanResult:
        strict = is_strict(self._environ)
        return read_plugins(found, selection, reserved=self._built_in(), strict=strict, imports=self._imports)

    @contextmanager
    def _scanning(self) -> Iterator[None]:
        self._scanner = threading.get_ident()
        try:
            yield
        finally:
            self._scanner = None

    def _indexed(self) -> list[IndexedDistribution]:
        with self._lock:
            if self._index is None:
                given = self._distributions
                self._index = index_installed() if given is None else index_distributions(given())
            return self._index

    def _find_plugins(self) -> list[DiscoveredPlugin]:
        return find_plugins(None if self._distributions is None else self._distributions())


def _raised(scan: ScanResult) -> ScanResult:
    if scan.failure is not None:
        raise scan.failure.with_traceback(None)
    return scan


def _check_kind(kind: str) -> None:
    if kind not in HOOKS:
        raise ValueError(f"'kind' must be one of {', '.join(map(repr, HOOKS))} (got {kind!r})")
