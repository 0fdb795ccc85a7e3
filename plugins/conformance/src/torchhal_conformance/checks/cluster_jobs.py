"""ENV-74 to ENV-80: jobs beside this one, other interpreters, nodes of ranks, and requests for another start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torchhal.cluster import ClusterEnvironment
from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._cluster_world import on_every_rank
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._launcher_worlds import Table
from torchhal_conformance._subprocesses import START, Job, call
from torchhal_conformance.checks.cluster_surroundings import derived_worlds

_OF_JOB: Final = ("JOB_ID", "JOBID", "STEP_ID", "STEPID", "RUN_ID", "JOBINDEX", "PMIX_NAMESPACE")
"""Endings of variables that tell a job, a step of it or an element of an array from others."""
_SAME_PLACE: Final = {"MASTER_ADDR": "n1", "MASTER_PORT": "29533"}
"""Set by a user for two jobs."""
_CLIENTS: Final = (
    "scontrol", "sbatch", "brequeue", "qrerun", "qalter", "flux", "kubectl", "oarresub", "condor_release",
)  # fmt: skip
"""Commands of schedulers that start a job again."""
_Answers = dict[str, tuple[Any, str]]
"""What the scheduler's command does -> (what run_again returned, what it raised)."""
_REFUSAL: Final = "torchhal-conformance: permission denied"


def _other_jobs(context: CheckContext) -> Iterator[tuple[str, Table, Table]]:
    """Yield (words, variables of rank 0, those of rank 0 of another job), for each thing that tells two jobs apart.

    Variables with one value hold one thing: they change together.
    """
    first, *others = context.component.own_tables
    shared = [name for name, value in first.items() if all(table.get(name) == value for table in others)]
    by_value: dict[str, list[str]] = {}
    for name in shared:
        if name.endswith(_OF_JOB):
            by_value.setdefault(first[name], []).append(name)
    for value, names in by_value.items():
        for another in (str(int(value) + 1), str(int(value) + 1000)) if value.isdecimal() else (f"{value}7",):
            changed = dict.fromkeys(names, another)
            yield ", ".join(f"{name}={text}" for name, text in changed.items()), first, {**first, **changed}


@check("ENV-74", since="0.2", needs=["table"], after=("ENV-07",))
def other_jobs(context: CheckContext) -> None:
    """Of two jobs, steps of a job or elements of an array no two have one port and one job_id().

    Where the user has set MASTER_ADDR and MASTER_PORT for both, job_id() is another one. Without MASTER_PORT the port
    differs too, for one of two other jobs at least. What tells jobs apart are the variables that are the same on all
    ranks and whose names end in JOB_ID, JOBID, STEP_ID, STEPID, RUN_ID, JOBINDEX or PMIX_NAMESPACE. It isn't asked
    where another variable of the launcher's than MASTER_PORT holds the port.

    Why: two steps of one job that meet at one place under one name train as one, or wait for each other.
    Fix: make the port and job_id() of all that tells a job from those beside it.
    """
    if context.component.own_launcher == () or "owns_launch" in context.component.declared:
        raise NotApplicable("the strategy or the environment starts the processes, and says where they meet")
    jobs = list(_other_jobs(context))
    if not jobs:
        raise NotApplicable("no variable of its launcher is known to tell jobs apart")
    ports: dict[tuple[str, ...], set[int]] = {}
    for told, own, other in jobs:
        others, changed = _meetings(other), tuple(name for name in own if own[name] != other[name])
        for where, table in _meetings(own).items():
            mine, theirs = _place(table, context.component), _place(others[where], context.component)
            if mine is not None and theirs is not None and not _port_is_given(own, mine[1]):
                shown = f"main_port {mine[1]} and job_id() {mine[2]!r}"
                require(mine[1:] != theirs[1:], f"another job, with {told},{where} has the same {shown}")
                if "MASTER_PORT" not in table:
                    ports.setdefault(changed, set()).update((mine[1], theirs[1]))
    for changed, found in ports.items():
        told = f"main_port is {min(found)} whatever {' and '.join(changed)} is: jobs beside each other have one port"
        require(len(found) > 1, told)


def _port_is_given(table: Table, port: int) -> bool:
    return str(port) in (value for name, value in table.items() if name != "MASTER_PORT")


def _meetings(table: Table) -> dict[str, Table]:
    """Return the job's variables as they are, without a port, and with a place that the user has set, by words."""
    return {
        "": table,
        " without MASTER_PORT": {name: value for name, value in table.items() if name != "MASTER_PORT"},
        " that meets at the same MASTER_ADDR and MASTER_PORT": {**table, **_SAME_PLACE},
    }


def _place(table: Mapping[str, str], component: ComponentUnderTest) -> tuple[str, int, str] | None:
    """Return (address, port, job_id()), None where a variable that is missing doesn't say them."""
    with variables(table), contextlib.suppress(ConfigurationError):
        environment = component.create()
        return environment.main_address, environment.main_port, environment.job_id()
    return None


@check("ENV-75", since="0.2", needs=["table"], after=("ENV-07", "ENV-74"))
def other_interpreters(context: CheckContext) -> None:
    """Another interpreter has the same address, port and job_id(): hash() of a string is another one there.

    Why: within one process all ranks agree on hash(name) % 20000, and in a job no two do.
    Fix: port_from_job_id of torchhal.cluster, or a digest of hashlib.
    """
    jobs = {"": context.component.own_tables[0], **{f" with {told}": other for told, _, other in _other_jobs(context)}}
    tables = {told + where: one for told, table in jobs.items() for where, one in _meetings(table).items()}
    places = {told: _place(table, context.component) for told, table in tables.items()}
    here = {told: place and list(place) for told, place in places.items()}
    output = context.folder / "places.json"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": seed}):
        program = call(context.folder, _write_places, context.component, tables, str(output))
        ended = Job(program, context.folder).finish(START)
    if ended.code or not output.exists():
        raise CheckFailed(f"another interpreter could not say where the ranks meet\n{ended.output}")
    for told, there in json.loads(output.read_text()).items():
        same(f"address, port and job_id() in another interpreter{told}", there, here[told])


def _write_places(component: ComponentUnderTest, tables: Mapping[str, Table], output: str) -> None:
    places = {told: _place(table, component) for told, table in tables.items()}
    Path(output).write_text(json.dumps(places))


@check("ENV-76", since="0.2", needs=["table"], after=("ENV-42",))
def nodes_of_ranks(context: CheckContext) -> None:
    """On unequal nodes, too, node_of() tells the ranks of one node from the others, or is None.

    A number is the node's rank.

    Why: rank // local_world_size names a host that is well, and another one for each node that says it.
    Fix: None where no variable says which node a rank is on.
    """
    worlds = list(context.component.worlds.values())
    if all(world.layout.is_even for world in worlds) and context.component.own_launcher != ():
        with contextlib.suppress(NotApplicable):
            worlds += derived_worlds(context)
    for world in worlds:
        nodes = [place.node_rank for place in world.layout.places]
        for rank, of in enumerate(on_every_rank(context, world, _nodes, world.layout.world_size)):
            told = f"by node_of() on global rank {rank} of a job of {world.layout}"
            known = [(node, right) for node, right in zip(of, nodes, strict=True) if node is not None]
            alike = [[one == other for other, _ in known] for one, _ in known]
            right = [[one == other for _, other in known] for _, one in known]
            same(f"which ranks share a node, {told}", alike, right)
            numbered = [(node, right) for node, right in known if isinstance(node, int)]
            same(f"the nodes, {told}", [node for node, _ in numbered], [right for _, right in numbered])


def _nodes(environment: ClusterEnvironment, size: int) -> list[Any]:
    return [environment.node_of(rank) for rank in range(size)]


@check("ENV-77", since="0.2", needs=["table", "posix"], after=("ENV-43",))
def asks_for_another_start(context: CheckContext) -> None:
    """run_again raises nothing where the scheduler's command is missing or refuses, and then says something else.

    Asked with TORCHHAL_REQUEUE=1 for each of stop_signals and SIGTERM, whether or not the fit can go on. Its words are
    compared if it has run the command.

    Why: rank 0 raised in the midst of an orderly stop, or the log said "is requeued" and the run was over.
    Fix: return what the command has said, and catch what it raises.
    """
    folders = {}
    scripts = {"missing": None, "refusing": f"echo '{_REFUSAL}' >&2\nexit 1",
               "agreeing": ': > "$0.asked"\nkill -TERM $PPID\nexit 0'}  # fmt: skip
    for name, script in scripts.items():
        folder = folders[name] = context.folder / name
        folder.mkdir(exist_ok=True)
        for client in _CLIENTS if script is not None else ():
            (folder / client).write_text(f"#!/bin/sh\n{script}\n")
            (folder / client).chmod(0o755)
    paths = {name: str(folder) for name, folder in folders.items()}
    said = context.run_in_subprocess(_ask_again, context.component, paths, timeout=60)
    by_command = any(folders["agreeing"].glob("*.asked"))
    for (signum, continues), texts in said.items():
        told = f"run_again({signum}, continues={continues})"
        for when, (text, error) in texts.items():
            where = f"where the scheduler's command is {when}"
            require(not error, f"{told} must raise nothing {where} (got {error})")
            require(isinstance(text, str), f"{told} must return a str {where} (got {text!r})")
        agreed, _ = texts["agreeing"]
        for when in ("missing", "refusing") if continues and agreed and by_command else ():
            lies = texts[when][0] == agreed
            require(not lies, f"{told} says {agreed!r} where the scheduler's command is {when}, too")


def _ask_again(component: ComponentUnderTest, paths: Mapping[str, str]) -> dict[tuple[int, bool], _Answers]:
    """Return what run_again gave and raised, by (signal, continues) and by what the scheduler's command does."""
    found: dict[tuple[int, bool], _Answers] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # by which a scheduler ends a job that it starts again
    try:
        for when, path in paths.items():
            with variables(component.own_tables[0], {"TORCHHAL_REQUEUE": "1", "PATH": path}):
                environment = component.create()
                for signum in {*environment.stop_signals, signal.SIGTERM}:
                    for continues in (True, False):
                        asked = found.setdefault((int(signum), continues), {})
                        try:
                            asked[when] = environment.run_again(int(signum), continues=continues), ""
                        except Exception as error:
                            asked[when] = None, f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, before)
    return found


@check("ENV-78", since="0.2", needs=["table", "posix"], after=("ENV-77",))
def asks_with_garbled_variables(context: CheckContext) -> None:
    """run_again raises nothing, whatever the variables that it reads are set to.

    Each one that the table doesn't have is set to a folder that isn't there, to a word and to "", one at a time.

    Why: on a node without the scheduler's mount an orderly stop, whose state is saved, ended as a crash.
    Fix: catch what a read or a write raises, and return "" with a warning.
    """
    try:
        raised = context.run_in_subprocess(_ask_with_garbled, context.component, str(context.folder), timeout=60)
    finally:
        context.restart_subprocess()
    require(not raised, f"run_again must raise nothing {'; '.join(raised[:3])}")


def _ask_with_garbled(component: ComponentUnderTest, folder: str) -> list[str]:
    """Return what run_again has raised, and where."""
    asked: set[str] = set()
    # without the scheduler's commands, which wait for one that isn't there
    table = {**component.own_tables[0], "TORCHHAL_REQUEUE": "1", "PATH": folder}
    signal.signal(signal.SIGTERM, lambda *_: None)
    found = _raised_by_run_again(component, table, asked)
    for name in sorted(asked - table.keys()):
        for value in _GARBLED:
            with contextlib.suppress(ConfigurationError):  # of the constructor, which may refuse it
                raised = _raised_by_run_again(component, {**table, name: value}, set())
                found += [f"where {name}={value!r} (got {one})" for one in raised]
    return found


_GARBLED: Final = ("/torchhal-conformance/not/there", "garbled", "")


def _raised_by_run_again(component: ComponentUnderTest, table: Table, asked: set[str]) -> list[str]:
    """Return the errors of run_again, and add to ``asked`` the names of the variables that it reads."""
    environ_type: Any = type(os.environ)
    read = environ_type.__getitem__

    def recording(environ: Any, name: str) -> str:
        asked.add(name)
        return str(read(environ, name))

    raised = []
    with variables(table):
        environment = component.create()
        signals = {*environment.stop_signals, signal.SIGTERM}
        with mock.patch.object(environ_type, "__getitem__", recording):
            for signum in signals:
                try:
                    environment.run_again(int(signum), continues=True)
                except Exception as error:
                    raised.append(f"{type(error).__name__}: {error}")
    return raised


@check("ENV-79", since="0.2", needs=["table"], after=("ENV-08", "ENV-72"))
def lists_of_hosts(context: CheckContext) -> None:
    """An environment that takes main_address from Slurm's short form of a list reads those with several brackets, too.

    It is one if the variables of the table whose names end in NODELIST have brackets, and another list is another
    address.

    Why: on a cluster whose hosts are "rack[1-2]n[01-16]" rank 0 was looked for on "rack1", which doesn't exist.
    Fix: expand each bracket of a name, from the left, and keep the width of numbers.
    """
    table = context.component.own_tables[0]
    lists = [name for name, value in table.items() if name.endswith("NODELIST") and "[" in value]
    if not lists or _address_with(context, table, lists, "zz[7-8]") != "zz7":
        raise NotApplicable("its address isn't from a short list in a variable whose name ends in NODELIST")
    for text, first in _HOST_LISTS.items():
        same(f"main_address of {text!r}", _address_with(context, table, lists, text), first)


def _address_with(context: CheckContext, table: Table, lists: Sequence[str], text: str) -> str:
    """Return main_address where the lists of hosts are this one, or the error that says why it isn't known."""
    with variables(table, dict.fromkeys(lists, text)):
        try:
            return str(context.create().main_address)
        except ConfigurationError as error:
            return f"no address: {error}"


_HOST_LISTS: Final = {
    "rack[1]n[01-02]": "rack1n01", "r[2,4]-c08-n[3]": "r2-c08-n3", "r[2]-c[08,14]": "r2-c08", "a-1,b[2]": "a-1",
    "gpu[007,009]": "gpu007",
}  # fmt: skip
"""Slurm's short forms of two hosts, https://slurm.schedmd.com/scontrol.html (show hostnames), with the first one."""


@check("ENV-80", since="0.2", needs=["table"], after=("ENV-10", "ENV-73"))
def configured_and_torn_down(context: CheckContext) -> None:
    """After configure() and teardown() os.environ is as it was: in a job, in a process without one, on any nodes.

    Why: a network interface that was chosen for one node stayed for the next job, which hung on two.
    Fix: note what was there before, and put it back in teardown().
    """
    for where, table in {"in its job": context.component.own_tables[0], "without a launcher": {}}.items():
        for nodes in (1, 2):
            with variables(table):
                before = dict(os.environ)
                environment = context.create()
                with contextlib.suppress(ConfigurationError):  # several nodes need more than this process may have
                    environment.configure(num_nodes=nodes, local_world_size=2)
                    environment.set_rendezvous("127.0.0.1", 29512)
                environment.teardown()
                names = sorted(name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name))
                told = "; ".join(f"{name} is {os.environ.get(name)!r}, was {before.get(name)!r}" for name in names)
                require(not names, f"after configure() for {nodes} node(s) and teardown(), {where}: {told}")
