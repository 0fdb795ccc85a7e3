"""ENV: jobs of one process, nodes that are started by hand, and the place where the ranks meet."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torchhal.cluster.base import RanksNotMetError
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._cluster_world import lacks_numbers, numbers
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import ROLES
from torchhal_conformance.checks.cluster_numbers import ALONE

_SIZES: Final = ("4", "2")
_BY_HAND: Final = {"NODE_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29533"}


def job_of_one(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table of the only process of a job, from those of four on two nodes.

    Raises:
        NotApplicable: a variable may hold a size in a form that is not known.
    """
    changed = {}
    for name, value in tables[0].items():
        values = [table.get(name, "") for table in tables]
        if tuple(values) in ROLES:
            changed[name] = "0"
        elif values in ([size] * 4 for size in _SIZES) or value == "2(x2)":
            changed[name] = "1"
        elif hosts := re.fullmatch(r"([a-z]+)\[(\d+)-\d+\]", value):
            changed[name] = f"{hosts[1]}{hosts[2]}"
        elif set(values) == {value} and len(items := _list_in(value)) in map(int, _SIZES):  # of hosts or addresses
            changed[name] = json.dumps(items[:1]) if value.startswith("[") else items[0]
        elif set(re.findall(r"\d+", value)) & set(_SIZES):
            raise NotApplicable(f"what {name} is in a job of one process isn't known")
        else:
            changed[name] = value
    return changed


def _list_in(value: str) -> list[str]:
    """Return the elements of a list in JSON, or with commas between them."""
    if not value.startswith("["):
        return value.split(",")
    with contextlib.suppress(ValueError):
        return [str(item) for item in json.loads(value)]
    return []


@check("ENV-60", since="0.2", needs=["table"], after=("ENV-03", "ENV-04"))
def one_process(context: CheckContext) -> None:
    """In a job of one process the numbers are those of rank 0 of 1 on one node, and validate_settings accepts it.

    Nothing has to be determined by join(), which changes nothing: there is nobody to meet. A missing variable is a
    ConfigurationError, or changes no number. Rank 0 may then listen on 127.0.0.1. All of that holds for a copy too.

    Why: a script is tried in one process first, and a bound that is off by one refuses just that.
    Fix: allow a size of 1; compare with >= where a rank may not be reached, and with > where a size may.
    """
    table = job_of_one(context.component.own_tables)
    cls = context.component.cls
    with variables(table):
        detected = cls.detect()
    tables = {"one process": table, **{f"one process without {name}": _less(table, {name}) for name in table}}
    if "MASTER_ADDR" in table:
        tables["one process, which listens on 127.0.0.1,"] = {**table, "MASTER_ADDR": "127.0.0.1"}
    harmless = set()
    for told, changed in tables.items():
        missing = set(table) - set(changed)
        with variables(changed):
            if cls.detect() is detected and _accepts(context, told, missing):
                harmless |= missing
    with variables(_less(table, harmless)):
        if cls.detect() is detected:
            _accepts(context, f"one process without {', '.join(sorted(harmless))}", harmless)


def _less(table: Mapping[str, str], names: Set[str]) -> dict[str, str]:
    return {name: value for name, value in table.items() if name not in names}


def _accepts(context: CheckContext, told: str, missing: Set[str]) -> bool:
    """Check an environment of one process; return False where it is refused for a variable that is missing."""
    environment = context.create()
    try:
        _is_alone(told, environment)
        copied = pickle.loads(pickle.dumps(environment))
        environment.join(timedelta(seconds=5))
        _is_alone(f"{told}, after join()", environment)
        _is_alone(f"{told}, of a copy", copied)
    except RanksNotMetError as error:
        raise CheckFailed(f"{told}: the ranks of a job of one have met (got {error})") from error
    except ConfigurationError as error:
        require(any(name in str(error) for name in missing), f"{told}: the job must be accepted (got {error})")
        return False
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(f"{told}: must raise ConfigurationError (got {type(error).__name__}: {error})") from error
    return True


def _is_alone(told: str, environment: Any) -> None:
    same(f"{told}: the numbers", numbers(environment), ALONE)
    same(f"{told}: the number of nodes", environment.num_nodes(), 1)
    environment.validate_settings(num_devices=1, num_nodes=1)


@check("ENV-61", since="0.2", needs=["table"], after=("ENV-07",))
def meeting_place_given(context: CheckContext) -> None:
    """MASTER_ADDR and MASTER_PORT, where the launcher sets them, are where the ranks meet.

    Every port from 1 to 65535 is taken, and any other one is a ConfigurationError that names its variable. An IPv6
    address is given without its brackets. Without one of the two variables there is another place, or such an error.

    Why: a port of 70000 is an OverflowError in a socket, or the port 4464; "[fd00::1]" is a host that nobody knows.
    Fix: torchhal.cluster.read_port and read_address.
    """
    for rank in (0, 3):
        table = context.component.own_tables[rank]
        with variables(table):
            environment = context.create()
            port, address = environment.main_port, environment.main_address
        if "MASTER_ADDR" in table:
            same(f"main_address on rank {rank}", address, table["MASTER_ADDR"])
            for value, host in (("[fd00::1]", "fd00::1"), ("fd00::1", "fd00::1"), ("n9.example", "n9.example")):
                with variables({**table, "MASTER_ADDR": value}):
                    same(f"main_address for MASTER_ADDR={value}", context.create().main_address, host)
        holding = [name for name, value in table.items() if value == str(port)]
        if "MASTER_PORT" in table:
            same(f"main_port on rank {rank}", port, int(table["MASTER_PORT"]))
        for name in holding if len(holding) == 1 else ():
            for number in (1, 65535):
                with variables({**table, name: str(number)}):
                    same(f"main_port for {name}={number}", _port_of(context, f"{name}={number}"), number)
            for number in (0, 65536, 70000):
                with variables({**table, name: str(number)}):
                    raises(f"main_port for {name}={number}", ConfigurationError, partial(_port, context), name)
        for name in {"MASTER_ADDR", "MASTER_PORT"} & table.keys():
            _without(context, name, {key: value for key, value in table.items() if key != name})


def _port(context: CheckContext) -> Any:
    return context.create().main_port


def _port_of(context: CheckContext, told: str) -> Any:
    try:
        return _port(context)
    except ConfigurationError as error:
        raise CheckFailed(f"main_port for {told} must be that port (got {error})") from error


def _without(context: CheckContext, name: str, table: Mapping[str, str]) -> None:
    """Fail unless there is a place without this variable, or an error that names it."""
    with variables(table):
        environment = context.create()
        try:
            address, port = environment.main_address, environment.main_port
        except ConfigurationError as error:
            require(name in str(error), f"without {name}: the error must name it (got {error})")
            return
        except Exception as error:
            raise CheckFailed(f"without {name}: must raise ConfigurationError ({type(error).__name__})") from error
    usable = isinstance(address, str) and address and type(port) is int and 1 <= port <= 65535
    require(usable, f"without {name} the ranks would meet at {(address, port)}")


@check("ENV-62", since="0.2", after=("ENV-40",))
def started_by_hand(context: CheckContext) -> None:
    """Nodes that a user starts by hand, with NODE_RANK, MASTER_ADDR and MASTER_PORT, are the nodes of one job.

    It applies to an environment that detect() finds by these three. From configure() on the numbers are those of the
    node's first process, and the ranks meet at the address of the variables, or of set_rendezvous(). num_nodes() is
    NNODES before. configure() refuses numbers below one and a variable that is missing, garbled or out of range,
    naming it; validate_settings refuses one node, where NODE_RANK is that of another one.

    Why: a second node that nobody counts trains by itself, and both write the same checkpoint.
    Fix: read the three variables in configure(), and the rank of the node from NODE_RANK.
    """
    with variables(_BY_HAND):
        if not context.component.cls.detect():
            raise NotApplicable("it is not found by NODE_RANK, MASTER_ADDR and MASTER_PORT")
        before = context.create()
        raises("num_nodes() without NNODES", ConfigurationError, before.num_nodes, "NNODES")
        raises("one node, with NODE_RANK=1", ConfigurationError, partial(_validate, before, 1), "NODE_RANK")
        before.validate_settings(num_devices=3, num_nodes=2)
    with variables({**_BY_HAND, "NODE_RANK": "0"}):
        context.create().validate_settings(num_devices=3, num_nodes=1)
    for nodes in (1, 2, 3):
        with variables({**_BY_HAND, "NODE_RANK": "0", "NNODES": str(nodes)}):
            same(f"num_nodes() with NNODES={nodes}", context.create().num_nodes(), nodes)
    with variables({**_BY_HAND, "NNODES": "0"}):
        raises("num_nodes() with NNODES=0", ConfigurationError, context.create().num_nodes, "NNODES")
    for node, nodes, local in ((0, 2, 3), (1, 2, 3), (1, 2, 1), (2, 3, 2)):
        told = f"of node {node} of {nodes}, with {local} process(es) each"
        with variables({**_BY_HAND, "NODE_RANK": str(node)}):
            environment = context.create()
            environment.configure(num_nodes=nodes, local_world_size=local)
            right = {"world_size": nodes * local, "global_rank": node * local, "local_rank": 0, "node_rank": node}
            right["local_world_size"] = local
            for when, place in (("configure()", ("n1", 29533)), ("set_rendezvous()", ("n9", 1234))):
                same(f"the numbers {told}, after {when}", numbers(environment), right)
                same(f"num_nodes() {told}, after {when}", environment.num_nodes(), nodes)
                at = (environment.main_address, environment.main_port)
                same(f"where the ranks meet {told}, after {when}", at, place)
                environment.set_rendezvous("n9", 1234)
    _refuses(context)


def _validate(environment: Any, nodes: int) -> None:
    environment.validate_settings(num_devices=3, num_nodes=nodes)


def _refuses(context: CheckContext) -> None:
    """Check what configure() refuses."""
    broken = {"NODE_RANK": (None, "", "x", "-1", "2"), "MASTER_ADDR": (None, ""), "MASTER_PORT": (None, "0", "65536")}
    for name, values in broken.items():
        for value in values:
            table = {key: text for key, text in _BY_HAND.items() if key != name}
            with variables(table, {} if value is None else {name: value}):
                configure = partial(context.create().configure, num_nodes=2, local_world_size=3)
                raises(f"configure() with {name}={value!r}", ConfigurationError, configure, name)
    for wrong in (0, -1):
        for sizes in ({"num_nodes": wrong, "local_world_size": 1}, {"num_nodes": 1, "local_world_size": wrong}):
            with variables():
                raises(f"configure() with {sizes}", ConfigurationError, partial(context.create().configure, **sizes))


@check("ENV-63", since="0.2", needs=["table", "posix"], after=("ENV-03", "ENV-04"))
def ranks_meet(context: CheckContext) -> None:
    """What no variable holds of a process's place join() determines: two ranks of one host know it afterwards.

    Until then a request for it is a RanksNotMetError. A second join() is no second meeting. It applies to an
    environment whose ranks meet at MASTER_ADDR and MASTER_PORT.

    Why: ranks that count themselves differently take the same device, or wait for another number of ranks.
    Fix: exchange the hosts of all ranks in join(), and count the nodes in the order of their lowest rank.
    """
    tables = context.component.own_tables
    by_itself = lacks_numbers(context, tables[0])
    unknown = [] if by_itself else [name for name in tables[0] if lacks_numbers(context, _less(tables[0], {name}))]
    if not (by_itself or unknown):
        raise NotApplicable("its variables hold every number, or there is no job without them")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    two = [_of_two(tables, rank, unknown) | place for rank in range(2)]
    # whether it is the number of nodes or of their ranks isn't known
    says_two_nodes = any(all(table.get(name) == "2" for table in tables) for name in set(two[0]) - set(unknown))
    with variables(two[0]):
        environment = context.create()
        if (environment.main_address, str(environment.main_port)) != tuple(place.values()):
            raise NotApplicable("its ranks don't meet at MASTER_ADDR and MASTER_PORT")
    for rank, found in enumerate(context.run_on_ranks(2, _meet, context.component, two, timeout=60)):
        right = {"world_size": 2, "global_rank": rank, "local_rank": rank, "node_rank": 0, "local_world_size": 2}
        if not says_two_nodes:
            right["num_nodes"] = 1
        same(f"on rank {rank} of two, after join()", {name: found[name] for name in right}, right)


def _of_two(tables: Sequence[Mapping[str, str]], rank: int, without: Sequence[str]) -> dict[str, str]:
    """Return the table of a rank of two on one node, less the variables in ``without``."""
    made = {}
    for name, value in tables[rank].items():
        everywhere = [table.get(name, "") for table in tables]
        if name not in without:
            made[name] = "2" if everywhere == ["4"] * 4 else value
    return made


def _meet(component: ComponentUnderTest, tables: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the numbers of this rank after join()."""
    with variables(tables[int(os.environ["RANK"])]):
        environment = component.create()
        with contextlib.suppress(RanksNotMetError):  # no other error
            numbers(environment), environment.num_nodes()
        environment.join(timedelta(seconds=30))
        environment.join(timedelta(seconds=30))
        return {**numbers(environment), "num_nodes": environment.num_nodes()}


@check("ENV-64", since="0.2")
def recommended(context: CheckContext) -> None:
    """recommendations() is a list of sentences, in any environment.

    Why: `torchhal doctor` prints them, and the log of a job that needs them; None ends both.
    Fix: return [] where there is nothing to recommend.
    """
    for told, table in (("in a shell", {}), *(("in its job", table) for table in context.component.own_tables[:1])):
        with variables(table):
            found = context.component.cls.recommendations()
        sentences = isinstance(found, list) and all(isinstance(one, str) and one.strip() for one in found)
        require(sentences, f"recommendations() {told} must be a list of sentences (got {found!r})")
