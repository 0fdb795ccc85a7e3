"""ENV-50 to ENV-52: the numbers of ranks in jobs of several layouts, and how ranks meet that no variable describes."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from datetime import timedelta
from typing import Any, Final

from torchhal.cluster import ClusterEnvironment
from torchhal.errors import ConfigurationError, TorchhalError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._cluster_world import (
    JOIN_TIMEOUT,
    known_numbers,
    meeting_here,
    needs_join,
    numbers,
    on_every_rank,
    run_world,
    world_of,
)
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import LauncherWorld, Layout
from torchhal_conformance._limits import scaled
from torchhal_conformance._rank_context import exchange

SHORT: Final = 1.0
"""Seconds that the ranks wait for one that doesn't come."""
MARGIN: Final = 4.0
"""Seconds that they may take longer on a busy machine."""


@check("ENV-50", since="0.2", needs=["table"], after=("ENV-03", "ENV-04"))
def other_layouts(context: CheckContext) -> None:
    """In a job of any layout every rank has its numbers, and all meet at one place: one node, one rank a node, 2 + 1.

    num_nodes() is the number of nodes on every rank; on unequal nodes it may be a ConfigurationError. Where the nodes
    are equal, validate_settings accepts the job as it is.

    Why: a number that is right on two nodes with two ranks each is often the right one of two others.
    Fix: take each number from the variable of its own; override num_nodes() where the launcher says it.
    """
    main = world_of(context)
    others = [world for world in context.component.worlds.values() if world is not main and world.layout != main.layout]
    if not others:
        raise NotApplicable("no other layout of its launcher is known: give one in its tables, such as '1+1+1'")
    for world in others:
        layout, places = world.layout, set()
        for rank, (detected, got, nodes, place) in enumerate(on_every_rank(context, world, _survey, layout)):
            told = f"on global rank {rank} of a job of {layout}"
            require(detected is True, f"detect() must be True {told} (got {detected!r})")
            same(f"the numbers {told}", got, world.numbers(rank))
            counted = nodes == len(layout.sizes) or (nodes is None and not layout.is_even)
            require(counted, f"num_nodes() must be {len(layout.sizes)} {told} (got {nodes or 'a ConfigurationError'})")
            places.add(place)
        require(len(places) == 1, f"the ranks of a job of {layout} would meet at different places: {sorted(places)}")


def _survey(environment: ClusterEnvironment, layout: Layout) -> tuple[Any, dict[str, Any], int | None, tuple[Any, Any]]:
    """Return detect(), the numbers, num_nodes(), None for a ConfigurationError, and where the ranks meet."""
    nodes: int | None = None
    with contextlib.suppress(ConfigurationError):
        nodes = environment.num_nodes()
    if layout.is_even:
        environment.validate_settings(num_devices=layout.sizes[0], num_nodes=len(layout.sizes))
    place = (environment.main_address, environment.main_port)
    return type(environment).detect(), numbers(environment), nodes, place


@check("ENV-51", since="0.2", needs=["table", "posix"], after=("ENV-03", "ENV-04"))
def ranks_meet(context: CheckContext) -> None:
    """join() determines the numbers that no variable holds, each time that all ranks call it, and no others change.

    A copy by pickle in another process lacks them, or has those of that process. os.environ is as it was, after
    teardown() too.

    Why: a place that was exchanged once travelled to the workers, and each took itself for rank 0's neighbour.
    Fix: derive from ExternalEnvironment; leave what was exchanged out of the pickled state.
    """
    worlds = [world for world in context.component.worlds.values() if needs_join(context, world)]
    if not worlds:
        raise NotApplicable("variables hold all numbers")
    for world in worlds:
        layout, copies = world.layout, []
        for rank, (before, first, second, written, copy, removed) in enumerate(run_world(context, world, _join_twice)):
            told = f"on global rank {rank} of a job of {layout}"
            right = world.numbers(rank)
            same(f"the numbers before join() {told}", before, {name: right[name] for name in before})
            same(f"the numbers after join() {told}", first, right)
            same(f"the numbers after another join() {told}", second, right)
            require(not written, f"join() wrote {', '.join(written)} to os.environ {told}")
            require(not removed, f"teardown() after join() changed {', '.join(removed)} in os.environ {told}")
            copies.append(copy)
        for rank in range(layout.world_size):
            _check_copy(world, copies[rank], (rank + 1) % layout.world_size)


def _check_copy(world: LauncherWorld, copy: bytes, rank: int) -> None:
    with variables(world.tables[rank]):
        got = known_numbers(pickle.loads(copy))
    right = world.numbers(rank)
    told = f"the numbers of another rank's copy on global rank {rank} of a job of {world.layout}"
    same(told, got, {name: right[name] for name in got})


def _join_twice(component: ComponentUnderTest, world: LauncherWorld, port: int) -> tuple[Any, ...]:
    rank = int(os.environ["RANK"])
    with variables(world.tables[rank]):
        environment = component.create()
        before = known_numbers(environment)
    written: list[str] = []

    def join() -> dict[str, Any]:
        with meeting_here(environment, world, rank, port):
            kept = dict(os.environ)
            environment.join(timedelta(seconds=scaled(JOIN_TIMEOUT)))
            written.extend(_changed(kept))
        with variables(world.tables[rank]):
            return numbers(environment)

    first, second = join(), join()
    with variables(world.tables[rank]):
        try:
            copy = pickle.dumps(environment)
        except Exception as error:
            raise CheckFailed(f"it doesn't pickle after join() ({type(error).__name__}: {error})") from error
    exchange("before teardown()")  # what one rank serves may be needed by another that is still in join()
    with meeting_here(environment, world, rank, port):
        kept = dict(os.environ)
        environment.teardown()
        removed = _changed(kept)
    return before, first, second, written, copy, removed


def _changed(kept: dict[str, str]) -> list[str]:
    """Return the names of the variables that are not as in ``kept``."""
    return sorted(name for name in {*kept, *os.environ} if kept.get(name) != os.environ.get(name))


@check("ENV-52", since="0.2", needs=["table", "posix"], after=("ENV-51",))
def rank_is_missing(context: CheckContext) -> None:
    """Where a rank doesn't come to join(), it is an error of torchhal on the others, no later than the timeout.

    Why: a job of which one process had died in its imports stood still till the end of its allocation.
    Fix: hand the timeout on to what waits; torchhal.distributed's meetings name the missing ranks.
    """
    worlds = [world for world in context.component.worlds.values() if needs_join(context, world)]
    if not worlds:
        raise NotApplicable("variables hold all numbers")
    world = world_of(context) if world_of(context) in worlds else worlds[0]
    try:
        ended = run_world(context, world, _join_but_for_the_last)
    finally:
        context.restart_ranks(world.layout.world_size)  # they are at different meetings now
    for rank, (seconds, kind, is_own) in enumerate(ended[:-1]):
        require(kind, f"join() returned on global rank {rank}, though the last rank never came")
        require(is_own, f"join() must raise an error of torchhal.errors on global rank {rank} (got {kind})")
        took = f"join() took {seconds:.1f} s on global rank {rank}, with a timeout of {scaled(SHORT):g}"
        require(seconds < scaled(SHORT + MARGIN), took)


def _join_but_for_the_last(component: ComponentUnderTest, world: LauncherWorld, port: int) -> tuple[float, str, bool]:
    """Return how long join() took, and the error: its class and message, and whether it is one of torchhal's."""
    rank = int(os.environ["RANK"])
    if rank == world.layout.world_size - 1:
        return 0.0, "", False
    with variables(world.tables[rank]):
        environment = component.create()
    start = time.monotonic()
    try:
        with meeting_here(environment, world, rank, port):
            environment.join(timedelta(seconds=scaled(SHORT)))
    except Exception as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}", isinstance(error, TorchhalError)
    return time.monotonic() - start, "", False
