"""ENV-70 to ENV-73: unequal nodes, shells of a job, hosts of other names, and variables of the user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from torchhal.cluster.base import RanksNotMetError
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._cluster_world import known_numbers, numbers, on_every_rank, under_host_name, world_of
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import ROLES, LauncherWorld, Layout, Table

_UNEVEN: Final = (Layout((3, 1)), Layout((3, 1), cyclic=True))
_USER: Final = {
    "MASTER_ADDR": "n7", "MASTER_PORT": "29777", "RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "19", "NODE_RANK": "9",
    "LOCAL_WORLD_SIZE": "19", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "7",
}  # fmt: skip
"""Variables that a user has set for something else."""


@check("ENV-70", since="0.2", needs=["table"], after=("ENV-03", "ENV-04"))
def numbers_of_unequal_nodes(context: CheckContext) -> None:
    """On nodes of three processes and of one, each number that has a variable of its own is that variable's.

    The variables are those of two nodes of two with other values, where each holds a rank or a size by itself.

    Why: rank // local_world_size is the node where all nodes are as large, and another one where they are not.
    Fix: take each number from its own variable.
    """
    if any(not one.layout.is_even for one in context.component.worlds.values()):
        raise NotApplicable("ENV-20 has the launcher's own variables on unequal nodes")
    for world in derived_worlds(context):
        how = "in turn" if world.layout.cyclic else "one after the other"
        for rank, got in enumerate(on_every_rank(context, world, numbers)):
            same(f"the numbers of global rank {rank} on nodes of 3 and 1, dealt {how}", got, world.numbers(rank))


def derived_worlds(context: CheckContext) -> list[LauncherWorld]:
    """Return jobs of unequal nodes, made of the variables of two nodes of two.

    Raises:
        NotApplicable: there are no such nodes, or it isn't known what a variable would be.
    """
    world = world_of(context)
    if str(world.layout) != "2+2":
        raise NotApplicable("the launcher has no two nodes of two processes")
    roles = _roles(context, world.tables)
    return [
        LauncherWorld(layout, tuple(_table(world.tables, roles, layout, rank) for rank in range(4)))
        for layout in _UNEVEN
    ]


def _roles(context: CheckContext, tables: Sequence[Table]) -> dict[str, str]:
    """Return what each variable of a job of 2 + 2 holds: the name of a number.

    Raises:
        NotApplicable: a variable holds a size in another form, or one of the four numbers has no variable.
    """
    roles = {}
    for name, value in tables[0].items():
        values = tuple(table.get(name, "") for table in tables)
        if values in ROLES:
            roles[name] = ROLES[values]
        elif values == ("2",) * 4:
            roles[name] = _size_in(context, tables[0], name)
        elif set(values) != {"4"} and any(text in value for text in ("2", "4")) and not _is_name(name, value):
            raise NotApplicable(f"what {name} is on unequal nodes isn't known")
    if missing := {"global_rank", "local_rank", "node_rank", "local_world_size"} - set(roles.values()):
        raise NotApplicable(f"no variable holds {', '.join(sorted(missing))} alone")
    return roles


def _is_name(name: str, value: str) -> bool:
    """Return whether a variable holds a host, a port or the name of the job, whatever digits these have."""
    return name.endswith(("ADDR", "HOST", "HEAD", "PORT", "ID", "NAME")) and "(" not in value


def _size_in(context: CheckContext, table: Table, name: str) -> str:
    """Return which size a variable of value 2 holds: that which is 1 when it is."""
    with variables({**table, name: "1"}):
        environment = context.create()
        for size in ("local_world_size", "num_nodes"):
            with contextlib.suppress(ConfigurationError):
                if getattr(environment, size)() == 1:
                    return size
    return ""


def _table(tables: Sequence[Table], roles: Mapping[str, str], layout: Layout, rank: int) -> Table:
    """Return the variables of ``rank`` of a job of ``layout``, whose node was in the job of the tables too."""
    values = LauncherWorld(layout, ()).numbers(rank)
    of_node = tables[2 * values["node_rank"]]  # what else differs, such as the name of its host, is the node's
    known = {name: str(values[role]) for name, role in roles.items() if role in values}
    return {**of_node, **known}


@check("ENV-71", since="0.2", needs=["table"], after=("ENV-02", "ENV-13"))
def shell_of_the_job(context: CheckContext) -> None:
    """detect() is False where nothing is set but the job's number and hosts, as in a shell inside of its allocation.

    The variables are those of its launcher that are the same on all ranks and whose names end in JOB_ID, JOBID or
    NODELIST.

    Why: a shell or notebook inside of an allocation has the variables of the job, and no rank.
    Fix: ask for a variable of the process, such as its rank.
    """
    first, *others = context.component.own_tables
    shared = {name: value for name, value in first.items() if all(table.get(name) == value for table in others)}
    of_job = {name: value for name, value in shared.items() if name.endswith(("JOB_ID", "JOBID", "NODELIST"))}
    if not of_job:
        raise NotApplicable("no variable of its launcher is known to be the job's")
    for some in (*([name] for name in sorted(of_job)), sorted(of_job)):
        with variables({name: of_job[name] for name in some}):
            found = context.component.cls.detect()
        told = f"detect() where only {', '.join(some)} is set, as in a shell of the job, must be False"
        require(found is False, f"{told} (got {found!r})")


@check("ENV-72", since="0.2", needs=["table"], after=("ENV-07",))
def meeting_place_on_each_host(context: CheckContext) -> None:
    """main_address is the host of rank 0 on every rank, whatever host that rank is on.

    Why: the name of the own host is right in every test on one machine; the second node waits for itself.
    Fix: take the address from a variable of the job, or from the first of its list of hosts.
    """
    world = world_of(context)
    places = {}
    for rank, table in enumerate(world.tables):
        host = f"host-{world.layout.places[rank].node_rank}.acme"
        met = contextlib.suppress(RanksNotMetError)  # join() determines it
        with variables(table), under_host_name(host), met:
            places[rank] = context.create().main_address
    told = "; ".join(f"{address!r} on global rank {rank}" for rank, address in places.items())
    require(len(set(places.values())) <= 1, f"main_address must be the same on all hosts (got {told})")


@check("ENV-73", since="0.2", needs=["table"], after=("ENV-10",))
def variables_of_the_user(context: CheckContext) -> None:
    """teardown() leaves the variables that the launcher and the user have set, whatever they are named.

    It does so after configure() and set_rendezvous() too, and in a process that has never asked for a number.

    Why: the second fit of a script found neither MASTER_ADDR nor MASTER_PORT.
    Fix: restore what this object has changed, from what it was before.
    """
    table = context.component.own_tables[1]
    uses: dict[str, Any] = {
        "without use": lambda environment: None,
        "after its numbers were asked": known_numbers,
        "after configure()": partial(_configure, nodes=len(world_of(context).layout.sizes)),
    }
    for when, use in uses.items():
        for names in (set(), set(_USER) - set(table)):
            with variables({**{name: _USER[name] for name in names}, **table}):
                before = dict(os.environ)
                environment = context.create()
                with contextlib.suppress(ConfigurationError):  # the user's variables may contradict the launcher's
                    use(environment)
                environment.teardown()
                gone = {name: value for name, value in before.items() if os.environ.get(name) != value}
                told = ", ".join(f"{name}={value}, now {os.environ.get(name)!r}" for name, value in gone.items())
                require(not gone, f"teardown() {when} changed {told}")


def _configure(environment: Any, nodes: int) -> None:
    environment.configure(num_nodes=nodes, local_world_size=environment.local_world_size())
    environment.set_rendezvous("n9", 1234)
