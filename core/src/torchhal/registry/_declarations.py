"""Read what a distribution's entry_points.txt declares for detection, so that its manifest need not be imported.

Four groups stand beside that of the manifests. In ``torchhal.detect`` an environment variable names the cluster
environment that it announces; in ``torchhal.auto`` an accelerator names the module without which ``accelerator="auto"``
can't take it; in ``torchhal.adapt`` a package names the model adapter of objects whose classes come from it; in
``torchhal.defaults`` an alias of a logger or a callback that every Trainer has names its kind. All hold for the whole
distribution.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from torchhal.plugin import PROJECT, alias_problem

DETECT: Final = f"{PROJECT}.detect"
AUTO: Final = f"{PROJECT}.auto"
ADAPT: Final = f"{PROJECT}.adapt"
DEFAULTS: Final = f"{PROJECT}.defaults"
GROUPS: Final = (PROJECT, DETECT, AUTO, ADAPT, DEFAULTS)

DEFAULT_KINDS: Final = ("logger", "callback")
"""What every Trainer may have more of: a default of these kinds is a component of ``default_logger``, say."""

ALIAS_FIRST: Final = (AUTO, DEFAULTS)
"""Groups whose names are aliases; in the others the values are."""

_HEADERS = tuple(f"[{group}]".encode() for group in GROUPS)
_HAS_GROUP = re.compile(rf"^[ \t]*(?:{'|'.join(re.escape(f'[{group}]') for group in GROUPS)})", re.MULTILINE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Declarations:
    """The declarations of one distribution.

    Attributes:
        variables: (environment variable, alias of a cluster environment) pairs, in the file's order.
        modules: (alias of an accelerator, top-level module) pairs.
        packages: (package, alias of a model adapter) pairs.
        defaults: (alias, ``"logger"`` or ``"callback"``) pairs.
        problems: one line for each declaration that can't be used.
    """

    variables: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    packages: tuple[tuple[str, str], ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()

    def announcing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the variables that announce the cluster environment of these names."""
        names = tuple(names)
        return tuple(variable for variable, alias in self.variables if any(same_alias(alias, name) for name in names))


NO_DECLARATIONS: Final = Declarations()


def has_group(text: str) -> bool:
    """Return whether the text of an entry_points.txt has a group of torchhal's."""
    return _HAS_GROUP.search(text) is not None


def has_group_bytes(content: bytes) -> bool:
    """Return whether the content of an entry_points.txt, which need not be decodable, may have such a group."""
    return any(header in content for header in _HEADERS)


def read_group(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs of ``group``, as importlib.metadata reads them; a value may be empty."""
    inside = False
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            inside = line[1:-1] == group
        elif inside:
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def only_declarations_malformed(text: str) -> bool:
    """Return whether every line without an "=" stands in a group of declarations, so that the others can be read."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1]
        elif line and not line.startswith("#") and "=" not in line and group and group not in GROUPS[1:]:
            return False
    return True


def read_declarations(text: str) -> Declarations:
    """Return the declarations in the text of an entry_points.txt; a wrong one costs only itself."""
    variables: list[tuple[str, str]] = []
    modules: list[tuple[str, str]] = []
    packages: list[tuple[str, str]] = []
    defaults: list[tuple[str, str]] = []
    problems: list[str] = []
    for name, value in read_group(text, DETECT):
        if not _VARIABLE.fullmatch(name):
            problems.append(_problem(DETECT, name, value, f"{name!r} is no name of an environment variable"))
        elif reason := alias_problem(value, "cluster_environment"):
            problems.append(_problem(DETECT, name, value, f"the value must be an alias: {reason}"))
        else:
            variables.append((name, value))
    for name, value in read_group(text, AUTO):
        if reason := alias_problem(name, "accelerator"):
            problems.append(_problem(AUTO, name, value, f"the name must be an alias: {reason}"))
        elif not value.isidentifier():
            problems.append(_problem(AUTO, name, value, "the value must be a top-level module"))
        else:
            modules.append((name, value))
    for name, value in read_group(text, ADAPT):
        if not all(map(str.isidentifier, name.split("."))):
            problems.append(_problem(ADAPT, name, value, f"{name!r} is no name of a package"))
        elif reason := alias_problem(value, "model_adapter"):
            problems.append(_problem(ADAPT, name, value, f"the value must be an alias: {reason}"))
        else:
            packages.append((name, value))
    for name, value in read_group(text, DEFAULTS):
        if value not in DEFAULT_KINDS:
            problems.append(_problem(DEFAULTS, name, value, "the value must be 'logger' or 'callback'"))
        elif reason := alias_problem(name, f"default_{value}"):
            problems.append(_problem(DEFAULTS, name, value, f"the name must be an alias: {reason}"))
        else:
            defaults.append((name, value))
    return Declarations(tuple(variables), tuple(modules), tuple(packages), tuple(defaults), tuple(problems))


def unknown_alias_problem(group: str, name: str, value: str, kind: str, known: set[str]) -> str:
    """Return the problem of a declaration whose alias is not among ``known``, those that the distribution has."""
    has = ", ".join(map(repr, sorted(known))) or "none"
    alias = name if group in ALIAS_FIRST else value
    return _problem(
        group,
        name,
        value,
        f"the distribution has no {kind.replace('_', ' ')} {alias!r} that can be used (it has {has})",
    )


def undeclared_default_problem(alias: str, kind: str) -> str:
    """Return the problem of a default that the metadata doesn't declare."""
    return (
        f"the default {kind} {alias!r} is in no Trainer: its entry_points.txt declares no {alias} = {kind} in "
        f'[{DEFAULTS}]. To its pyproject.toml belongs [project.entry-points."{DEFAULTS}"] with {alias} = "{kind}"'
    )


def _problem(group: str, name: str, value: str, reason: str) -> str:
    return f"its entry_points.txt declares {name} = {value} in [{group}], which is ignored: {reason}"


def same_alias(declared: str, alias: str) -> bool:
    """Return whether a declared alias means ``alias``.

    Build backends that check the syntax of entry points refuse a dash in a value, so an underscore matches one.
    """
    return declared.replace("-", "_") == alias.replace("-", "_")
