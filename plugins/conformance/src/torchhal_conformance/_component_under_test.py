"""Describe the component under test: how to create it, and the facts that checks use."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from torchhal import registry
from torchhal.errors import ConfigurationError, PluginError
from torchhal.plugin import Component
from torchhal.registry._discovery import CORE, USER
from torchhal.registry._entry import RegistryEntry, class_problem
from torchhal_conformance._author_model import KIT_MODEL, check_model, factory_of
from torchhal_conformance._check import Check, MissingInput, MissingRequirement, NotApplicable
from torchhal_conformance._error_text import with_article
from torchhal_conformance._factory import Factory, import_object
from torchhal_conformance._launcher_env import LAUNCHERS, WORLDS, owned_worlds
from torchhal_conformance._launcher_worlds import LauncherWorld, Table, main_world, parse_worlds
from torchhal_conformance._supported_releases import oldest_release

if TYPE_CHECKING:
    from torchhal.accelerators import Accelerator
    from torchhal.registry._plugin_loader import PluginRecord
    from torchhal.strategies import Strategy


NO_LAUNCHER: Final = "how to start two processes is not known: give --launcher, or launcher=(...)"


@dataclass(frozen=True)
class _Class:
    """Location of a class that has no alias in the process that unpickles it."""

    module: str
    name: str
    file: str | None


@dataclass
class ComponentUnderTest:
    """One component under test, and the options that it is checked with.

    Attributes:
        kind: one of :data:`torchhal.plugin.KINDS`.
        target: what was given: any of its names, qualified or not, a :class:`~torchhal.plugin.Component`, or a class.
        features: declared capabilities beyond the core level; its class's own are added.
        arguments: for the constructor, beside the component's defaults.
        accelerator: alias of the accelerator that a precision or strategy is checked on.
        golden: a folder with checkpoints that earlier releases of a checkpoint IO have written; see CIO-25.
        tables: for a cluster environment, the variables that its launcher sets: one mapping for each of four ranks on
            two nodes, or layout -> one for each of its ranks; see :class:`~torchhal_conformance.conformance_suite`.
        launcher: for a cluster environment, the command that starts two processes of what follows it; None: the
            kit's own of this alias, if it knows one.
        seed: of everything random in the checks.
        model: for a strategy, makes the model that its checks train in the place of the kit's own.
        data: makes the dataset of that model.
        read: for a logger, returns the rows that its back end has; not there in other processes.
    """

    kind: str
    target: str | Component | type[Any] | _Class
    features: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"
    tables: Sequence[Table] | Mapping[str, Sequence[Table]] = ()
    launcher: tuple[str, ...] | None = None
    golden: str | None = None
    seed: int = 0
    model: Factory | None = None
    data: Factory | None = None
    read: Callable[[Any], list[dict[str, Any]]] | None = None

    makes_instances = True
    """False where an instance, made outside of a check, has ended or blocked the process: none is made there then."""

    @classmethod
    def of(
        cls,
        kind: str,
        target: str | Component | type[Any],
        *,
        features: Iterable[str] = (),
        arguments: Mapping[str, Any] | None = None,
        accelerator: str = "cpu",
        tables: Sequence[Table] | Mapping[str, Sequence[Table]] = (),
        launcher: Sequence[str] | None = None,
        golden: str | os.PathLike[str] | None = None,
        seed: int = 0,
        model: str | Callable[[], Any] | None = None,
        data: str | Callable[[], Any] | None = None,
        read: Callable[[Any], list[dict[str, Any]]] | None = None,
    ) -> ComponentUnderTest:
        """Return a ComponentUnderTest of checked arguments; its class is loaded on first use."""
        if isinstance(features, str):
            raise TypeError(f"'features' must be several names, not one str (got {features!r})")
        if not isinstance(target, (str, Component, type)):
            raise TypeError(
                f"a component must be given by alias, Component or class (got {target!r}): processes make their own"
            )
        if isinstance(launcher, str):
            raise TypeError(f"'launcher' must be a command's words, not one str (got {launcher!r})")
        if read is not None and (kind != "logger" or not callable(read)):
            raise ConfigurationError(
                f"'read' must be a function that takes a logger, in the suite of a logger (got {read!r} for "
                f"{with_article(kind)}): give it a function, or leave it out"
            )
        component = cls(
            kind, target, frozenset(features), dict(arguments or {}), accelerator,
            dict(tables) if isinstance(tables, Mapping) else tuple(tables),
            None if launcher is None else tuple(launcher), None if golden is None else os.path.abspath(golden), seed,
            factory_of("model", model), factory_of("data", data), read,
        )  # fmt: skip
        component.entry  # noqa: B018  an unknown alias is an error here
        if kind != "accelerator":
            registry.find("accelerator", accelerator)
        check_model(kind, component.model, component.data)
        if tables and main_world(parse_worlds(component.tables, "'tables'")) is None:
            raise ConfigurationError(
                f"'tables' must have a layout of four ranks, such as '2+2' or '1+1+1+1' (got "
                f"{', '.join(map(repr, component.tables))})"
            )
        return component

    def __getstate__(self) -> dict[str, Any]:
        # A process that unpickles this makes the component anew. An alias of user code means nothing there.
        fields = {name: self.__dict__[name] for name in self.__dataclass_fields__}
        fields["read"] = None  # a function of a test module, which rank checks don't call
        target = self.target
        if isinstance(target, str) and self.entry.plugin == USER:
            target = self.entry.load()
        if isinstance(target, type):
            module = sys.modules.get(target.__module__)
            fields["target"] = _Class(target.__module__, target.__qualname__, getattr(module, "__file__", None))
            fields["arguments"] = {**self.entry.component.defaults, **self.arguments}
        return fields

    @cached_property
    def entry(self) -> RegistryEntry:
        """The registry's entry, or one like it for a class that has no alias."""
        target = self.target
        if isinstance(target, str):
            return registry.find(self.kind, target)
        if isinstance(target, Component):
            return RegistryEntry(self.kind, target, USER, USER, problem=target.problem(self.kind) or "")
        if isinstance(target, _Class):
            target = import_object(target.module, target.name, target.file)
        if problem := class_problem(self.kind, target):
            raise ConfigurationError(f"{target!r} can't be checked as {with_article(self.kind)}: it {problem}")
        component = Component(_slug(target), f"{target.__module__}:{target.__qualname__}")
        return RegistryEntry(self.kind, component, USER, USER, _class=[target])

    @property
    def alias(self) -> str:
        """The component's alias, whichever of its names was given."""
        return self.entry.component.alias

    @property
    def reported_as(self) -> str:
        """The alias, or the name of a class that has none of its own: what it inherits is another component's."""
        target = self.target
        if isinstance(target, (str, Component)) or {"alias", "name"} & set(vars(self.cls)):
            return self.alias
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.cls.__name__).lower()

    @property
    def looked_up_as(self) -> str:
        """The name that finds it in a registry: the name given, which may be qualified by its distribution."""
        return self.target if isinstance(self.target, str) else self.alias

    @property
    def cls(self) -> type[Any]:
        """The component's class."""
        return self.entry.load()

    def create(self, **arguments: Any) -> Any:
        """Return a new instance."""
        return self.entry.create(**{**self.arguments, **arguments})

    @cached_property
    def declared(self) -> frozenset[str]:
        """The features given, and those that the class itself declares."""
        if not self.entry.availability():
            return self.features
        try:  # an instance's, where they depend on its arguments
            own = self.create().features if self.makes_instances else None
        except Exception:
            own = None
        if own is None:
            own = getattr(self.cls, "features", None)
        return self.features | (own if isinstance(own, frozenset) else frozenset())

    @property
    def tables_are_recorded(self) -> bool:
        """True where the variables are those of a real launcher, given or the kit's, and not torchhal's alone."""
        return bool(self.tables) or self.alias in WORLDS

    @cached_property
    def worlds(self) -> dict[str, LauncherWorld]:
        """The jobs of its launcher by layout: those given, beside those that the kit has of a launcher of this name.

        The variables of a launcher that an environment brings itself (``"owns_launch"``) are torchhal's.
        """
        known = WORLDS.get(self.alias)
        if known is None:
            known = owned_worlds(self.alias) if self._owns_launch else {}
        return {**known, **parse_worlds(self.tables, "'tables'")}

    @property
    def world(self) -> LauncherWorld | None:
        """The world of four ranks in which most checks are made; None where the launcher's variables aren't known."""
        return main_world(self.worlds)

    @property
    def own_tables(self) -> tuple[Table, ...]:
        """The variables of each rank of :attr:`world`."""
        return () if self.world is None else self.world.tables

    @property
    def own_launcher(self) -> tuple[str, ...] | None:
        """The command given, or the kit's own of this alias; empty where the strategy or environment starts them."""
        if self.launcher is not None:
            return self.launcher
        return () if self._owns_launch else LAUNCHERS.get(self.alias)

    @property
    def _owns_launch(self) -> bool:
        return self.kind == "cluster_environment" and "owns_launch" in self.declared

    @cached_property
    def plugin(self) -> PluginRecord | None:
        """The record of the plugin that provides it; None for core's own components and for user code."""
        if self.entry.plugin in (CORE, USER):
            return None
        for record in registry.plugins():
            if record.name == self.entry.plugin and record.distribution == self.entry.distribution:
                return record
        return None

    @cached_property
    def contract(self) -> str:
        """The oldest release of torchhal that its distribution supports, whose contract it is held to: ``"0.2"``.

        This release for core's own components and for user code.
        """
        if self.entry.plugin in (CORE, USER):
            return oldest_release(())
        try:
            return oldest_release(importlib.metadata.requires(self.entry.distribution) or ())
        except importlib.metadata.PackageNotFoundError:  # a folder on the path, without metadata
            return oldest_release(())

    @property
    def source(self) -> Path | None:
        """The folder of the plugin's project, where it was installed as editable."""
        if self.plugin is None:
            return None
        text = importlib.metadata.distribution(self.plugin.distribution).read_text("direct_url.json")
        url = json.loads(text or "{}").get("url", "")
        return Path(unquote(url.removeprefix("file://"))) if url.startswith("file://") else None

    @cached_property
    def one_per_node(self) -> bool:
        """True for a strategy of one process per node, which drives all of its devices: each rank is a node then.

        False where that can't be known, as for a strategy that this machine can't make.
        """
        if self.kind != "strategy":
            return False
        try:
            strategy: Strategy = self.create()
            return bool(strategy.multi_device) and strategy.num_local_processes(2) == 1
        except Exception:
            return False

    # -- hardware --------------------------------------------------------------------------------------------

    def make_accelerator(self) -> Accelerator:
        """Return the accelerator under test, or the one that another kind is checked on."""
        made: Accelerator
        if self.kind == "accelerator":
            made = self.create()
        else:
            made = registry.find("accelerator", self.accelerator).create()
        return made


def missing(check: Check, component: ComponentUnderTest) -> str:
    """Return why ``check`` can't be made here, empty if it can; ``environment:`` begins a machine's reason."""
    # a plugin whose manifest can't be imported has no features that could be read, and its own checks say why
    if check.features and (undeclared := sorted(check.features - component.declared)):
        return f"feature {', '.join(map(repr, undeclared))} is not declared"
    if ("posix" in check.needs or check.world_sizes) and os.name != "posix":
        return str(MissingRequirement("it needs processes made by fork"))
    if "table" in check.needs and not component.own_tables:
        if "live_runtime" in component.declared:
            if component.own_launcher is None:
                return str(MissingInput(NO_LAUNCHER))
            return str(NotApplicable("a runtime gives the numbers, and no variables: ENV-53 asks in real processes"))
        return str(
            MissingInput(
                "the variables of its launcher are not known: give --tables FILE, or tables=[{...}, ...] to the suite, "
                "the variables of each of four ranks on two nodes; or declare the feature 'live_runtime', if there are "
                "none"
            )
        )
    if component.model is not None and check.id in KIT_MODEL:
        return str(NotApplicable("the check is about a model of its own, and a model was given"))
    try:
        available = component.entry.availability()
    except PluginError:
        if check.id.startswith("GEN"):
            return ""
        raise
    if not available:
        return "" if check.id.startswith("GEN") else str(MissingRequirement(available.reason))
    if check.needs & {"device", "two devices"}:
        accelerator = component.make_accelerator()
        if not (state := type(accelerator).availability()):
            return str(MissingRequirement(state.reason))
        if "two devices" in check.needs and accelerator.device_count() < 2 and not accelerator.oversubscribable:
            return str(MissingRequirement(f"it needs two devices, accelerator {accelerator.name!r} has one here"))
    return ""


def _slug(cls: type[Any]) -> str:
    """Return an alias for a class that has none."""
    own = getattr(cls, "alias", None) or getattr(cls, "name", None)
    text = own if isinstance(own, str) else cls.__name__
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unnamed"
