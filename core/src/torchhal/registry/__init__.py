"""Find the components of all kinds by their aliases: one registry for the process, and the class to make another.

Built-in components are found without a scan. The first alias that isn't built in reads the metadata of all
installed distributions and imports the manifests of plugins among them, once; what failed then is kept with its reason
until :func:`refresh`. Detection and ``accelerator="auto"`` import only the manifests that metadata announce. Nothing
here imports torch or the module of a component.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, overload

from torchhal.registry._announced import AutoAccelerators
from torchhal.registry._entry import RegistryEntry
from torchhal.registry._plugin_loader import PluginRecord
from torchhal.registry._registry import Registry

__all__ = [
    "AutoAccelerators",
    "PluginRecord",
    "Registry",
    "RegistryEntry",
    "aliases",
    "announced_environments",
    "auto_accelerators",
    "defaults",
    "entries",
    "find",
    "find_known",
    "installed",
    "plugins",
    "refresh",
    "register",
    "why_unknown",
]

_T = TypeVar("_T", bound=type)

_default = Registry()
"""The process's registry. ``torchhal.testing.isolated_registry`` puts another in its place."""


def plugins() -> list[PluginRecord]:
    """See :meth:`Registry.plugins`."""
    return _default.plugins()


def installed() -> list[PluginRecord]:
    """See :meth:`Registry.installed`."""
    return _default.installed()


def entries(kind: str) -> list[RegistryEntry]:
    """See :meth:`Registry.entries`."""
    return _default.entries(kind)


def aliases(kind: str) -> list[str]:
    """See :meth:`Registry.aliases`."""
    return _default.aliases(kind)


def announced_environments() -> tuple[list[RegistryEntry], list[str]]:
    """See :meth:`Registry.announced_environments`."""
    return _default.announced_environments()


def auto_accelerators() -> AutoAccelerators:
    """See :meth:`Registry.auto_accelerators`."""
    return _default.auto_accelerators()


def adapter_of(packages: Collection[str]) -> RegistryEntry | None:
    """See :meth:`Registry.adapter_of`."""
    return _default.adapter_of(packages)


def defaults() -> tuple[list[RegistryEntry], list[str]]:
    """See :meth:`Registry.defaults`."""
    return _default.defaults()


def find_known(kind: str, alias: str) -> RegistryEntry | None:
    """See :meth:`Registry.find_known`."""
    return _default.find_known(kind, alias)


def find(kind: str, alias: str) -> RegistryEntry:
    """See :meth:`Registry.find`."""
    return _default.find(kind, alias)


def why_unknown(alias: str) -> list[str]:
    """See :meth:`Registry.why_unknown`."""
    return _default.why_unknown(alias)


@overload
def register(kind: str, alias: str, cls: _T, *, summary: str = "", defaults: Mapping[str, Any] | None = None) -> _T: ...
@overload
def register(
    kind: str, alias: str, cls: None = None, *, summary: str = "", defaults: Mapping[str, Any] | None = None
) -> Callable[[_T], _T]: ...
def register(
    kind: str, alias: str, cls: Any = None, *, summary: str = "", defaults: Mapping[str, Any] | None = None
) -> Any:
    """See :meth:`Registry.register`."""
    return _default.register(kind, alias, cls, summary=summary, defaults=defaults)


def refresh() -> None:
    """See :meth:`Registry.refresh`."""
    _default.refresh()
