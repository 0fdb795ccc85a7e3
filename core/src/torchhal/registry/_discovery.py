"""Find the plugins installed beside torchhal and read what their manifests contribute.

Everything about a plugin comes from its metadata until the environment's lists and its requirement on torchhal have
been checked; only then is its manifest imported and handed to :func:`collect_components`.
``importlib_metadata`` and ``packaging`` are imported inside the functions that need them: a built-in alias is
looked up without them.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import pluggy

from torchhal._terminal import printable
from torchhal.errors import BrokenPluginError
from torchhal.plugin import HOOKS, PROJECT, Component, Hookspecs
from torchhal.registry._declarations import (
    GROUPS,
    NO_DECLARATIONS,
    Declarations,
    has_group,
    has_group_bytes,
    only_declarations_malformed,
    read_declarations,
    read_group,
)
from torchhal.suggestions import did_you_mean

if TYPE_CHECKING:
    from importlib_metadata import Distribution, EntryPoint

CORE: Final = "torchhal"
USER: Final = "user"
"""Owners of the built-in parts and of what user code registers; no plugin's distribution may be called so."""

_REQUIREMENT_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def canonical(name: str) -> str:
    """Return ``name`` of a plugin or distribution in the spelling that PEP 503 gives it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- metadata ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiscoveredPlugin:
    """A plugin as described by its distribution's metadata. ``problem``: why they can't be used, or empty.

    ``declared`` is the distribution's; of several plugins in one distribution the first has it.
    """

    name: str
    distribution: str
    version: str | None
    requires: tuple[str, ...] = ()
    entry_point: EntryPoint | None = None
    file: str | None = None
    problem: str = ""
    declared: Declarations = NO_DECLARATIONS

    def answers_to(self, names: Iterable[str]) -> bool:
        """Return whether one of ``names`` (canonical, or ``*``) matches this plugin or its distribution."""
        return not {"*", canonical(self.name), canonical(self.distribution)}.isdisjoint(names)


def find_plugins(distributions: Iterable[Distribution] | None = None) -> list[DiscoveredPlugin]:
    """Return every plugin among ``distributions`` (default: all installed), sorted by distribution and name.

    ``importlib_metadata.entry_points()`` raises for the whole environment on one unreadable file, so this goes
    distribution by distribution, and an unreadable file affects only its own distribution. Of several distributions
    with one name the first that has metadata counts: it is the one that gets imported.
    """
    if distributions is None:
        import importlib_metadata

        distributions = cast("Iterable[Distribution]", importlib_metadata.distributions())
    by_name: dict[str, list[Distribution]] = {}
    for distribution in distributions:
        # "~orchhal_x-1.0.dist-info" is what an interrupted pip leaves behind.
        if (name := _name(distribution)) and not name.startswith("~"):
            by_name.setdefault(name, []).append(distribution)
    found = [plugin for name, same in by_name.items() for plugin in _read(name, _first_valid(same))]
    return sorted(found, key=lambda plugin: (canonical(plugin.distribution), plugin.name))


def _name(distribution: Distribution) -> str:
    # The name by which importlib itself distinguishes distributions; it comes from the folder's name, where it can.
    try:
        return canonical(getattr(distribution, "_normalized_name", None) or distribution.name)
    except Exception:
        return ""


def _first_valid(same: list[Distribution]) -> Distribution:
    # A folder without METADATA is what is left of an uninstalled version; importlib prefers any other.
    if len(same) > 1:
        for distribution in same:
            try:
                if distribution.read_text("METADATA") or distribution.read_text("PKG-INFO"):
                    return distribution
            except Exception:
                return distribution
    return same[0]


def _read(name: str, distribution: Distribution) -> Iterator[DiscoveredPlugin]:
    try:
        text = distribution.read_text("entry_points.txt") or ""
        if not has_group(text):
            return
        entry_points = sorted(_entry_points(distribution, text), key=lambda p: (p.name, p.value))
    except Exception as error:
        # The undecodable bytes still show whether this is a plugin.
        if not isinstance(error, UnicodeDecodeError) or has_group_bytes(error.object):
            yield DiscoveredPlugin(name, name, None, problem=f"its entry_points.txt can't be read: {describe(error)}")
        return
    try:
        metadata = distribution.metadata
        label, version = metadata["Name"], metadata["Version"]
        if not label or not version:
            raise ValueError("no Name or no Version")
        # An egg-info keeps its requirements in a separate file, which only `requires` reads.
        requires = tuple(metadata.get_all("Requires-Dist") or distribution.requires or ())
    except Exception as error:
        for plugin in [point.name for point in entry_points] or [name]:
            yield DiscoveredPlugin(plugin, name, None, problem=f"its METADATA can't be read: {describe(error)}")
        return
    declared = read_declarations(text)
    if not entry_points:
        groups = " and ".join(f"[{group}]" for group in GROUPS[1:] if f"[{group}]" in text)
        problem = f"its entry_points.txt has {groups}, but no plugin in [{PROJECT}]"
        yield DiscoveredPlugin(label, label, version, requires, problem=problem, declared=declared)
    previous = None
    for point in entry_points:
        problem = ""
        if canonical(label) in (CORE, USER):
            problem = f"a distribution called {label!r} can't provide plugins: '{canonical(label)}/...' has a meaning"
        elif point.name == previous:
            problem = f"its entry_points.txt gives {point.name!r} twice, here as {point.value!r}"
        file = _manifest_file(distribution, point)
        yield DiscoveredPlugin(point.name, label, version, requires, point, file, problem, declared)
        declared = NO_DECLARATIONS
        previous = point.name


def _entry_points(distribution: Distribution, text: str) -> set[EntryPoint]:
    """Return the entry points of manifests; a malformed declaration for detection is no error of theirs."""
    try:
        return {point for point in distribution.entry_points if point.group == PROJECT}
    except Exception:
        if not only_declarations_malformed(text):
            raise
    from importlib_metadata import EntryPoint

    return {EntryPoint(name=name, value=value, group=PROJECT) for name, value in read_group(text, PROJECT)}


def _manifest_file(distribution: Distribution, point: EntryPoint) -> str | None:
    # Where the manifest should be, for a record of one that can't be imported. An editable install has it elsewhere.
    try:
        path = point.module.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (located := distribution.locate_file(candidate)).exists():
                return str(located)
    except Exception:
        pass
    return None


def unmet_requirement(requires: Iterable[str], version: str) -> str:
    """Return which of the ``Requires-Dist`` values torchhal at ``version`` does not satisfy here, or "".

    Raises:
        packaging.requirements.InvalidRequirement: for a requirement on torchhal that can't be parsed; one on
            anything else isn't looked at.
    """
    for text in requires:
        match = _REQUIREMENT_NAME.match(text)
        if not match or canonical(match[1]) != PROJECT:
            continue
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        # Without prereleases=True a development core would satisfy no requirement.
        if not requirement.specifier.contains(version, prereleases=True):
            return f"it requires torchhal{requirement.specifier}, this is torchhal {version}"
    return ""


def metadata_fingerprint() -> frozenset[tuple[str, int]]:
    """Return the metadata folders on sys.path with their times: a changed value means that something was installed."""
    seen = set()
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as items:
                for item in items:
                    if item.name.endswith((".dist-info", ".egg-info")):
                        seen.add((item.path, item.stat().st_mtime_ns))
        except OSError:  # a zip file, or nothing
            continue
    return frozenset(seen)


# -- the environment's lists ---------------------------------------------------------------------------------

ALLOW: Final = "TORCHHAL_PLUGINS"
DENY: Final = "TORCHHAL_DISABLE_PLUGINS"


@dataclass(frozen=True)
class PluginFilter:
    """The plugins that the environment allows; ``allow`` is None when all are."""

    allow: frozenset[str] | None
    deny: frozenset[str]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PluginFilter:
        allow = environ.get(ALLOW)
        return cls(None if allow is None else _names(allow), _names(environ.get(DENY, "")))

    def refusal(self, plugin: DiscoveredPlugin) -> str:
        """Return why ``plugin`` is excluded, or an empty string."""
        if plugin.answers_to(self.deny):
            return f"{DENY} names it"
        if self.allow is not None and not plugin.answers_to(self.allow):
            return f"{ALLOW} doesn't name it" if self.allow else f"{ALLOW} is empty"
        return ""

    def unmatched(self, plugins: Iterable[DiscoveredPlugin]) -> list[str]:
        """Return one line for each name in a list that matches no installed plugin."""
        plugins = list(plugins)
        return [
            f"{variable} names {name!r}, which is no installed plugin or distribution of one"
            for variable, names in ((ALLOW, self.allow or frozenset()), (DENY, self.deny))
            for name in sorted(names - {"*"})
            if not any(plugin.answers_to({name}) for plugin in plugins)
        ]


def _names(value: str) -> frozenset[str]:
    return frozenset(canonical(item.strip()) for item in value.split(",") if item.strip())


# -- manifests -----------------------------------------------------------------------------------------------


def collect_components(manifest: object) -> list[tuple[str, Component]]:
    """Return the ``(kind, component)`` pairs that the hooks of ``manifest`` return.

    Each manifest has its own plugin manager: registrations and errors of one don't affect another.

    Raises:
        BrokenPluginError: for a hook that torchhal doesn't have or that isn't marked, arguments it doesn't pass,
            wrappers and orderings, a result that is no list of :class:`Component`, and for nothing at all.
        BaseException: any error of a hook.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hookspecs)
    _check_hooks(manager, manifest)
    manager.register(manifest)
    pairs = [(kind, component) for kind, hook in HOOKS.items() for component in _call(getattr(manager.hook, hook))]
    if not pairs:
        raise BrokenPluginError(f"its manifest contributes nothing{_near_misses(manifest)}")
    return pairs


def _check_hooks(manager: pluggy.PluginManager, manifest: object) -> None:
    for name in dir(manifest):
        options: Any = manager.parse_hookimpl_opts(manifest, name)
        value = inspect.getattr_static(manifest, name, None)
        if options is None:
            if name in HOOKS.values():
                raise BrokenPluginError(
                    f"{_where(value, name)} is not marked with torchhal.plugin.hookimpl"
                    if inspect.isroutine(value)
                    else f"{name!r} must be a function marked with torchhal.plugin.hookimpl (got a {_type(value)})"
                )
            continue
        for option in ("hookwrapper", "wrapper", "tryfirst", "trylast"):
            if options.get(option):
                # A wrapper could drop the results of others, and the order of plugins has no meaning.
                raise BrokenPluginError(f"{_where(value, name)} asks for {option!r}: a manifest only contributes")
        hook = options.get("specname") or name
        if hook not in HOOKS.values():
            if options.get("optionalhook"):
                continue
            raise BrokenPluginError(f"{_where(value, name)} is no hook of torchhal{did_you_mean(hook, HOOKS.values())}")
        known = set(inspect.signature(getattr(Hookspecs, hook)).parameters) - {"self"}
        signature = inspect.signature(getattr(manifest, name))
        if extra := [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.name not in known
        ]:
            raise BrokenPluginError(
                f"{_where(value, name)} takes {', '.join(map(repr, extra))}, which the hook doesn't pass "
                f"(it passes {', '.join(sorted(known)) or 'nothing'})"
            )


def _call(caller: pluggy.HookCaller) -> Iterator[Component]:
    results = caller()
    if len(results) < len(caller.get_hookimpls()):  # pluggy drops None
        raise BrokenPluginError(f"{caller.name} returned None, not a list of Component")
    for result in results:
        if inspect.iscoroutine(result):
            result.close()
        if not isinstance(result, (list, tuple)):
            raise BrokenPluginError(f"{caller.name} returned a {_type(result)}, not a list of Component")
        for item in result:
            if not isinstance(item, Component):
                raise BrokenPluginError(f"{caller.name} returned a list with a {_type(item)}, not a Component, in it")
            yield item


def _near_misses(manifest: object) -> str:
    if given := [name for name in HOOKS.values() if hasattr(manifest, name)]:
        return f": {' and '.join(given)} returned no Component"
    for name in dir(manifest):
        value = inspect.getattr_static(manifest, name, None)
        if inspect.isroutine(value) and (near := did_you_mean(name, HOOKS.values())):
            return f"; {_where(value, name)} is no hook of torchhal{near}"
    return f"; it needs a function marked with torchhal.plugin.hookimpl: one of {', '.join(HOOKS.values())}"


def _where(value: object, name: str) -> str:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return f"{name!r} (line {code.co_firstlineno})" if code else repr(name)


def _type(value: object) -> str:
    return type(value).__name__


def describe(error: BaseException) -> str:
    """Describe ``error`` in one printable line, with the place it comes from; never raises itself."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        frame, line, traceback = traceback.tb_frame, traceback.tb_lineno, traceback.tb_next
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        name = frame.f_code.co_filename
        # Skip the frames of importing and calling.
        if package in ("importlib", "importlib_metadata", "pluggy", "functools", "packaging") or name.startswith("<"):
            continue
        if os.path.dirname(name) not in _OWN_FOLDERS:
            place = f" ({name}:{line})"
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f" ({error.filename}:{error.lineno})"  # its own text has no folder
    return printable(f"{type(error).__name__}{f': {text}' if text else ''}{place}")


_OWN_FOLDERS: Final = (os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__)))
