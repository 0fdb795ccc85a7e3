"""Choose what starts the processes: the cluster environment, and the launcher that follows from it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.cluster._env_vars import given
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.launchers._command import why_no_script
from torchhal.registry import RegistryEntry
from torchhal.resolve._plan import ResolvedComponent
from torchhal.resolve._refusals import availability_of
from torchhal.resolve._user_arguments import apply_accelerator_default, choose_component, from_alias, from_entry
from torchhal.strategies import Strategy

KIND = "cluster_environment"
VARIABLE = "TORCHHAL_CLUSTER"
"""An alias, or "none": switches detection off without a change to the script."""


def choose_environment(sources: Mapping[str, Any], accelerator: Accelerator, notes: list[str]) -> ResolvedComponent:
    """Return the environment that is given, or else TORCHHAL_CLUSTER's.

    Without either, the one that detects that it started this process, else "local". Of plugins only those are asked
    whose distribution declares a variable that is set.
    """
    local = apply_accelerator_default(KIND, "local", accelerator)
    if any(value is not None for value in sources.values()):
        return choose_component(KIND, local, sources, accelerator)
    named = given(VARIABLE)
    if named.lower() == "none":
        return from_alias(KIND, local, f"{VARIABLE}={named}: nothing is detected")
    if named:
        return choose_component(KIND, local, {f"{VARIABLE}=": named}, accelerator)
    found: list[tuple[int, RegistryEntry]] = []
    entries, unread = registry.announced_environments()
    notes.extend(unread)
    for entry in entries:
        if not entry.availability():
            continue
        try:
            cls = entry.load()
            if cls.detect():
                if not (available := availability_of(cls)):
                    notes.append(f"{entry} started this process and can't be used here: {available.reason}")
                    continue
                found.append((cls.priority, entry))
        except Exception as error:
            notes.append(f"{entry} could not say whether it started this process: {error}")
    if not found:
        return from_alias(KIND, local, "no cluster detected")
    best = max(priority for priority, _ in found)
    winners = [entry for priority, entry in found if priority == best]
    if len(winners) > 1:
        names = ", ".join(repr(winner.qualified_name) for winner in winners)
        raise ConfigurationError(
            f"several cluster environments say that they started this process ({names}): choose one with plugins="
        )
    return from_entry(winners[0], winners[0].qualified_name, "detected from the environment")


def interactive_alias(alias: str, environment: ResolvedComponent, accelerator: Accelerator) -> tuple[str, str]:
    """Return the alias that replaces the default strategy ``alias`` in an interactive session, and why; else ``alias``.

    A session is interactive where no script can be run again. The replacement has workers that inherit everything,
    since what a cell has defined can't be imported; where they can't be forked, those of spawn, which names what it
    can't send.
    """
    if alias != "ddp" or launched_by() is not None or not why_no_script():
        return alias, ""
    if environment.value.creates_processes_externally or "owns_launch" in environment.value.features:
        return alias, ""
    forks = "fork" in accelerator.start_methods and "fork" in multiprocessing.get_all_start_methods()
    workers = apply_accelerator_default("strategy", "ddp_notebook" if forks else "ddp_spawn", accelerator)
    return workers, ", in a session without a script that could be run again"


def launcher(
    strategy: ResolvedComponent,
    environment: ResolvedComponent,
    accelerator: ResolvedComponent,
    local: int,
    num_nodes: int,
) -> tuple[str, str]:
    """Return the name of the launcher of a node's processes, and the reason.

    Raises an error if the device doesn't work in its processes, or if it can't start any process.
    """
    if environment.value.creates_processes_externally:
        return "none", f"{environment.alias} has started the processes"
    if "owns_launch" in environment.value.features:
        return environment.value.name, f"{environment.alias} starts the processes"
    if local == 1 and num_nodes == 1:
        return "none", "one process: this one"
    chosen: Strategy = strategy.value
    method = str(getattr(chosen, "start_method", "own"))
    allowed = accelerator.value.start_methods
    if method in ("spawn", "fork", "forkserver") and method not in allowed:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} starts its processes by {method!r}, but accelerator {accelerator.alias!r} "
            f"works in processes started by {', '.join(map(repr, sorted(allowed))) or 'nothing but the script'}"
        )
    here = multiprocessing.get_all_start_methods()
    if method in ("spawn", "fork", "forkserver") and method not in here:
        instead = " or ".join(f"'ddp_{other}'" for other in here if other in allowed)
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} starts its processes by {method!r}, which this system doesn't have: use "
            f"{instead or 'one device'}, or 'ddp' in a script"
        )
    if method == "subprocess" and local > 1 and launched_by() is None and (why := why_no_script()):
        raise UnsupportedCombinationError(f"strategy {strategy.alias!r} runs the script once per process, but {why}")
    return method, f"{local} process(es) on this node, started by torchhal"
