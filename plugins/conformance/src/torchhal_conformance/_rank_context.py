"""Context of a distributed check on each rank: its number, the component under test, and an independent store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from torchhal import registry
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import TorchElasticEnvironment
from torchhal.precision import Precision, SinglePrecision
from torchhal.strategies import Strategy
from torchhal_conformance._author_model import create
from torchhal_conformance._check import CheckFailed, NotApplicable
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._limits import scaled
from torchhal_conformance._worker_pool import CALL

PATIENCE: Final = 20.0
"""Seconds that a rank waits for the others, on an idle machine."""

WORLD_SIZES: Final = (2, 3)
"""Numbers of ranks for most distributed checks: two ranks alone hide mistakes in their order."""

_stores: dict[int, Any] = {}


class RankContext:
    """Context of one distributed check in the process of one rank."""

    def __init__(self, component: ComponentUnderTest, folder: str) -> None:
        self.component = component
        self.folder = folder
        """An empty folder that all ranks see."""
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self._exchanges = 0
        self.trained: set[type[Any]] = set()
        """Classes of the author's models that the check has made."""

    @cached_property
    def dataset(self) -> Any:
        """The author's data; None without them."""
        return None if self.component.data is None else create(self.component.data)

    def create_strategy(
        self,
        *,
        precision: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
        devices: Sequence[torch.device] | None = None,
        one_per_node: bool = False,
        **arguments: Any,
    ) -> Strategy:
        """Return the strategy with the components that ``resolve`` would give it; nothing is set up.

        A component of another kind that is under test is put into ddp. With ``one_per_node`` each rank is the only one
        of its node, as with a component for which all checks are made so.
        """
        one_per_node = one_per_node or self.component.one_per_node
        kind = self.component.kind
        entry = self.component if kind == "strategy" else registry.find("strategy", "ddp")
        strategy: Strategy = entry.create(**arguments)
        if kind == "checkpoint_io":
            checkpoint_io = checkpoint_io or self.component.create()
        elif kind == "precision":
            precision = precision or self.component.create()
        if self.component.model is not None:
            self._refuse_other_models(strategy)
        strategy.timeout = min(strategy.timeout, timedelta(seconds=scaled(PATIENCE)))
        accelerator = self.component.make_accelerator()
        if devices is None:
            indices: Sequence[int] = range(self.size if strategy.multi_device else 1)
            if strategy.multi_device and one_per_node:
                indices = [self.rank]  # the nodes are one machine here
            devices = accelerator.get_parallel_devices(indices)
        strategy.configure(
            accelerator=accelerator,
            precision=precision or SinglePrecision(),
            checkpoint_io=checkpoint_io or registry.find("checkpoint_io", "torch").create(),
            cluster_environment=TorchElasticEnvironment() if strategy.multi_device else None,
            devices=devices,
            num_nodes=self.size if one_per_node else 1,
        )
        return strategy

    def _refuse_other_models(self, strategy: Strategy) -> None:
        """Let a check that trains a model of its own say so, where the strategy may be for the author's alone."""
        connect = strategy.connect

        def checked(module: Any) -> None:
            if type(module) not in self.trained:
                raise NotApplicable("the check is about a model of its own, and a model was given")
            connect(module)

        vars(strategy)["connect"] = checked

    @contextmanager
    def set_up_strategy(self, strategy: Strategy | None = None, **components: Any) -> Iterator[Strategy]:
        """Yield a strategy (created from ``components`` unless given) between its set-up and its teardown."""
        strategy = strategy or self.create_strategy(**components)
        try:
            strategy.setup_environment()
            yield strategy
        finally:
            strategy.teardown()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable value in rank order, through a store that no strategy knows."""
        self._exchanges += 1
        return exchange(str(self._exchanges), value)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Return a tensor of random numbers that depends on ``seed`` alone, not on the rank."""
        generator = torch.Generator().manual_seed(1000 * self.component.seed + seed)
        return torch.randn(*shape, generator=generator)


def side_channel() -> Any:
    """Return a connection to the store that the process with the checks serves."""
    pid = os.getpid()
    if pid not in _stores:
        make = cast(Any, dist).TCPStore
        port = int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=scaled(PATIENCE))
        _stores[pid] = make(os.environ["MASTER_ADDR"], port, None, False, timeout=timeout)
    return _stores[pid]


def exchange(name: str, value: Any = None) -> list[Any]:
    """Return every rank's picklable value in rank order, once per call of a check and ``name``.

    Raises:
        CheckFailed: a rank has not come here in time.
    """
    prefix, store = f"torchhal-conformance/{os.environ[CALL]}/{name}", side_channel()
    store.set(f"{prefix}/{os.environ['RANK']}", pickle.dumps(value))
    values = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        try:
            values.append(pickle.loads(store.get(f"{prefix}/{rank}")))
        except RuntimeError as error:  # torch's own, when the time is over
            seconds = f"{scaled(PATIENCE):g} s"
            raise CheckFailed(f"rank {rank} HANG: it didn't come this far in {seconds}") from error
    return values
