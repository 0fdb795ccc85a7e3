"""Represent one look-up result: a component with its owner, imported when it is first used."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torchhal._terminal import printable
from torchhal.errors import ComponentError
from torchhal.plugin import Availability, Component
from torchhal.registry._discovery import describe
from torchhal.suggestions import did_you_mean

BASES: Final[Mapping[str, str]] = {
    "accelerator": "torchhal.accelerators:Accelerator",
    "precision": "torchhal.precision:Precision",
    "checkpoint_io": "torchhal.checkpoint:CheckpointIO",
    "cluster_environment": "torchhal.cluster:ClusterEnvironment",
    "strategy": "torchhal.strategies:Strategy",
    "logger": "torchhal.trainer.loggers:Logger",
    "callback": "torchhal.trainer.callbacks:Callback",
    "default_logger": "torchhal.trainer.loggers:Logger",
    "default_callback": "torchhal.trainer.callbacks:Callback",
    "model_adapter": "torchhal.trainer.adapters:ModelAdapter",
}
"""Kind -> the contract its classes subclass, as a string: looking a name up must not import torch."""


@dataclass(frozen=True, eq=False)
class RegistryEntry:
    """A component and its provider.

    Attributes:
        kind: one of :data:`torchhal.plugin.HOOKS`.
        component: the record from the manifest.
        plugin: the plugin's name; ``"torchhal"`` for a built-in part, ``"user"`` for a registered class.
        distribution: the distribution the plugin comes from.
        problem: why the component can't be used at all, or an empty string.
        variables: for a cluster environment of a plugin, the environment variables that its distribution declares in
            ``torchhal.detect``; without one it is used only when it is named.
    """

    kind: str
    component: Component
    plugin: str
    distribution: str
    problem: str = ""
    variables: tuple[str, ...] = ()
    _class: list[type[Any]] = field(default_factory=list, repr=False)  # at most one: the class once imported

    @property
    def qualified_name(self) -> str:
        """``distribution/alias``: finds this entry even if others provide the alias."""
        return f"{self.distribution}/{self.component.alias}"

    @property
    def names(self) -> tuple[str, ...]:
        """The alias and the other aliases, in lower case, as far as they can be looked up."""
        names: list[object] = [self.component.alias]
        if isinstance(self.component.aliases, tuple):
            names += self.component.aliases
        return tuple(dict.fromkeys(name.lower() for name in names if isinstance(name, str)))

    def load(self) -> type[Any]:
        """Return the class, imported on first use.

        Raises:
            ComponentError: the record is unusable, its target can't be imported (the cause is chained), or is
                no concrete subclass of the kind's base class.
        """
        if self.problem:
            raise ComponentError(f"{self} can't be used: {self.problem}")
        if not self._class:
            try:
                target = resolve_target(self.component.target)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # SystemExit too: an import that tries to end the process counts as failed.
                missing = self.availability().reason
                hint = f" ({missing})" if missing else ""
                raise ComponentError(
                    f"{self} can't be used: {self.component.target!r} can't be imported{hint}: {describe(error)}"
                ) from error
            if reason := class_problem(self.kind, target):
                raise ComponentError(f"{self} can't be used: {self.component.target!r} {reason}")
            self._class.append(target)
        return self._class[0]

    def create(self, **kwargs: Any) -> Any:
        """Return an instance from a deep copy of the record's defaults, overridden by ``kwargs``.

        Raises:
            ComponentError: as :meth:`load`, and for defaults that the constructor doesn't take.
            TypeError: for ``kwargs`` that it doesn't take, or a missing one, naming what it takes.
        """
        cls = self.load()
        defaults = {name: value for name, value in self.component.defaults.items() if name not in kwargs}
        try:
            signature = inspect.signature(cls)
        except (TypeError, ValueError):  # a class written in C may have none to show
            return cls(**copy.deepcopy(defaults), **kwargs)
        if reason := _unknown_argument(cls, signature, defaults):
            raise ComponentError(f"{self} can't be used: its record's default {reason}")
        if reason := _unknown_argument(cls, signature, kwargs):
            raise TypeError(f"{self}: {reason}")
        try:
            signature.bind(**defaults, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self}: {error} of {cls.__qualname__}") from None
        return cls(**copy.deepcopy(defaults), **kwargs)

    def availability(self) -> Availability:
        """Return whether the vendor modules it requires are installed. Imports none of them.

        Whether the hardware works is checked by the class; this is the part known without loading it.
        """
        if self.problem:
            return Availability(False, self.problem)
        reason = next(filter(None, map(why_missing, self.component.requires)), "")
        return Availability(not reason, reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the data that ``torchhal plugins --json`` prints."""
        available, aliases = self.availability(), self.component.aliases
        return {
            "kind": self.kind,
            "alias": _plain(self.component.alias),
            "aliases": [_plain(alias) for alias in aliases] if isinstance(aliases, tuple) else [],
            "target": _plain(self.component.target),
            "summary": _plain(self.component.summary),
            "available": available.ok,
            "reason": available.reason,
        }

    def __str__(self) -> str:
        return printable(f"{self.kind.replace('_', ' ')} {self.qualified_name!r}")


def why_missing(module: str) -> str:
    """Return why the top-level ``module`` can't be imported, as far as looking for it tells; empty if it is there."""
    try:
        if importlib.util.find_spec(module) is not None:
            return ""
    except ValueError:  # already imported, by something that left no spec
        return ""
    except Exception as error:
        return f"the Python module {module!r} can't be looked for: {describe(error)}"
    return f"the Python module {module!r} is not installed"


def resolve_target(target: str) -> Any:
    """Return the object that ``"package.module:Name.inner"`` names.

    Raises any error of the import, and AttributeError.
    """
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        if not hasattr(found, name):
            raise AttributeError(
                f"{getattr(found, '__name__', found)!r} has no {name!r}{did_you_mean(name, dir(found))}"
            )
        found = getattr(found, name)
    return found


def class_problem(kind: str, target: object) -> str:
    """Return why ``target`` is no class that can serve as a ``kind``, or an empty string."""
    if kind == "command":
        return "" if inspect.isroutine(target) else f"must be a function (got a {type(target).__name__})"
    if not isinstance(target, type):
        return f"must be a class (got a {type(target).__name__})"
    base = resolve_target(BASES[kind])
    if target is base or not issubclass(target, base):
        return f"must be a subclass of {BASES[kind].replace(':', '.')} (got {target.__module__}.{target.__qualname__})"
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        return f"leaves {', '.join(missing)} abstract"
    return ""


def _unknown_argument(cls: type, signature: inspect.Signature, arguments: Iterable[str]) -> str:
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in arguments:
        if name not in takes:
            allowed = f"it takes {', '.join(takes)}" if takes else "it takes none"
            return f"{name!r} is no argument of {cls.__qualname__}{did_you_mean(name, takes)}; {allowed}"
    return ""


def _plain(value: object) -> str:
    # An unusable record may hold anything; the listing shows it as text.
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
