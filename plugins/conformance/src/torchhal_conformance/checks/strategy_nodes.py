"""STR-91, STR-96: a job on two nodes, of one rank each."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from torchhal.errors import ConfigurationError
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import (
    reference,
    require_several_ranks,
    require_steps_of_the_loop,
    running,
    weights_close,
)


def _alone_on_a_node(rank: RankContext) -> AbstractContextManager[Any]:
    """Give the process the variables of the only rank on its node."""
    numbers = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank.rank), "GROUP_WORLD_SIZE": "2"}
    return mock.patch.dict(os.environ, numbers)


@check("STR-91", since="0.2", world_sizes=(2,), after=("STR-28",))
def sampler_of_several_nodes(rank: RankContext) -> None:
    """On two nodes of one rank each distributed_sampler_kwargs divide the samples as they do on one node of two.

    Why: the rank within the node is 0 on both, so that half of the data was never seen and the other half twice.
    Fix: count among all ranks, not among those of a node.
    """
    refused, kwargs = "", None
    with _alone_on_a_node(rank):
        try:
            kwargs = rank.create_strategy(one_per_node=True).distributed_sampler_kwargs  # it needs no set-up
        except ConfigurationError as error:
            refused = str(error)
    if all(rank.gather(refused)):
        raise NotApplicable(f"the strategy is for one node ({refused})")
    everybody = rank.gather(kwargs)
    if set(map(type, everybody)) == {type(None)}:
        raise NotApplicable("the strategy divides no samples")
    require(None not in everybody, f"distributed_sampler_kwargs on two nodes are {everybody}")
    same("num_replicas on two nodes", len({one["num_replicas"] for one in everybody}), 1)
    replicas, ranks = everybody[0]["num_replicas"], sorted({one["rank"] for one in everybody})
    same("the ranks of the data on two nodes of one rank each", ranks, list(range(replicas)))


@check("STR-96", since="0.2", world_sizes=(2,), after=("STR-14", "STR-91"))
def training_on_several_nodes(rank: RankContext) -> None:
    """On two nodes of one rank each training, sums, means and the rank that saves are as on one node of two.

    Why: gradients that are divided by the number of a node's processes are as many times too large as there are nodes.
    Fix: divide by world_size; what only one rank does is done where is_global_zero is True.
    """
    require_several_ranks(rank)
    require_steps_of_the_loop(rank)
    with _alone_on_a_node(rank):
        refused = ""
        try:
            strategy = rank.create_strategy(one_per_node=True)
        except ConfigurationError as error:
            refused = str(error)
        if all(rank.gather(refused)):
            raise NotApplicable(f"the strategy is for one node ({refused})")
        require(not refused, f"the strategy is refused on one of two nodes: {refused}")
        with running(rank, strategy=strategy) as run:
            same("world_size on two nodes", strategy.world_size, 2)
            zeros = rank.gather(strategy.is_global_zero)
            same("is_global_zero on two nodes", zeros, [True, False])
            run.train(0, 3)
            weights_close("after three steps on two nodes", run.weights(), reference(rank, 3)[0], run.tolerance)
            one = torch.full((1,), float(rank.rank + 1), device=strategy.root_device)
            for operation, expected in (("sum", 3.0), ("mean", 1.5)):
                close(f"a {operation} of 1 and 2 on two nodes", strategy.reduce(one, operation).cpu(), [expected], 1e-6)
            path = os.path.join(rank.folder, "nodes.ckpt")
            strategy.save_checkpoint({"rank": rank.rank}, path)
            strategy.barrier()
            same("the rank that saved, on two nodes", strategy.load_checkpoint(path), {"rank": 0})
