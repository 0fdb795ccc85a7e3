"""GEN: a plugin whose vendor's modules are missing or broken says so."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from torchhal import registry
from torchhal.errors import ComponentError
from torchhal_conformance._assertions import require
from torchhal_conformance._check import MissingRequirement, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._plugin_facts import plugin_record


class _Hidden:
    """A finder that doesn't find the modules of some names."""

    def __init__(self, finder: Any, names: frozenset[str]) -> None:
        self.finder, self.names = finder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def _vendors(context: CheckContext) -> tuple[str, ...]:
    requires = context.component.entry.component.requires
    if not requires:
        raise NotApplicable("its record requires no vendor's module")
    return requires


@check("GEN-04", needs=["posix"])
def without_vendor(context: CheckContext) -> None:
    """Without the vendor's modules the plugin is loaded, and its components are listed.

    The component is unavailable with a reason that names the missing module.

    Why: users install the plugin first and the SDK later; "No module named ..." from discovery says neither.
    Fix: import the vendor inside the component's methods, and name its modules in Component.requires.
    """
    plugin_record(context)
    vendors = _vendors(context)
    context.restart_subprocess()
    status, listed, ok, reason = context.run_in_subprocess(_look_without, context.component, vendors)
    context.restart_subprocess()
    require(status == "loaded", f"without {', '.join(vendors)} the plugin is {status}")
    require(listed, "without its vendor's modules the component is not listed")
    require(not ok, "without its vendor's modules the component says that it is available")
    require(any(name in reason for name in vendors), f"the reason must name {' or '.join(vendors)} (got {reason!r})")


def _look_without(component: ComponentUnderTest, vendors: tuple[str, ...]) -> tuple[str, bool, bool, str]:
    _must_be_absent(vendors)
    sys.meta_path[:] = [_Hidden(finder, frozenset(vendors)) for finder in sys.meta_path]
    entry = registry.find(component.kind, component.looked_up_as)
    record = next(one for one in registry.plugins() if one.name == entry.plugin)
    state = entry.availability()
    if state and component.kind == "accelerator":
        state = entry.load().availability()
    return record.status, entry in record.components, state.ok, state.reason


def _must_be_absent(vendors: tuple[str, ...]) -> None:
    if there := [name for name in vendors if name in sys.modules]:
        raise MissingRequirement(f"{', '.join(there)} comes with torch here, so it can't be taken away")


@check("GEN-05", needs=["posix"], after=("GEN-04",))
def broken_vendor(context: CheckContext) -> None:
    """With a vendor's module whose import fails an accelerator is unavailable with that error as the reason.

    The error is an OSError, RuntimeError or AttributeError. A component of another kind loads, or is refused with
    it.

    Why: half-installed SDKs are the rule, and their errors surfaced as crashes of programs that never used them.
    Fix: import the vendor in load() and let Accelerator.availability() catch what comes.
    """
    plugin_record(context)
    vendors = _vendors(context)
    for error in ("OSError", "RuntimeError", "AttributeError"):
        context.restart_subprocess()
        state = context.run_in_subprocess(
            _look_at_broken, context.component, vendors, error, str(context.folder / error)
        )
        context.restart_subprocess()
        if state is None:
            continue
        ok, reason = state
        require(not ok, f"with a vendor's module that raises {error} the component says that it is available")
        require("half installed" in reason, f"the reason must hold the vendor's {error} (got {reason!r})")


def _look_at_broken(
    component: ComponentUnderTest, vendors: tuple[str, ...], error: str, folder: str
) -> tuple[bool, str] | None:
    _must_be_absent(vendors)
    for name in vendors:
        package = Path(folder, name)
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise {error}('half installed')\n")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    entry = registry.find(component.kind, component.looked_up_as)
    if component.kind != "accelerator":
        try:
            entry.load()
        except ComponentError as refused:
            return False, str(refused)
        return None
    state = entry.load().availability()
    return state.ok, state.reason
