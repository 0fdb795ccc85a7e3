"""ENV: who started this process, and which one of how many it is."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from torchhal import registry
from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import ClusterEnvironment, TorchElasticEnvironment
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal.launchers import ExternalLauncher
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, NotGiven, check
from torchhal_conformance._cluster_world import known_numbers, numbers, on_every_rank, require_known, world_of
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import INTERACTIVE, TABLES, WORLDS, variables
from torchhal_conformance._launcher_worlds import Layout

STARTS_OR_RESOLVES: Final = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.")
"""Beginnings of Python's audit events of what takes long: processes, sockets, names that are resolved."""


@check("ENV-01")
def clean(context: CheckContext) -> None:
    """Where no launcher has set anything, detect() is False, a bool.

    Why: a laptop with a scheduler's client installed was taken for a node of a cluster.
    Fix: look for what only a started process has.
    """
    with variables():
        found = context.component.cls.detect()
    require(found is False, f"detect() in a clean environment must be False (got {found!r})")


@check("ENV-02", needs=["table"])
def own_table(context: CheckContext) -> None:
    """detect() is True in every process of its own launcher, and False in those of all others.

    Why: two environments that see the same job disagree about ranks, and chance decides.
    Fix: ask for a variable that no other launcher sets.
    """
    own = context.component.own_tables
    for rank, table in enumerate(own):
        with variables(table):
            found = context.component.cls.detect()
        require(found is True, f"detect() in its own job, on rank {rank}, must be True (got {found!r})")
    for name, other in TABLES.items():
        if name != context.component.alias and other[0] != own[0]:
            with variables(other[1]):
                require(context.component.cls.detect() is False, f"detect() is true in a job that {name} has started")


@check("ENV-03", needs=["table"])
def second_node(context: CheckContext) -> None:
    """On the first process of the second of two nodes with two each: global rank 2, local 0, node 1, world 4.

    Where a launcher has no such nodes, these are the numbers of global rank 2 of its table. What no variable holds is
    known after join().

    Why: a local rank in the place of the global one gives two rank zeros and a hang.
    Fix: read each number from its own variable.
    """
    world = world_of(context)
    same("the numbers of global rank 2", on_every_rank(context, world, numbers)[2], world.numbers(2))


@check("ENV-04", needs=["table"], after=("ENV-03",))
def all_ranks(context: CheckContext) -> None:
    """Every process of the table has its own global rank, and numbers within bounds that agree with each other.

    Why: a node rank that is computed from the wrong size is right for one node.
    Fix: don't compute what the launcher says.
    """
    world = world_of(context)
    for rank, got in enumerate(on_every_rank(context, world, numbers)):
        same(f"the numbers of global rank {rank}", got, world.numbers(rank))


@check("ENV-05", needs=["table"])
def whole_numbers(context: CheckContext) -> None:
    """Every number is an int.

    Why: "3" < "10" is false, and "0" is true.
    Fix: convert where it is read.
    """
    for name, value in on_every_rank(context, world_of(context), _numbers_and_port)[3].items():
        require(type(value) is int, f"{name} must be an int (got {value!r}, a {type(value).__name__})")


def _numbers_and_port(environment: ClusterEnvironment) -> dict[str, Any]:
    return {**numbers(environment), "main_port": environment.main_port}


@check("ENV-07", needs=["table"])
def meeting_place(context: CheckContext) -> None:
    """Address and port are the same on all ranks and stay so; the port is an int from 1 to 65535.

    It is another one for another job where it is made from the job's number. job_id() is one str on all ranks.

    Why: two jobs on one host that meet at one port train as one, or not at all.
    Fix: derive the port from the job id; take MASTER_ADDR and MASTER_PORT where they are set.
    """
    places, names = set(), set()
    for table in context.component.own_tables:
        with variables(table):
            environment = context.create()
            places |= {(environment.main_address, environment.main_port) for _ in range(2)}
            names.add(environment.job_id())
    require(len(places) == 1, f"the ranks would meet at different places: {sorted(places)}")
    address, port = places.pop()
    require(isinstance(address, str) and address, f"main_address must be a host (got {address!r})")
    require(type(port) is int and 1 <= port <= 65535, f"main_port must be an int from 1 to 65535 (got {port!r})")
    require(len(names) == 1, f"job_id() must be the same on all ranks (got {sorted(map(repr, names))})")
    same("type of job_id()", type(names.pop()), str)
    table = context.component.own_tables[0]
    ids = {name: value for name, value in table.items() if name.endswith(("JOB_ID", "JOBID"))}
    jobs = {name: str(int(value) + 7) if value.isdecimal() else f"{value}7" for name, value in ids.items()}
    if jobs and "MASTER_PORT" not in table:
        with variables(table, jobs):
            require(context.create().main_port != port, f"another job has the same port {port}")
        for number in (0, 65_535, 2**31 - 1, 10**12):
            with variables(table, {name: str(number) for name, value in ids.items() if value.isdecimal()}):
                found = context.create().main_port
            told = f"main_port of job {number} must be an int from 1 to 65535 (got {found!r})"
            require(type(found) is int and 1 <= found <= 65535, told)


@check("ENV-08", features=["host_lists"], needs=["table"])
def host_lists(context: CheckContext) -> None:
    """The scheduler's short form of a list of hosts gives the first host: dashes, ranges, zeros in front, IPv6.

    The list is in the variables of the table whose names end in NODELIST.

    Why: "node-08" was read as a range, and "n[08-11]" as n8.
    Fix: parse brackets only, and keep the width of numbers.
    """
    table = context.component.own_tables[0]
    lists = [name for name in table if name.endswith("NODELIST")]
    if not lists:
        raise NotApplicable("no variable of its table ends in NODELIST")
    forms = {"n[1-2]": "n1", "node-a[08-11,14]": "node-a08", "gpu-1,gpu-2": "gpu-1", "host-a-7": "host-a-7",
             "r2n[001,003]": "r2n001", "fd99::[101-102]": "fd99::101"}  # fmt: skip
    for text, first in forms.items():
        with variables(table, dict.fromkeys(lists, text)):
            same(f"main_address of {text!r}", context.create().main_address, first)


@check("ENV-09", needs=["table"])
def who_creates(context: CheckContext) -> None:
    """creates_processes_externally is a bool, True in the processes that its launcher has started.

    A strategy starts processes exactly where it is False. It may be False in them only where the launcher is the
    strategy itself, which the suite is told by ``launcher=()``.

    Why: four processes that start four more each.
    Fix: True where every process of the job exists when the script runs.
    """
    world, features = world_of(context), context.component.declared
    by_strategy = context.component.own_launcher == () and "owns_launch" not in features
    for rank, table in enumerate(context.component.own_tables):
        with variables(table):
            external = context.create().creates_processes_externally
        require(type(external) is bool, f"creates_processes_externally must be a bool (got {external!r})")
        told = f"creates_processes_externally is False on rank {rank}, though its launcher has started all processes"
        require(external or by_strategy, told)
    on_every_rank(context, world, _check_who_launches, world.layout)


def _check_who_launches(environment: ClusterEnvironment, layout: Layout) -> None:
    if environment.global_rank() != 0:
        return
    strategy, accelerator = DDPStrategy(), CPUAccelerator()
    strategy.configure(
        accelerator=accelerator, precision=SinglePrecision(), checkpoint_io=TorchCheckpointIO(),
        cluster_environment=environment, devices=accelerator.get_parallel_devices(range(layout.sizes[0])),
        num_nodes=len(layout.sizes),
    )  # fmt: skip
    left = isinstance(strategy.make_launcher(), ExternalLauncher)
    same("whether ddp leaves the launch to others", left, environment.creates_processes_externally)


@check("ENV-10", needs=["table"])
def environ_untouched(context: CheckContext) -> None:
    """detect(), the constructor and all numbers write nothing to os.environ; after teardown() it is as it was.

    What the program itself changes in between stays.

    Why: a teardown that deleted WORLD_SIZE broke the second fit.
    Fix: keep what you compute in the object.
    """
    with variables(context.component.own_tables[1]):
        before = dict(os.environ)
        context.component.cls.detect()
        environment = context.create()
        known_numbers(environment)
        same("os.environ after reading", dict(os.environ), before)
        environment.teardown()
        environment.teardown()
        same("os.environ after teardown()", dict(os.environ), before)
        again = context.create()
        known_numbers(again)
        os.environ["TORCHHAL_CONFORMANCE_USER"] = "mine"
        os.environ["OMP_NUM_THREADS"] = "3"
        before = dict(os.environ)
        again.teardown()
        same("os.environ after teardown(), where the program has changed it", dict(os.environ), before)


@check("ENV-11", needs=["table"], after=("ENV-03", "ENV-04"))
def mismatch(context: CheckContext) -> None:
    """validate_settings accepts what was started, and refuses another number of devices or nodes showing both numbers.

    Why: a job of four processes that waits for eight does so for ever.
    Fix: compare with local_world_size and the number of nodes.
    """
    world = world_of(context)
    on_every_rank(context, world, _check_validation, world.layout)


def _check_validation(environment: ClusterEnvironment, layout: Layout) -> None:
    if environment.global_rank() != 0:
        return
    devices, nodes, size = layout.sizes[0], len(layout.sizes), layout.world_size
    environment.validate_settings(num_devices=devices, num_nodes=nodes)
    wrong: list[tuple[int, int, tuple[str, ...]]]
    wrong = [(devices + 1, nodes, (f"{devices + 1}", f"{devices}")), (devices, nodes + 3, (f"{nodes + 3}", f"{nodes}"))]
    # these have as many processes as were started
    products = [(size // count, count) for count in range(1, size + 1) if size % count == 0]
    wrong += [(*asked, (f"{devices}",)) for asked in products if asked != (devices, nodes)]
    for of_node, of_nodes, shown in wrong:
        what = f"{of_node} devices on {of_nodes} nodes in a job of {devices} on {nodes}"
        call = partial(environment.validate_settings, num_devices=of_node, num_nodes=of_nodes)
        raises(what, ConfigurationError, call, *shown)


@check("ENV-12", needs=["table"])
def precedence(context: CheckContext) -> None:
    """Inside of another launcher's job no other environment has the same priority: the choice is never a tie.

    The numbers there are those of its own launcher; in a process that torchhal has started for it, those of torchhal.
    The priority is below torchrun's, which a process of its launcher may start, unless the launcher sets torchrun's
    variables too.

    Why: torchrun inside of a scheduler's step sets both sets of variables, and the outer numbers were taken.
    Fix: a priority below 80, unless the launcher sets torchrun's variables too or is started by torchrun's workers.
    """
    cls = context.component.cls
    require(type(cls.priority) is int, f"'priority' must be an int (got {cls.priority!r})")
    own, alone = context.component.own_tables[0], None
    with variables(own):
        by_torchrun = TorchElasticEnvironment.detect()  # its launcher starts processes as torchrun does
    with variables(own, TABLES["torchelastic"][0]):
        outer = not by_torchrun and cls.detect() and cls.priority >= TorchElasticEnvironment.priority
    require(
        not outer,
        f"its priority of {cls.priority} is not below torchrun's, {TorchElasticEnvironment.priority}: where a process "
        "of its launcher starts torchrun, all workers of torchrun there would take the rank of that process. If "
        "torchrun's variables are set in the processes of its launcher, put them into its tables",
    )
    with variables(context.component.own_tables[3]), contextlib.suppress(ConfigurationError):
        alone = known_numbers(context.create())
    for name, other in TABLES.items():
        if name == context.component.alias or other[0] == own:
            continue
        with variables(other[0], own):
            rivals = [e for e in registry.entries("cluster_environment") if e.availability() and e.load() is not cls]
            ties = [e.qualified_name for e in rivals if e.load().priority == cls.priority and e.load().detect()]
        require(not ties, f"inside of a job of {name} {', '.join(ties)} has the same priority {cls.priority}")
        with variables(other[0], context.component.own_tables[3]):
            if alone is None or not cls.detect():
                continue
            environment = context.create()
            told, right = f"the numbers of global rank 3 inside of a job of {name}", alone
            started = launched_by() is not None and launched_by(context.component.own_tables[3]) is None
            if started and not environment.creates_processes_externally:
                told = f"the numbers of global rank 0 of processes that {name} has started for it"
                right = WORLDS["local"]["2+2"].numbers(0)
            same(told, {name: getattr(environment, name)() for name in right}, right)


@check("ENV-13", needs=["table"], after=("ENV-01",))
def interactive(context: CheckContext) -> None:
    """A shell or notebook inside of an allocation is no process of a job: detect() is False.

    Why: notebooks in an allocation waited for ranks that nobody had started.
    Fix: ask for a variable of the step, not of the job.
    """
    for name, table in INTERACTIVE.items():
        if table.items() & context.component.own_tables[0].items():
            with variables(table):
                require(context.component.cls.detect() is False, f"detect() is true in a shell of a {name} allocation")
            return
    raise NotApplicable("its launcher has no interactive allocations that the kit knows")


@check("ENV-14", needs=["table"], after=("ENV-04",))
def no_initialisation(context: CheckContext) -> None:
    """The rank is known before any process group exists.

    Reading it initialises neither MPI nor torch.distributed.

    Why: code for rank zero ran on every rank until the group was up.
    Fix: read the environment.
    """
    before = set(sys.modules)
    with variables(context.component.own_tables[3]):
        context.component.cls.detect()
        same("the global rank", context.create().global_rank(), 3)
    require(not dist.is_initialized(), "torch.distributed was initialised")
    mpi = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "mpi4py")
    require("mpi4py.MPI" not in mpi, "mpi4py.MPI was imported, which initialises MPI")


@check("ENV-15", needs=["table"], after=("ENV-04",))
def fixed_ranks(context: CheckContext) -> None:
    """configure() and set_rendezvous() don't change the numbers of a process that a launcher has started.

    Changed: the contract has no set_world_size and set_global_rank; these are what a launcher may call.

    Why: a strategy that sets its own idea of the rank gives two processes one rank.
    Fix: ignore both where the processes exist.
    """
    world = world_of(context)
    got = on_every_rank(context, world, _numbers_once_configured, world.layout)[3]
    same("the numbers of global rank 3", got, world.numbers(3))


def _numbers_once_configured(environment: ClusterEnvironment, layout: Layout) -> dict[str, Any]:
    environment.configure(num_nodes=len(layout.sizes), local_world_size=environment.local_world_size())
    environment.set_rendezvous("n9", 1234)
    return numbers(environment)


@check("ENV-16", needs=["table"], after=("ENV-04",))
def another_process(context: CheckContext) -> None:
    """It pickles, and a copy in another process answers for that process, as one object does at any time.

    Why: a rank that was kept in the object travelled to every worker.
    Fix: read the variables when asked.
    """
    with variables(context.component.own_tables[0]):
        environment = context.create()
        known_numbers(environment)
        try:
            data = pickle.dumps(environment)
        except Exception as error:
            raise CheckFailed(f"it doesn't pickle ({type(error).__name__}: {error})") from error
    with variables(context.component.own_tables[3]):
        of_copy, of_other = known_numbers(pickle.loads(data)), known_numbers(context.create())
        require_known(context, "the numbers of a copy on global rank 3", of_copy, 3)
        require_known(context, "the numbers of another object on global rank 3", of_other, 3)
        require_known(context, "the numbers of the same object on global rank 3", known_numbers(environment), 3)
        same("which numbers a copy knows", sorted(of_copy), sorted(of_other))


@check("ENV-17", needs=["table", "posix"])
def quick(context: CheckContext) -> None:
    """detect() and all numbers take less than 50 ms, start no process and resolve no name.

    Why: a scheduler's client on a login node takes a minute, at every import.
    Fix: variables and files only.
    """
    context.restart_subprocess()
    seconds, events = context.run_in_subprocess(_ask_all, context.component)
    context.restart_subprocess()
    require(not events, f"asking for the numbers did {'; '.join(events[:5])}")
    require(seconds < 0.05, f"asking for the numbers took {seconds * 1000:.0f} ms, allowed 50")


def _ask_all(component: ComponentUnderTest) -> tuple[float, list[str]]:
    cls, events, listening = component.cls, [], False

    def hook(event: str, arguments: Any) -> None:
        if listening and event != "socket.gethostname" and event.startswith(STARTS_OR_RESOLVES):
            events.append(f"{event} {arguments!r:.80}")

    sys.addaudithook(hook)
    times = []
    with variables(component.own_tables[3]):
        for _ in range(3):  # a machine under load may be slow once
            listening = True
            start = time.perf_counter()
            cls.detect()
            environment = component.create()
            known_numbers(environment)
            str(environment.main_address), environment.main_port, environment.creates_processes_externally
            times.append(time.perf_counter() - start)
            listening = False
    return min(times), events


@check("ENV-20", needs=["table"], after=("ENV-03", "ENV-04"))
def unequal_nodes(context: CheckContext) -> None:
    """On nodes of three processes and of one every number is right, the size of each node too.

    That holds whether the ranks fill one node after the other or are dealt to them in turn. The tables are those that
    the kit has recorded, by the launcher's name, and those given, such as of "3+1".

    Why: schedulers pack 3 + 1 by themselves, and rank // tasks_per_node is then another node.
    Fix: take each number as the launcher gives it.
    """
    unequal = [world for world in context.component.worlds.values() if not world.layout.is_even]
    if not unequal:
        raise NotGiven("no unequal nodes of its launcher are known: give such a layout in its tables")
    for world in unequal:
        sizes = " and ".join(map(str, world.layout.sizes))
        how = "in turn" if world.layout.cyclic else "one after the other"
        for rank, got in enumerate(on_every_rank(context, world, numbers)):
            same(f"the numbers of global rank {rank} on nodes of {sizes}, dealt {how}", got, world.numbers(rank))
