"""Resolve the user's arguments to a Plan: a pure function over names, objects, environment and availabilities.

Nothing is started, initialised or written: the same request in the same environment gives the same Plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torchhal._terminal import printable
from torchhal.accelerators import Accelerator
from torchhal.cluster._job import current_job
from torchhal.cluster.base import ClusterEnvironment, RanksNotMetError
from torchhal.composition import Composition
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal.resolve._accelerator_choice import choose_accelerator
from torchhal.resolve._alias_options import read_alias
from torchhal.resolve._compatibility import check_parts
from torchhal.resolve._launcher_choice import choose_environment, interactive_alias, launcher
from torchhal.resolve._plan import Plan, Request, ResolvedComponent
from torchhal.resolve._refusals import availability_of, check_fit, check_fits, composition_of
from torchhal.resolve._user_arguments import (
    apply_accelerator_default,
    choose_component,
    component_from_instance,
    from_alias,
    group_by_kind,
)
from torchhal.strategies import Strategy

__all__ = [
    "Plan",
    "Request",
    "ResolvedComponent",
    "availability_of",
    "check_fit",
    "composition_of",
    "resolve",
]


def resolve(
    request: Request, *, on_environment_chosen: Callable[[ClusterEnvironment], None] = lambda environment: None
) -> Plan:
    """Choose five components, devices and a launcher, or raise before anything starts.

    Args:
        request: the Trainer's hardware arguments.
        on_environment_chosen: called with the cluster environment, before any later check can raise.

    Raises:
        ConfigurationError: an argument outside its domain, of a wrong type too, or a conflict between two.
        UnsupportedCombinationError: two components that don't fit each other.
        AcceleratorUnavailableError: an accelerator requested by name that can't be used here.
        UnknownAliasError, AmbiguousAliasError, ComponentError: from the registry.
    """
    request = replace(
        request,
        accelerator=read_alias("accelerator", request.accelerator),
        strategy=read_alias("strategy", request.strategy),
        precision=read_alias("precision", request.precision),
    )
    asked_nodes = request.num_nodes
    if not _is_auto(asked_nodes) and (
        isinstance(asked_nodes, bool) or not isinstance(asked_nodes, int) or asked_nodes < 1
    ):
        raise ConfigurationError(f"'num_nodes' must be an int of at least 1, or 'auto' (got {asked_nodes!r})")
    notes: list[str] = []
    plugins = group_by_kind(request.plugins)
    given: ResolvedComponent | None = None
    if not isinstance(request.strategy, str):
        given = component_from_instance("strategy", request.strategy, "given as an object")

    accelerator = choose_accelerator(request, None if given is None else given.value, notes)
    hardware: Accelerator = accelerator.value

    def sources(kind: str) -> dict[str, object]:
        inside = {} if given is None else {f"inside {given.value!r}": given.value.given[kind]}
        return {"plugins=": plugins.get(kind), **inside}

    environment = choose_environment(sources("cluster_environment"), hardware, notes)
    on_environment_chosen(environment.value)
    is_given = any(value is not None for value in sources("cluster_environment").values())
    external = bool(environment.value.creates_processes_externally)
    if said := current_job().check():
        notes.append(said)
    if external:
        notes.extend(environment.value.recommendations())
    left_to_launcher: set[str] = set()
    num_nodes = 1
    try:
        num_nodes = int(asked_nodes) if not _is_auto(asked_nodes) else environment.value.num_nodes()
    except RanksNotMetError:
        left_to_launcher.add("num_nodes")
    owns_launch = "owns_launch" in environment.value.features
    num_workers = environment.value.num_workers if owns_launch else None
    started = environment.value.world_size() if external else num_workers or 1

    one_each = num_workers is not None and _is_auto(request.devices)
    indices = hardware.parse_devices(1 if one_each else request.devices)
    if not indices:
        raise ConfigurationError(
            f"'devices' must ask for at least one device (got {request.devices!r}, of which accelerator "
            f"{accelerator.alias!r} has none here)"
        )
    several = len(indices) > 1 or num_nodes > 1 or started > 1 or owns_launch
    count = f"{len(indices)} device(s) on {num_nodes} node(s)"
    strategy = _strategy(request, given, hardware, environment, several, count)
    chosen: Strategy = strategy.value
    devices_reason = f"one for each of {num_workers} workers" if one_each else f"devices={request.devices!r}"
    if _is_auto(request.devices) and external and chosen.multi_device:
        try:
            indices, devices_reason = _devices_of_processes(chosen, accelerator, environment, indices)
        except RanksNotMetError:
            left_to_launcher.add("devices")
            devices_reason = f"devices='auto': one for each process that {environment.alias} has started on this node"

    asked = request.precision
    if isinstance(asked, int) and not isinstance(asked, bool):
        asked = str(asked)
    precision = choose_component("precision", "32-true", {"precision=": asked, **sources("precision")}, hardware)
    checkpoint_io = choose_component("checkpoint_io", chosen.default_checkpoint_io, sources("checkpoint_io"), hardware)

    check_parts(accelerator, strategy, precision, environment, len(indices), num_nodes)
    devices = tuple(hardware.get_parallel_devices(indices))
    local = chosen.num_local_processes(len(indices))
    world_size = started if external or num_workers else local * num_nodes
    needs_environment = chosen.multi_device or is_given
    check_fits(
        Composition(
            accelerator=hardware,
            precision=precision.value,
            checkpoint_io=checkpoint_io.value,
            cluster_environment=environment.value if needs_environment else None,
            strategy=chosen,
            devices=devices,
            num_nodes=None if "num_nodes" in left_to_launcher else num_nodes,
            world_size=world_size,
        )
    )
    # A process of an earlier Trainer's launch may create one that it never runs: only the launched one is checked.
    if launched_by() is None and (chosen.multi_device or not external):
        with suppress(RanksNotMetError):  # the rest is compared when a run begins
            environment.value.validate_settings(num_devices=local, num_nodes=num_nodes)
    launcher_name, launcher_reason = launcher(strategy, environment, accelerator, local, num_nodes)
    return Plan(
        accelerator=accelerator,
        precision=precision,
        checkpoint_io=checkpoint_io,
        cluster_environment=environment if needs_environment else None,
        strategy=strategy,
        device_indices=tuple(indices),
        devices=devices,
        devices_reason=devices_reason,
        num_nodes=None if "num_nodes" in left_to_launcher else num_nodes,
        world_size=world_size,
        launcher=launcher_name,
        launcher_reason=launcher_reason,
        left_to_launcher=frozenset(left_to_launcher),
        notes=tuple(map(printable, notes)),
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def _strategy(
    request: Request,
    given: ResolvedComponent | None,
    hardware: Accelerator,
    environment: ResolvedComponent,
    several: bool,
    count: str,
) -> ResolvedComponent:
    if given is not None:
        return given
    asked: str = request.strategy  # type: ignore[assignment]
    if _is_auto(asked):
        alias, where = hardware.default_strategy, ""
        if several:
            alias, where = interactive_alias(hardware.default_parallel_strategy, environment, hardware)
        return from_alias("strategy", alias, f"{count} and no strategy named: {hardware.name}'s default{where}")
    alias = apply_accelerator_default("strategy", asked, hardware)
    means = "" if alias == asked else f", which on {hardware.name} means {alias}"
    return from_alias("strategy", alias, f"strategy={asked!r}{means}")


def _devices_of_processes(
    strategy: Strategy, accelerator: ResolvedComponent, environment: ResolvedComponent, indices: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """Return ``devices="auto"`` where an external launcher has started the processes.

    One for each process, if the strategy works that way.
    """
    local = environment.value.local_world_size()
    reason = f"devices='auto': {environment.alias} started {local} process(es) on this node"
    if strategy.num_local_processes(len(indices)) == local or strategy.num_local_processes(local) != local:
        return indices, reason
    try:
        return accelerator.value.parse_devices(local), reason
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{environment.alias} started {local} process(es) on this node, each of which needs a device: {error}"
        ) from error
