"""STR-53, STR-91, STR-92, STR-96: jobs on several nodes, and numbers that are known when the ranks have met."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch

from torchhal.cluster import RanksNotMetError, TorchElasticEnvironment
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.resolve import check_fit, composition_of
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import reference, require_several_ranks, running


def _place_on_a_node(local_rank: int, size: int, node: int) -> AbstractContextManager[Any]:
    """Give the process the variables of that rank on one of two nodes."""
    numbers = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": 2}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in numbers.items()})


def _create_on_two_nodes(rank: RankContext) -> Strategy:
    """Return the strategy for two nodes of one rank each; raise NotApplicable where it refuses them on all ranks."""
    refused, strategy = "", None
    try:
        strategy = rank.create_strategy(one_per_node=True)
        check_fit("strategy", strategy, composition_of(strategy, rank.size))
    except ConfigurationError as error:
        refused = str(error)
    told = rank.gather(refused)
    if all(told):
        raise NotApplicable(f"the strategy is for one node ({told[0]})")
    require(not any(told), f"the strategy refuses two nodes on one of them alone: {max(told, key=len)}")
    assert strategy is not None
    return strategy


class _Meets(TorchElasticEnvironment):
    """An environment whose ranks determine the numbers of nodes, and of their processes, when they meet."""

    def __init__(self) -> None:
        self.waits: list[timedelta] = []
        self.told: set[tuple[int, int]] = set()

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        self.told.add((num_nodes, local_world_size))

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        self.told.add((num_nodes, num_devices))

    def join(self, timeout: timedelta) -> None:
        self.waits.append(timeout)

    def num_nodes(self) -> int:
        return self._met(super().num_nodes())

    def local_world_size(self) -> int:
        return self._met(super().local_world_size())

    def node_rank(self) -> int:
        return self._met(super().node_rank())

    def _met(self, number: int) -> int:
        if not self.waits:
            raise RanksNotMetError("the ranks have not met yet")
        return number


@check("STR-53", since="0.2", world_sizes=(2,), after=("STR-12",))
def numbers_of_the_meeting(rank: RankContext) -> None:
    """The environment's join() is called on every rank, with the strategy's timeout, before its numbers are needed.

    make_launcher() calls it, and setup_environment() in a loop that makes none. What left_to_launcher names is then as
    the environment says: num_nodes, and as many devices as the node has processes, where each process drives one. The
    environment is told these numbers afterwards.

    Why: under mpirun the number of nodes is known when the ranks have met: a job on two nodes was taken for one node.
    Fix: call the inherited make_launcher() and setup_environment().
    """
    for nodes in (1, 2):
        local = rank.size // nodes
        if nodes == 1 and rank.component.one_per_node:
            continue
        place = _place_on_a_node(0, 1, rank.rank) if nodes == 2 else nullcontext()
        with place:
            strategy = _create_on_two_nodes(rank) if nodes == 2 else rank.create_strategy()
            environment = _Meets()
            strategy.cluster_environment, strategy.num_nodes = environment, 1
            if getattr(strategy, "environment", None) is not environment:
                raise NotApplicable("it starts no processes, or has an environment of its own")
            given = strategy.devices[:1]
            strategy.devices, strategy.left_to_launcher = list(given), frozenset({"devices", "num_nodes"})
            strategy.make_launcher()
            _require_met("make_launcher()", strategy, environment)
            same(f"num_nodes after make_launcher() on {nodes} node(s)", strategy.num_nodes, nodes)
            drives = local if strategy.num_local_processes(local) == local else len(given)
            same(f"devices after make_launcher() of {local} processes on the node", len(strategy.devices), drives)
            processes = strategy.num_local_processes(drives)
            told = "the nodes and their processes that the environment is told in configure() and validate_settings()"
            same(told, environment.told, {(nodes, processes)})
            other = rank.create_strategy(one_per_node=nodes == 2)
            other.cluster_environment = environment = _Meets()
            with rank.set_up_strategy(other):
                _require_met("setup_environment()", other, environment)
                got = other.reduce(torch.ones(1, device=other.root_device), "sum")
                close("a sum over ranks that have met", got.cpu(), [rank.size], 1e-6)


def _require_met(caller: str, strategy: Strategy, environment: _Meets) -> None:
    require(environment.waits, f"{caller} doesn't call the environment's join()")
    same(f"the timeout of join() in {caller}", set(environment.waits), {strategy.timeout})


@check("STR-91", since="0.2", world_sizes=(2,), after=("STR-28",))
def sampler_of_several_nodes(rank: RankContext) -> None:
    """On two nodes of one rank each, distributed_sampler_kwargs divide the samples as on one node with two ranks.

    Why: the rank within the node is 0 on both, so that half of the data was never seen and the other half twice.
    Fix: count among all ranks, not among those of a node.
    """
    with _place_on_a_node(0, 1, rank.rank):
        kwargs = _create_on_two_nodes(rank).distributed_sampler_kwargs  # it needs no set-up
    everybody = rank.gather(kwargs)
    if set(map(type, everybody)) == {type(None)}:
        raise NotApplicable("the strategy divides no samples")
    require(None not in everybody, f"distributed_sampler_kwargs on two nodes are {everybody}")
    same("num_replicas on two nodes", len({one["num_replicas"] for one in everybody}), 1)
    replicas, ranks = everybody[0]["num_replicas"], sorted({one["rank"] for one in everybody})
    same("the ranks of the data on two nodes of one rank each", ranks, list(range(replicas)))


@check("STR-92", since="0.2", world_sizes=(3,), after=("STR-28", "STR-38"))
def shares_on_unequal_nodes(rank: RankContext) -> None:
    """distributed_sampler_kwargs on nodes of two ranks and of one are those of three ranks on one node.

    Why: node_rank * devices + local_rank gives two ranks one share of the data, and leaves others out.
    Fix: global_rank.
    """
    require_several_ranks(rank)
    expected = rank.create_strategy().distributed_sampler_kwargs
    node, local = divmod(rank.rank, 2)
    size = 1 if node else 2
    devices = rank.component.make_accelerator().get_parallel_devices(range(2 * node, 2 * node + size))
    refused, got = "", None
    with _place_on_a_node(local, size, node):
        try:
            got = rank.create_strategy(devices=devices).distributed_sampler_kwargs
        except (ConfigurationError, UnsupportedCombinationError) as error:
            refused = str(error)
    if any(told := rank.gather(refused)):
        raise NotApplicable(f"it refuses nodes of different sizes: {max(told, key=len)}")
    same("distributed_sampler_kwargs on nodes of two ranks and of one", got, expected)


@check("STR-96", since="0.2", world_sizes=(2,), after=("STR-14", "STR-91"))
def training_on_several_nodes(rank: RankContext) -> None:
    """On two nodes of one rank each, training, sums, means and the rank that saves are as on one node with two ranks.

    Why: gradients that are divided by the number of a node's processes are as many times too large as there are nodes.
    Fix: divide by world_size; what only one rank does is done where is_global_zero is True.
    """
    require_several_ranks(rank)
    with _place_on_a_node(0, 1, rank.rank):
        strategy = _create_on_two_nodes(rank)
        with running(rank, strategy=strategy, may_refuse=True) as run:
            same("world_size on two nodes", strategy.world_size, 2)
            zeros = rank.gather(strategy.is_global_zero)
            same("is_global_zero on two nodes", zeros, [True, False])
            run.train(0, 3)
            run.require_weights("after three steps on two nodes", reference(rank, 3)[0])
            one = torch.full((1,), float(rank.rank + 1), device=strategy.root_device)
            for operation, expected in (("sum", 3.0), ("mean", 1.5)):
                close(f"a {operation} of 1 and 2 on two nodes", strategy.reduce(one, operation).cpu(), [expected], 1e-6)
            path = os.path.join(rank.folder, "nodes.ckpt")
            strategy.save_checkpoint({"rank": rank.rank}, path)
            strategy.wait_for_checkpoints()
            strategy.barrier()
            same("the rank that saved, on two nodes", strategy.load_checkpoint(path), {"rank": 0})
