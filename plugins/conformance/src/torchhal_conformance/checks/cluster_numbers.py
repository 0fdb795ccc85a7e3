"""ENV: numbers before a launch, and numbers that no job can have."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from torchhal.cluster import ClusterEnvironment
from torchhal.cluster.base import RanksNotMetError
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._cluster_world import known_numbers, numbers, on_every_rank, world_of
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import Layout

ALONE = {"world_size": 1, "global_rank": 0, "local_rank": 0, "node_rank": 0, "local_world_size": 1}


@check("ENV-40", since="0.2")
def before_a_launch(context: CheckContext) -> None:
    """Where torchhal starts the processes, this one is rank 0 of 1 before the launch.

    creates_processes_externally is False then. configure() changes no number; main_port may be a ConfigurationError
    before the launch. From set_rendezvous() on the world has the processes that were configured, this one
    is rank 0 of them, and they meet at that address and port. A copy is a process that no launcher has started.

    Why: a process that counts ranks which don't exist yet waits for them; one that never counts them trains alone.
    Fix: keep what configure() receives until set_rendezvous().
    """
    with variables():
        environment = context.create()
        if "owns_launch" in environment.features:
            raise NotApplicable("its own launcher starts the processes, and this one has no rank")
        if environment.creates_processes_externally:
            told = "creates_processes_externally is True in a shell, though the strategy starts the processes"
            require(context.component.own_launcher != (), told)
            raise NotApplicable("another launcher starts the processes")
    for size in (3, 2):
        with variables():
            environment = context.create()
            _before(environment, "before configure()")
            environment.configure(num_nodes=1, local_world_size=size)
            _before(environment, "after configure()")
            environment.set_rendezvous("n9", 1234)
            launched = {**ALONE, "world_size": size, "local_world_size": size}
            same("the numbers after set_rendezvous()", numbers(environment), launched)
            place = (environment.main_address, environment.main_port)
            same("where the ranks meet after set_rendezvous()", place, ("n9", 1234))
            _before(pickle.loads(pickle.dumps(environment)), "of a copy, which no launcher has started")


def _before(environment: ClusterEnvironment, when: str) -> None:
    """Check an environment before the launch: it is alone, and its port may not be known yet."""
    same(f"the numbers {when}", numbers(environment), ALONE)
    same(f"the number of nodes {when}", environment.num_nodes(), 1)
    address = environment.main_address
    require(isinstance(address, str) and address, f"main_address {when} must be a host (got {address!r})")
    with contextlib.suppress(ConfigurationError):  # no process has to connect yet
        port = environment.main_port
        require(type(port) is int and 1 <= port <= 65535, f"main_port {when} must be a port (got {port!r})")


@check("ENV-41", since="0.2", needs=["table"])
def impossible_numbers(context: CheckContext) -> None:
    """A number that no job can have is a ConfigurationError: below zero, no process at all, a rank beyond its world.

    The error may come from a number, or from validate_settings.

    Why: a rank of -1 is the last element of every list, and a rank beyond the world waits for ever.
    Fix: torchhal.cluster.read_int with its bounds, and a comparison in validate_settings.
    """
    for rank, table in enumerate(context.component.own_tables):
        for name, value in ((name, value) for name in table for value in ("-1", "0", "2", "3", "4", "97")):
            if not table[name].isdecimal() or table[name] == value:
                continue
            told = f"{name}={value} on global rank {rank}"
            with variables({**table, name: value}):
                found = _told(context, told)
            if found is None:
                continue
            world = found["world_size"]
            local = found.get("local_world_size", world)  # known after join()
            require(found.pop("num_nodes", 1) >= 1, f"{told}: there is no node")
            require(min(found.values()) >= 0 and min(world, local) >= 1, f"{told}: the numbers are {found}")
            bounded = found["global_rank"] < world and found.get("local_rank", 0) < local
            require(bounded, f"{told}: the numbers contradict each other: {found}")


def _told(context: CheckContext, told: str) -> dict[str, int] | None:
    """Return the numbers, or None where they are refused."""
    cls = context.component.cls
    try:
        if not cls.detect():
            return None
        environment = context.create()
        found = known_numbers(environment)
        local = found.get("local_world_size", found["world_size"])
        nodes = len(world_of(context).layout.sizes)
        with contextlib.suppress(RanksNotMetError):
            nodes = found["num_nodes"] = environment.num_nodes()
            whole = nodes != 1 or local == found["world_size"]
            require(whole, f"{told}: one node with {local} of {found['world_size']} processes")
        with contextlib.suppress(RanksNotMetError):
            environment.validate_settings(num_devices=found.get("local_world_size", 1), num_nodes=nodes)
    except ConfigurationError:
        return None
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(f"{told}: must raise ConfigurationError (got {type(error).__name__}: {error})") from error
    return found


@check("ENV-42", since="0.2", needs=["table"], after=("ENV-03", "ENV-04"))
def nodes(context: CheckContext) -> None:
    """num_nodes() is 2 on every process of two nodes; node_of() tells ranks of one node from the others, or is None.

    Where a launcher has no such nodes, num_nodes() is the number of those in its table.

    validate_settings accepts the job as it is on every process.

    Why: num_nodes="auto" in one process is another job than in the next.
    Fix: read the number of nodes; return None from node_of() where no variable says it.
    """
    world = world_of(context)
    for rank, (count, of) in enumerate(on_every_rank(context, world, _nodes_of_ranks, world.layout)):
        same(f"num_nodes() on global rank {rank}", count, len(world.layout.sizes))
        if None not in of:
            nodes = [place.node_rank for place in world.layout.places]
            alike = [[one == other for other in of] for one in of]
            right = [[one == other for other in nodes] for one in nodes]
            same(f"which ranks share a node, by node_of() on global rank {rank}", alike, right)


def _nodes_of_ranks(environment: ClusterEnvironment, layout: Layout) -> tuple[int, list[Any]]:
    count = environment.num_nodes()
    if count == len(layout.sizes):
        environment.validate_settings(num_devices=environment.local_world_size(), num_nodes=count)
    return count, [environment.node_of(other) for other in range(layout.world_size)]


@check("ENV-43", since="0.2", needs=["table"])
def job_settings(context: CheckContext) -> None:
    """stop_signals keeps what was set; run_again returns a string; one without "owns_launch" makes no launcher.

    job_id() is one string on all ranks.

    Why: an environment that loses its signals saves nothing when the scheduler ends the job.
    Fix: call super() in what is overridden.
    """
    ids: set[Any] = set()
    for table in context.component.own_tables:
        with variables(table):
            ids.add(context.create().job_id())
    require(len(ids) == 1 and isinstance(ids.pop(), str), "job_id() must be one str on all ranks")
    with variables(context.component.own_tables[3]):
        environment = context.create()
        require(all(type(one) is int for one in environment.stop_signals), "stop_signals must be ints")
        environment.stop_signals = [10, 12]
        same("stop_signals that were set", environment.stop_signals, (10, 12))
        again = environment.run_again(10, continues=False)
        require(isinstance(again, str), f"run_again must return a str (got {again!r})")
        if "owns_launch" not in environment.features:
            raises(
                "make_launcher() without 'owns_launch'",
                ConfigurationError,
                lambda: environment.make_launcher(device_type="cpu", prepare=lambda: None),
            )
