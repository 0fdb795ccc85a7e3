"""ENV-06: variables of a launcher that are missing, or hold what no launcher sets."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from torchhal.cluster import ClusterEnvironment
from torchhal.cluster.base import RanksNotMetError
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._cluster_world import known_numbers, require_known, world_of
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables

HUGE: Final = "99999999999"
BROKEN: Final = (
    ("without", None), ("with an empty", ""), ("with a garbled", "x1"), ("with a negative", "-1"),
    ("with a fractional", "1.5"), ("with a blank", "  "), ("with a huge", HUGE),
)  # fmt: skip
"""(words for a message, value) of a variable; None where it is not set."""


@check("ENV-06", needs=["table"], after=("ENV-03", "ENV-04"))
def broken_variables(context: CheckContext) -> None:
    """A missing, empty, garbled or negative variable changes no number, or is a ConfigurationError that names it.

    Nor does the address become that of each node itself. A number that is too large is such an error, or the numbers
    still agree with each other. Without a variable that join() can do without, a number of nodes or local ranks or the
    address is a RanksNotMetError until then; world size and global rank, by which the ranks meet, are as they were.

    Why: KeyError: 'X' doesn't say what should have set it, and a default of 0 makes every process rank 0.
    Fix: torchhal.cluster.read_int and its like.
    """
    world = world_of(context)
    table, right, sizes = world.tables[3], world.numbers(3), world.layout.sizes
    devices = sizes[right["node_rank"]]
    with variables(table):
        known = known_numbers(context.create())
    for name in table:
        for state, value in BROKEN:
            changed = {key: text for key, text in table.items() if key != name}
            if value is not None:
                changed[name] = value
            with variables(changed):
                cls = context.component.cls
                try:
                    if not cls.detect() or (context.component.own_launcher == () and launched_by() is None):
                        continue  # a process that no launcher has started, or that is to start the ranks, is no rank
                    environment = context.create()
                    got = {name: getattr(environment, name)() for name in known}
                    place = (environment.main_address, environment.main_port)
                    if value == HUGE and got != {name: right[name] for name in known}:
                        _validate_if_met(environment, devices, len(sizes))
                except RanksNotMetError as error:
                    require(value is None or not value.strip(), f"{state} {name}: the error must name it (got {error})")
                    _can_meet(f"{state} {name}", environment, right)
                    continue
                except ConfigurationError as error:
                    shown = name in str(error) or (value == HUGE and HUGE in str(error))
                    require(shown, f"{state} {name}: the error must name it (got {error})")
                    continue
                except Exception as error:
                    told = f"{type(error).__name__}: {error}"
                    raise CheckFailed(f"{state} {name}: must raise ConfigurationError (got {told})") from error
                told = f"{state} {name}: the ranks would meet at {place}"
                require(place[0] and 1 <= place[1] <= 65535, told)
                require(len(sizes) == 1 or not _is_loopback(place[0]), f"{told}, which is another host on each node")
                if value == HUGE:  # a larger job, unless the numbers contradict each other
                    _within_bounds(f"{state} {name}", got)
                else:
                    require_known(context, f"the numbers of global rank 3 {state} {name}", got, 3)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _validate_if_met(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    with contextlib.suppress(RanksNotMetError):
        environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)


def _can_meet(told: str, environment: ClusterEnvironment, right: dict[str, int]) -> None:
    """Fail unless ``environment`` has a join() of its own, and the ranks that it needs."""
    own = type(environment).join is not ClusterEnvironment.join
    require(own, f"{told}: RanksNotMetError says that join() determines it, and there is no such join()")
    try:
        got = {"world_size": environment.world_size(), "global_rank": environment.global_rank()}
    except ConfigurationError as error:
        raise CheckFailed(f"{told}: the ranks can't meet without world size and global rank (got {error})") from error
    same(f"the numbers by which the ranks meet {told}", got, {name: right[name] for name in got})


def _within_bounds(told: str, got: dict[str, Any]) -> None:
    """Fail unless each number is an int within the bounds that the others set."""
    require(all(type(value) is int for value in got.values()), f"{told}: every number must be an int (got {got})")
    world = got["world_size"]
    local = got.get("local_world_size", world)
    fits = got["global_rank"] < world and got.get("local_rank", 0) < local <= world
    require(fits and min(got.values()) >= 0, f"{told}: the numbers contradict each other: {got}")
