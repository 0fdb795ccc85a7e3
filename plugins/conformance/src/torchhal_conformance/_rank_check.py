"""Make one distributed check in the process of one rank."""

from __future__ import annotations

import torch

import torchhal_conformance.checks  # noqa: F401  registers them
from torchhal.errors import ConfigurationError
from torchhal.resolve import check_fit, composition_of
from torchhal_conformance._check import CHECKS, NotApplicable
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._rank_context import RankContext


def run_check(id: str, component: ComponentUnderTest, folder: str) -> None:
    """Make one check on this rank; :class:`~torchhal_conformance._worker_pool.WorkerPool` calls it in each process."""
    # torch answers once which accelerator it has, and a backward on the CPU asks it
    component.make_accelerator().availability()
    torch.manual_seed(component.seed)
    rank = RankContext(component, folder)
    if component.kind == "strategy":
        try:
            strategy = rank.create_strategy()
            check_fit("strategy", strategy, composition_of(strategy, rank.size))
        except ConfigurationError as error:
            raise NotApplicable(f"it refuses {rank.size} process(es): {error}") from error
    CHECKS[id].function(rank)
