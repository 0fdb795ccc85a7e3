"""Call functions with a cluster environment on every rank of a simulated job, after the ranks have met if need be."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final
from unittest import mock

from torchhal.cluster import ClusterEnvironment
from torchhal.cluster.base import RanksNotMetError
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import same
from torchhal_conformance._check import MissingRequirement
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import LauncherWorld, Table
from torchhal_conformance._limits import scaled
from torchhal_conformance._rank_context import exchange

NUMBERS: Final = ("world_size", "global_rank", "local_rank", "node_rank", "local_world_size")
JOIN_TIMEOUT: Final = 20.0
"""Seconds that the ranks of a simulated job have to meet."""


def numbers(environment: ClusterEnvironment) -> dict[str, Any]:
    """Return the five numbers of this process, by the names of their methods."""
    return {name: getattr(environment, name)() for name in NUMBERS}


def known_numbers(environment: ClusterEnvironment) -> dict[str, Any]:
    """Return the numbers that this process determines by itself, without those that need :meth:`join`."""
    known = {}
    for name in NUMBERS:
        with contextlib.suppress(RanksNotMetError):
            known[name] = getattr(environment, name)()
    return known


def world_of(context: CheckContext) -> LauncherWorld:
    """Return the job of four ranks that the check is made in; ``needs=["table"]`` says that there is one."""
    world = context.component.world
    assert world is not None
    return world


def require_known(context: CheckContext, told: str, got: dict[str, Any], rank: int) -> None:
    """Fail unless the numbers that a process knows by itself are those of ``rank``; ENV-04 has the others."""
    same(told, got, {name: value for name, value in world_of(context).numbers(rank).items() if name in got})


def needs_join(context: CheckContext, world: LauncherWorld) -> bool:
    """Return whether some rank of ``world`` doesn't know one of its numbers before join()."""
    return any(lacks_numbers(context, table) for table in world.tables)


def lacks_numbers(context: CheckContext, table: Table) -> bool:
    """Return whether a process with these variables doesn't know one of its numbers before join()."""
    with variables(table):
        try:
            environment = context.create()
            numbers(environment)
            environment.num_nodes()
        except RanksNotMetError:
            return True
        except ConfigurationError:  # unequal nodes, whose number the default can't compute; other errors a check shows
            pass
    return False


def on_every_rank(
    context: CheckContext, world: LauncherWorld, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return ``function(environment, *arguments)`` of each rank of ``world``, each with its variables.

    Where the ranks need no join() they are this process, one after the other; else a process for each, on this machine
    under the host names of their nodes. ``function`` stands at the top level of its module.
    """
    if needs_join(context, world):
        return on_joined_ranks(context, world, function, *arguments)
    found = []
    for table in world.tables:
        with variables(table):
            found.append(function(context.create(), *arguments))
    return found


def on_joined_ranks(
    context: CheckContext, world: LauncherWorld, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return ``function(environment, *arguments)`` of each rank of ``world``, in a process for each, after join()."""
    return run_world(context, world, _join_and_call, function, arguments)


def run_world(context: CheckContext, world: LauncherWorld, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return ``function(component, world, port, *arguments)`` of a process for each rank; ``port`` is free."""
    if os.name != "posix":
        raise MissingRequirement("it needs processes made by fork")
    return context.run_on_ranks(
        world.layout.world_size, function, context.component, world, _free_port(), *arguments, timeout=2 * JOIN_TIMEOUT
    )


def _join_and_call(
    component: ComponentUnderTest, world: LauncherWorld, port: int, function: Any, arguments: tuple[Any, ...]
) -> Any:
    rank = int(os.environ["RANK"])
    with variables(world.tables[rank]):
        environment = component.create()
    with meeting_here(environment, world, rank, port):
        environment.join(timedelta(seconds=scaled(JOIN_TIMEOUT)))
    with variables(world.tables[rank]):
        answer = function(environment, *arguments)
    exchange("before what a rank serves is dropped")
    return answer


@contextlib.contextmanager
def meeting_here(environment: ClusterEnvironment, world: LauncherWorld, rank: int, port: int) -> Iterator[None]:
    """Let ``environment`` meet its ranks at ``port`` of this machine, under the host name of its node, for the block.

    The hosts of its variables don't exist: those that hold the address or the port are set to this machine's, and so
    are ``main_address`` and ``main_port``.
    """
    table = world.tables[rank]
    host = f"n{world.layout.places[rank].node_rank + 1}"
    with variables(table):
        try:
            place = {environment.main_address: "127.0.0.1", str(environment.main_port): str(port)}
        except RanksNotMetError:
            place = {}
    own = type(environment)
    here = type(own.__name__, (own,), {"main_address": "127.0.0.1", "main_port": port, "__module__": own.__module__})
    with variables({name: place.get(value, value) for name, value in table.items()}), under_host_name(host):
        environment.__class__ = here
        try:
            yield
        finally:
            environment.__class__ = own


@contextlib.contextmanager
def under_host_name(host: str) -> Iterator[None]:
    """Let this machine have the name ``host`` for the block, by each of Python's functions that return it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(socket, "gethostname", lambda: host))
        stack.enter_context(mock.patch.object(socket, "getfqdn", lambda name="": name or host))
        stack.enter_context(mock.patch.object(platform, "node", lambda: host))
        if hasattr(os, "uname"):
            system = os.uname()
            found = os.uname_result((system.sysname, host, system.release, system.version, system.machine))
            stack.enter_context(mock.patch.object(os, "uname", lambda: found))
        yield


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
