"""From what the user asked for to a Plan: a pure function over names, objects, environment and availabilities."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.errors import AcceleratorUnavailable, ConfigurationError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.precision import Precision
from torchhal.strategies import Strategy

BASES: dict[str, type] = {
    "accelerator": Accelerator,
    "precision": Precision,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "strategy": Strategy,
}

# What plugins=[...] may hold: parts that have no Trainer argument of their own, or that users put there by habit.
PLUGIN_KINDS = ("precision", "checkpoint_io", "cluster_environment")


@dataclass(frozen=True)
class Request:
    """The Trainer's hardware arguments as the user wrote them. Parts are aliases, classes or instances."""

    accelerator: str | Accelerator | type[Accelerator] = "auto"
    strategy: str | Strategy | type[Strategy] = "auto"
    devices: int | str | Sequence[int] = "auto"
    num_nodes: int = 1
    precision: str | int | Precision | type[Precision] | None = None
    plugins: Any = ()


@dataclass(frozen=True)
class Part:
    """One chosen part: its alias where it has one, the instance, and why it was chosen."""

    kind: str
    alias: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will run, and for each choice the reason. Nothing has been started."""

    accelerator: Part
    precision: Part
    checkpoint_io: Part
    cluster_environment: Part | None
    strategy: Part
    device_indices: tuple[int, ...]
    devices: tuple[torch.device, ...]
    devices_reason: str
    num_nodes: int
    world_size: int
    launcher: str
    launcher_reason: str
    notes: tuple[str, ...] = field(default=())
    """What the user should hear once, such as an "auto" that fell back."""

    def build(self) -> Strategy:
        """The strategy with its parts put in."""
        strategy: Strategy = self.strategy.value
        strategy.configure(
            accelerator=self.accelerator.value,
            precision=self.precision.value,
            checkpoint_io=self.checkpoint_io.value,
            cluster_environment=None if self.cluster_environment is None else self.cluster_environment.value,
            devices=self.devices,
            num_nodes=self.num_nodes,
        )
        return strategy

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, choice, reason), in reading order."""
        parts = [self.accelerator, self.strategy, self.precision, self.checkpoint_io]
        rows = [(part.kind, part.alias, part.reason) for part in parts]
        rows.insert(1, ("devices", ", ".join(map(str, self.devices)), self.devices_reason))
        if self.cluster_environment is not None:
            rows.append(("cluster_environment", self.cluster_environment.alias, self.cluster_environment.reason))
        rows.append(("world_size", str(self.world_size), f"{self.num_nodes} node(s)"))
        rows.append(("launcher", self.launcher, self.launcher_reason))
        return rows

    def describe(self) -> str:
        """The Plan as text, one line a choice."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{what:<{widths[0]}}  {choice:<{widths[1]}}  {reason}".rstrip() for what, choice, reason in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The Plan as plain data for ``torchhal explain --json``."""
        rows = {what: {"choice": choice, "reason": reason} for what, choice, reason in self.rows()}
        return {"schema": 1, **rows, "notes": list(self.notes)}


def resolve(request: Request) -> Plan:
    """Choose five parts, devices and a launcher, or raise before anything starts.

    Raises:
        ConfigurationError: an argument outside its domain, or a conflict between two.
        UnsupportedCombinationError: two parts that don't fit each other.
        AcceleratorUnavailable: an accelerator asked for by name that can't be used here.
        UnknownAliasError, AmbiguousAliasError, ComponentError: from the registry.
    """
    num_nodes = request.num_nodes
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(f"'num_nodes' must be an int of at least 1 (got {num_nodes!r})")
    notes: list[str] = []
    given = _sort_plugins(request.plugins)
    strategy = _strategy_object(request.strategy)

    accelerator = _accelerator(request, strategy, notes)
    device_source = accelerator.value
    indices = device_source.parse_devices(request.devices)
    if not indices:
        raise ConfigurationError(
            f"'devices' must ask for at least one device (got {request.devices!r}, of which there are none here)"
        )
    devices_reason = f"devices={request.devices!r}" if request.devices != "auto" else "devices='auto'"

    strategy_part = _strategy(request, strategy, device_source, len(indices), num_nodes)
    chosen: Strategy = strategy_part.value
    precision = _precision(request, given, chosen, device_source)
    checkpoint_io = _simple_part("checkpoint_io", "torch", given, chosen._checkpoint_io, device_source)
    environment = _environment(given, chosen)

    devices = tuple(device_source.get_parallel_devices(indices))
    _check_fit(accelerator, strategy_part, precision, len(indices), num_nodes)
    local = chosen.num_local_processes(len(indices))
    external = environment is not None and environment.value.creates_processes_externally
    world_size = environment.value.world_size() if external and environment is not None else local * num_nodes
    if external and environment is not None:
        environment.value.validate_settings(num_devices=local, num_nodes=num_nodes)
    launcher, launcher_reason = _launcher(chosen, environment, local, num_nodes, external)
    return Plan(
        accelerator=accelerator,
        precision=precision,
        checkpoint_io=checkpoint_io,
        cluster_environment=environment,
        strategy=strategy_part,
        device_indices=indices,
        devices=devices,
        devices_reason=devices_reason,
        num_nodes=num_nodes,
        world_size=world_size,
        launcher=launcher,
        launcher_reason=launcher_reason,
        notes=tuple(notes),
    )


def _instance(kind: str, value: Any) -> Any:
    """An instance from a class or an instance of the right kind; TypeError for anything else."""
    base = BASES[kind]
    if isinstance(value, type):
        if not issubclass(value, base):
            raise TypeError(f"'{kind}' must be an alias, a {base.__name__} or an instance of one (got {value!r})")
        if inspect.isabstract(value):
            missing = ", ".join(sorted(value.__abstractmethods__))
            raise TypeError(f"{value.__name__} can't be used as a {kind} yet: it does not implement {missing}")
        return value()
    if not isinstance(value, base):
        raise TypeError(f"'{kind}' must be an alias, a {base.__name__} or an instance of one (got {value!r})")
    return value


def _from_alias(kind: str, alias: str, reason: str, **defaults: Any) -> Part:
    entry = registry.find(kind, alias)
    availability = entry.availability()
    if not availability:
        if kind == "accelerator":
            raise AcceleratorUnavailable(
                f"accelerator {alias!r} can't be used here: {availability.reason}",
                alias=alias,
                reason=availability.reason,
            )
        raise ConfigurationError(f"{kind} {alias!r} can't be used here: {availability.reason}")
    value = entry.create(**defaults)
    if isinstance(value, Strategy) and not value.alias:
        value.alias = entry.component.alias
    return Part(kind, entry.component.alias, value, reason)


def _own_alias(value: Any) -> str:
    """The name of an object that nobody asked for by alias."""
    return str(getattr(value, "alias", "") or getattr(value, "name", "") or type(value).__name__)


def _sort_plugins(plugins: Any) -> dict[str, Any]:
    """``plugins=`` by kind: objects by their class, names by whoever provides them."""
    if plugins is None:
        return {}
    if isinstance(plugins, str) or not isinstance(plugins, Sequence):
        plugins = [plugins]
    given: dict[str, Any] = {}
    for plugin in plugins:
        kind, value = _plugin_kind(plugin)
        if kind in given:
            raise ConfigurationError(
                f"'plugins' must hold one {kind.replace('_', ' ')} at most (got {given[kind]!r} and {plugin!r})"
            )
        given[kind] = value
    return given


def _plugin_kind(plugin: Any) -> tuple[str, Any]:
    if isinstance(plugin, str):
        homes = [kind for kind in PLUGIN_KINDS if plugin.lower() in registry.aliases(kind)]
        if len(homes) == 1:
            return homes[0], plugin
        if not homes and "/" in plugin:
            for kind in PLUGIN_KINDS:
                try:
                    registry.find(kind, plugin)
                except LookupError:
                    continue
                return kind, plugin
        every = sorted(alias for kind in PLUGIN_KINDS for alias in registry.aliases(kind))
        raise ConfigurationError(
            f"'plugins' must hold precisions, checkpoint IOs or cluster environments, as objects or aliases "
            f"(got {plugin!r}, which names {'several' if homes else 'none'} of them; known: {', '.join(every)})"
        )
    for kind in PLUGIN_KINDS:
        base = BASES[kind]
        if isinstance(plugin, base) or (isinstance(plugin, type) and issubclass(plugin, base)):
            return kind, plugin
    for kind in ("accelerator", "strategy"):
        base = BASES[kind]
        if isinstance(plugin, base) or (isinstance(plugin, type) and issubclass(plugin, base)):
            raise ConfigurationError(f"'plugins' must not hold a {kind} (got {plugin!r}): give it as {kind}=")
    raise ConfigurationError(
        f"'plugins' must hold precisions, checkpoint IOs or cluster environments, as objects or aliases (got {plugin!r})"
    )


def _strategy_object(strategy: Any) -> Strategy | None:
    if isinstance(strategy, str):
        return None
    instance: Strategy = _instance("strategy", strategy)
    return instance


# -- accelerator ---------------------------------------------------------------------------------------------


def _accelerator(request: Request, strategy: Strategy | None, notes: list[str]) -> Part:
    asked = request.accelerator
    inside = strategy._accelerator if strategy is not None else None
    if inside is not None:
        if not isinstance(asked, str) or asked.lower() not in ("auto", inside.name):
            if asked is not inside:
                raise ConfigurationError(
                    f"'accelerator' is given twice: {asked!r} to the Trainer and {inside!r} inside {strategy!r}; give one"
                )
        return Part("accelerator", inside.name, _available(inside, inside.name), f"given inside {strategy!r}")
    if not isinstance(asked, str):
        instance = _instance("accelerator", asked)
        return Part(
            "accelerator", _own_alias(instance), _available(instance, _own_alias(instance)), "given as an object"
        )
    if asked.lower() != "auto":
        part = _from_alias("accelerator", asked, f"accelerator={asked!r}")
        return Part(part.kind, part.alias, _available(part.value, asked), part.reason)
    return _auto_accelerator(strategy, notes)


def _available(accelerator: Accelerator, alias: str) -> Accelerator:
    availability = type(accelerator).availability()
    if not availability:
        raise AcceleratorUnavailable(
            f"accelerator {alias!r} can't be used here: {availability.reason}", alias=alias, reason=availability.reason
        )
    return accelerator


def _auto_accelerator(strategy: Strategy | None, notes: list[str]) -> Part:
    """The available accelerator with the highest priority; what was installed but unusable becomes a note."""
    candidates: list[tuple[int, str, Accelerator]] = []
    unusable: list[str] = []
    for alias in registry.aliases("accelerator"):
        try:
            entry = registry.find("accelerator", alias)
        except LookupError as error:  # two plugins at war over one alias: "auto" takes neither
            unusable.append(f"{alias}: {error}")
            continue
        if entry.component.alias != alias:
            continue  # another name of one already seen
        availability: Availability = entry.availability()
        if availability:
            try:
                cls = entry.load()
                if cls.auto_priority is None:
                    continue
                availability = cls.availability()
            except Exception as error:
                availability = Availability(False, f"{type(error).__name__}: {error}")
        if not availability:
            unusable.append(f"{alias}: {availability.reason}")
            continue
        if strategy is not None and strategy.accelerators is not None and alias not in strategy.accelerators:
            continue
        candidates.append((cls.auto_priority, alias, entry.create()))
    if not candidates:
        raise AcceleratorUnavailable(
            f"no accelerator can be used here for {strategy!r}: {'; '.join(unusable) or 'none is installed'}",
            alias="auto",
            reason="; ".join(unusable) or "none is installed",
        )
    best = max(priority for priority, _, _ in candidates)
    winners = [(alias, instance) for priority, alias, instance in candidates if priority == best]
    if len(winners) > 1:
        names = ", ".join(repr(alias) for alias, _ in winners)
        raise ConfigurationError(f"accelerator='auto' finds several equally good accelerators ({names}): name one")
    alias, instance = winners[0]
    if unusable:
        notes.append(f"accelerator='auto' takes {alias!r}; installed but unusable: {'; '.join(unusable)}")
    return Part("accelerator", alias, instance, "accelerator='auto': the best one available here")


# -- strategy ------------------------------------------------------------------------------------------------


def _strategy(
    request: Request, strategy: Strategy | None, accelerator: Accelerator, num_devices: int, num_nodes: int
) -> Part:
    if strategy is not None:
        return Part("strategy", _own_alias(strategy), strategy, "given as an object")
    asked = str(request.strategy).lower()
    if asked == "auto":
        several = num_devices > 1 or num_nodes > 1
        alias = accelerator.default_parallel_strategy if several else accelerator.default_strategy
        count = f"{num_devices} device(s) on {num_nodes} node(s)"
        return _from_alias("strategy", alias, f"{count} and no strategy named: {accelerator.name}'s default")
    alias = _substitute("strategy", asked, accelerator)
    reason = f"strategy={request.strategy!r}"
    if alias != asked:
        reason += f", which on {accelerator.name} means {alias}"
    return _from_alias("strategy", alias, reason)


def _substitute(kind: str, alias: str, accelerator: Accelerator) -> str:
    return accelerator.substitutes.get(kind, {}).get(alias, alias)


# -- precision, checkpoint IO, cluster environment -----------------------------------------------------------


def _precision(request: Request, given: dict[str, Any], strategy: Strategy, accelerator: Accelerator) -> Part:
    asked = request.precision
    if isinstance(asked, int) and not isinstance(asked, bool):
        asked = str(asked)
    sources = {
        "precision=": asked,
        "plugins=": given.get("precision"),
        f"{strategy!r}": strategy._precision,
    }
    named = {where: value for where, value in sources.items() if value is not None}
    if len(named) > 1 and len({id(value) for value in named.values()}) > 1:
        listing = " and ".join(f"{value!r} ({where})" for where, value in named.items())
        raise ConfigurationError(f"the precision is given more than once: {listing}; give it in one place")
    where, value = next(iter(named.items()), ("", "32-true"))
    reason = f"given by {where}" if where else "the default"
    if isinstance(value, str):
        alias = _substitute("precision", value.lower(), accelerator)
        return _from_alias("precision", alias, f"precision={value!r}" if where == "precision=" else reason)
    instance = _instance("precision", value)
    return Part("precision", _own_alias(instance), instance, reason)


def _simple_part(kind: str, default: str, given: dict[str, Any], inside: Any, accelerator: Accelerator) -> Part:
    value = given.get(kind)
    if value is not None and inside is not None and value is not inside:
        raise ConfigurationError(
            f"the {kind} is given twice: {value!r} (plugins=) and {inside!r} (inside the strategy); give one"
        )
    value = inside if value is None else value
    if value is None:
        return _from_alias(kind, _substitute(kind, default, accelerator), "the default")
    if isinstance(value, str):
        return _from_alias(kind, value, "plugins=")
    instance = _instance(kind, value)
    return Part(kind, _own_alias(instance), instance, "given as an object")


def _environment(given: dict[str, Any], strategy: Strategy) -> Part | None:
    kind = "cluster_environment"
    inside = strategy.cluster_environment
    if given.get(kind) is not None or inside is not None:
        return _simple_part(
            kind, "local", given, inside, strategy.accelerator if strategy._accelerator else Accelerator()
        )
    if not strategy.multi_device:
        return None
    found: list[tuple[int, str]] = []
    for alias in registry.aliases(kind):
        try:
            entry = registry.find(kind, alias)
        except LookupError:
            continue
        if entry.component.alias == alias and entry.availability() and entry.load().detect():
            found.append((entry.load().priority, alias))
    if not found:
        return _from_alias(kind, "local", "no cluster detected")
    best = max(priority for priority, _ in found)
    winners = [alias for priority, alias in found if priority == best]
    if len(winners) > 1:
        raise ConfigurationError(
            f"several cluster environments say they started this process ({', '.join(map(repr, winners))}): "
            "choose one with plugins="
        )
    return _from_alias(kind, winners[0], "detected from the environment")


# -- do they fit? --------------------------------------------------------------------------------------------


def _check_fit(accelerator: Part, strategy: Part, precision: Part, num_devices: int, num_nodes: int) -> None:
    hardware: Accelerator = accelerator.value
    chosen: Strategy = strategy.value
    if not chosen.multi_device and (num_devices > 1 or num_nodes > 1):
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} uses one device, but {num_devices} device(s) on {num_nodes} node(s) were "
            f"asked for: use devices=1, or a strategy for several such as {hardware.default_parallel_strategy!r}"
        )
    if chosen.accelerators is not None and accelerator.alias not in chosen.accelerators:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} works on accelerator {', '.join(map(repr, sorted(chosen.accelerators)))} "
            f"(got {accelerator.alias!r})"
        )
    for owner, allowed in (
        (f"accelerator {accelerator.alias!r}", hardware.precisions),
        (f"strategy {strategy.alias!r}", chosen.precisions),
    ):
        if allowed is not None and precision.value.alias not in allowed and precision.alias not in allowed:
            raise UnsupportedCombinationError(
                f"{owner} does not compute in precision {precision.alias!r}: it knows {', '.join(map(repr, sorted(allowed)))}"
            )


def _launcher(
    strategy: Strategy, environment: Part | None, local: int, num_nodes: int, external: bool
) -> tuple[str, str]:
    if external and environment is not None:
        return "none", f"{environment.alias} has started the processes"
    if local == 1 and num_nodes == 1:
        return "none", "one process: this one"
    return str(getattr(strategy, "start_method", "own")), f"{local} process(es) on this node, started by torchhal"
